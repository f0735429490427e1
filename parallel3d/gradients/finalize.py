"""Gradients of which each rank has only a part, and that are added up before replicas add theirs.

Parameters that see only a part of the sequence have the other parts on the tensor-parallel peers. A parameter that
stages of several pipeline ranks have, such as an embedding that is also the head, has a part on each of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from monitoring.events.events import Axis, What
from monitoring.events.recorder import Recorder
from parallel3d.rank_mesh import Mesh
from parallel3d.tensor.sharded import needs_tp_sum


class LateGradients:
    """Those of one rank. `pieces` are the flat gradients of `of_sequences`. Where there is a recorder, adding up along
    an axis leaves an event: replicas have no part in it."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        owners: Mapping[str, tuple[int, ...]],
        mesh: Mesh,
        recorder: Recorder | None = None,
    ) -> None:
        """trained: this rank's parameters by name. owners: by name, for those that several pipeline ranks have: these
        ranks."""
        self._mesh, self._recorder = mesh, recorder
        self.of_sequences = [each for each in trained.values() if mesh.tp.size > 1 and needs_tp_sum(each)]
        # By name, because stages may use them in another order, and messages don't say whose gradient they are.
        self._owners = {trained[name]: owners[name] for name in sorted(trained) if name in owners}
        self.parameters = tuple(dict.fromkeys([*self.of_sequences, *self._owners]))
        self.pieces: list[torch.Tensor] = []

    async def settle(self) -> None:
        """Add the parts up. All ranks that have some have to call it."""
        start = time.monotonic()
        for work in [self._mesh.tp.all_reduce(piece) for piece in self.pieces]:
            await work
        if self.pieces:
            start = self._leave(Axis.TP, start)
        for parameter, owners in self._owners.items():
            await self._add_up(home_of(parameter), owners)
        if self._owners:
            self._leave(Axis.PP, start)

    def _leave(self, axis: Axis, start: float) -> float:
        """An event that ends now."""
        now = time.monotonic()
        if self._recorder is not None:
            self._recorder.record(What.REDUCE, self._recorder.step, start, now, axis=axis)
        return now

    async def _add_up(self, gradient: torch.Tensor, owners: tuple[int, ...]) -> None:
        pp = self._mesh.pp
        parts = {rank: gradient if rank == pp.rank else torch.empty_like(gradient) for rank in owners}
        peers = [rank for rank in owners if rank != pp.rank]
        sends = [pp.send(gradient, rank) for rank in peers]
        receives = [pp.recv(parts[rank], rank) for rank in peers]
        for work in (*sends, *receives):
            await work
        await self._mesh.compute(_add_in_order, list(parts.values()), gradient)


def _add_in_order(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """The same order on all ranks, so that all have the same bits."""
    first, *others = parts
    found = first.clone()
    for part in others:
        found += part
    total.copy_(found)


def home_of(parameter: nn.Parameter) -> torch.Tensor:
    """Where its gradient lies."""
    home: torch.Tensor = parameter.gradient_home  # type: ignore[attr-defined]
    return home
