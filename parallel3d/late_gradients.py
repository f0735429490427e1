"""Gradients of which each rank has only a part, and that are added up before replicas add theirs.

Parameters that see only a part of the sequence have the other parts on the tensor-parallel peers. A parameter that
stages of several pipeline ranks have, such as an embedding that is also the head, has a part on each of them.
"""

from __future__ import annotations

import torch
from torch import nn

from parallel3d.rank_mesh import Mesh
from parallel3d.rank_part import RankPart
from parallel3d.sharded import needs_tp_sum


class LateGradients:
    """Those of one rank."""

    def __init__(self, part: RankPart, mesh: Mesh) -> None:
        self._tp, self._pp = mesh.tp, mesh.pp
        trained = {name: each for each, name in part.names.items() if each.requires_grad}
        self._of_sequences = [each for each in trained.values() if mesh.tp.size > 1 and needs_tp_sum(each)]
        # By name, because stages may use them in another order, and messages don't say whose gradient they are.
        self._owners = {trained[name]: part.owners[name] for name in sorted(trained) if name in part.owners}
        self.parameters = tuple(dict.fromkeys([*self._of_sequences, *self._owners]))

    async def settle(self) -> None:
        """Add the parts up. All ranks that have some have to call it."""
        if self._of_sequences:
            homes = [home_of(each) for each in self._of_sequences]
            joined = torch.cat([each.flatten() for each in homes])
            await self._tp.all_reduce(joined)
            sizes = [each.numel() for each in homes]
            for home, total in zip(homes, torch.split(joined, sizes), strict=True):
                home.copy_(total.view_as(home))
        for parameter, owners in self._owners.items():
            await self._add_up(home_of(parameter), owners)

    async def _add_up(self, gradient: torch.Tensor, owners: tuple[int, ...]) -> None:
        """In the order of ranks on each of them, so that all have the same bits."""
        parts = {rank: gradient if rank == self._pp.rank else torch.empty_like(gradient) for rank in owners}
        peers = [rank for rank in owners if rank != self._pp.rank]
        sends = [self._pp.send(gradient, rank) for rank in peers]
        receives = [self._pp.recv(parts[rank], rank) for rank in peers]
        for work in (*sends, *receives):
            await work
        total = parts[owners[0]].clone()
        for rank in owners[1:]:
            total += parts[rank]
        gradient.copy_(total)


def home_of(parameter: nn.Parameter) -> torch.Tensor:
    """Where its gradient lies."""
    home: torch.Tensor = parameter.gradient_home  # type: ignore[attr-defined]
    return home
