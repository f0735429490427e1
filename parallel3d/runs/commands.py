"""What a run's owner wishes of all ranks, agreed by them for the same step: a stop, another learning rate, and that
they gather what they have to tell."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from parallel3d.rank_mesh import Mesh
from process_groups.work import Work


class Wish(NamedTuple):
    """All that is wished at a time; the newest counts."""

    number: int = 0
    """Of the wishes so far."""
    stops: bool = False
    learning_rate: float | None = None
    """None: as configured."""
    room: int = 0
    """Bytes for each rank in a gathering beside the next step; 0: there is none."""


class Wishes:
    """Rank 0 tells its wish when a step begins, and all ranks know it when it ends: the broadcast travels meanwhile."""

    def __init__(self, mesh: Mesh) -> None:
        self._group, self._told = mesh.world, Wish()
        self._shared = mesh.world.empty(4, dtype=torch.float64)
        self._under_way: Work | None = None

    def tell(self, wish: Wish) -> None:
        """When a step begins, on every rank; what others than rank 0 wish does not count."""
        self._told = wish
        if self._group.size > 1:
            rate = math.nan if wish.learning_rate is None else wish.learning_rate
            if self._group.rank == 0:
                self._shared.copy_(torch.tensor([wish.number, wish.stops, rate, wish.room], dtype=torch.float64))
            self._under_way = self._group.broadcast(self._shared, root=0)

    async def agreed(self) -> Wish:
        """When the step has ended: what counts from the next one on, the same on every rank."""
        if self._under_way is None:
            return self._told
        await self._under_way
        number, stops, rate, room = self._shared.tolist()
        return Wish(int(number), bool(stops), None if math.isnan(rate) else rate, int(room))
