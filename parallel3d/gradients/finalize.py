"""Partial gradients inside a replica, which are summed before the replicas reduce theirs.

With sequence parallelism, a replicated parameter such as a norm's has a partial gradient on each tensor-parallel rank.
A parameter that stages of several pipeline ranks have, such as an embedding tied to the head, has one on each of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from monitoring.events.events import Axis, What
from monitoring.events.recorder import Recorder
from parallel3d.rank_mesh import Mesh


def needs_tp_sum(parameter: torch.Tensor) -> bool:
    """Whether the gradient is partial, so that it has to be summed over the tensor-parallel ranks: each of them has the
    parameter, but uses it on its slice of the sequence."""
    return bool(getattr(parameter, "needs_tp_sum", False))


def mark_for_sum(parameter: torch.Tensor) -> None:
    """Make `needs_tp_sum` true for this parameter."""
    parameter.needs_tp_sum = True  # type: ignore[attr-defined]


class LateGradients:
    """The partial gradients of one rank. With a recorder, each axis that is summed over leaves an event.

    trained: this rank's trained parameters by name. owners: the pipeline ranks of parameters that several of them have.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        owners: Mapping[str, tuple[int, ...]],
        mesh: Mesh,
        recorder: Recorder | None = None,
    ) -> None:
        self._mesh, self._recorder = mesh, recorder
        self.sequence_parallel = [each for each in trained.values() if mesh.tp.size > 1 and needs_tp_sum(each)]
        # Sorted by name: stages may have them in another order, and messages don't name the parameter.
        self._owners = {trained[name]: owners[name] for name in sorted(trained) if name in owners}
        self.parameters = tuple(dict.fromkeys([*self.sequence_parallel, *self._owners]))
        self.flat_grads: list[torch.Tensor] = []
        """Those of `sequence_parallel`, as few flat tensors; set it once the buckets exist."""

    async def settle(self) -> None:
        """Sum the partial gradients. Every rank that has some must call it."""
        start = time.monotonic()
        for work in [self._mesh.tp.all_reduce(flat) for flat in self.flat_grads]:
            await work
        if self.flat_grads:
            start = self._record(Axis.TP, start)
        for parameter, owners in self._owners.items():
            await self._sum_over(owners, parameter.main_grad)  # type: ignore[attr-defined]
        if self._owners:
            self._record(Axis.PP, start)

    def _record(self, axis: Axis, start: float) -> float:
        """Record an event that ends now."""
        now = time.monotonic()
        if self._recorder is not None:
            self._recorder.record(What.REDUCE, self._recorder.step, start, now, axis=axis)
        return now

    async def _sum_over(self, owners: tuple[int, ...], gradient: torch.Tensor) -> None:
        pp = self._mesh.pp
        parts = {rank: gradient if rank == pp.rank else torch.empty_like(gradient) for rank in owners}
        peers = [rank for rank in owners if rank != pp.rank]
        sends = [pp.send(gradient, rank) for rank in peers]
        receives = [pp.recv(parts[rank], rank) for rank in peers]
        for work in (*sends, *receives):
            await work
        await self._mesh.compute(_add_in_order, list(parts.values()), gradient)


def _add_in_order(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Add in the same order on all ranks, so that all get the same bits."""
    first, *others = parts
    found = first.clone()
    for part in others:
        found += part
    total.copy_(found)
