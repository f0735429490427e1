"""What a simulated table shows: its times, its bubble, its critical path, and what its ranks hold at most."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from parallel3d.pipeline.schedules.actions import Action
from parallel3d.pipeline.schedules.table import Table


class Reason(StrEnum):
    """Why an action did not start earlier."""

    START = "start"
    """It is the first."""
    RANK = "rank"
    """Its rank was busy with the action before it."""
    DATA = "data"
    """What it needs came from another rank."""


class CriticalStep(NamedTuple):
    """An action that nothing may delay; the one before it in the path is the one it waited for."""

    rank: int
    action: Action
    start: float
    end: float
    reason: Reason
    transfer: float
    """Seconds on the way to it; 0 where its reason is not data. The path has no other gap."""


class Peak(NamedTuple):
    """The most that a rank holds."""

    memory: float
    """In the unit of `Costs.memory`."""
    at: float
    """Seconds from the start; the first such moment."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """Seconds count from the start of the table."""

    table: Table
    makespan: float
    """When the last action ends, reductions included."""
    starts: tuple[tuple[float, ...], ...]
    """By rank, in the order of its column."""
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]
    """By rank: seconds of forwards and backwards."""
    idle: tuple[float, ...]
    """By rank: the rest of the makespan."""
    stage_idle: tuple[float, ...]
    """By stage: the part of its rank's idle seconds that came before its actions, or after it if the rank's last
    action is its own. The stages of a rank add up to the rank."""
    critical_path: tuple[CriticalStep, ...]
    peak_activations: tuple[int, ...]
    """By stage: the most microbatches between the start of F and the end of B, or of W."""
    peak_memory: tuple[Peak, ...]
    """By rank, over all its stages."""

    @property
    def bubble_ratio(self) -> float:
        """The idle part of all ranks' time."""
        return self._part(sum(self.idle)) / max(self.table.num_ranks, 1)

    @property
    def rank_bubble_ratios(self) -> tuple[float, ...]:
        return tuple(self._part(idle) for idle in self.idle)

    @property
    def stage_bubble_ratios(self) -> tuple[float, ...]:
        return tuple(self._part(idle) for idle in self.stage_idle)

    def _part(self, seconds: float) -> float:
        return seconds / self.makespan if self.makespan else 0.0
