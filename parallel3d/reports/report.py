"""What a run comes to: how well it used each axis of its mesh, its memory, its step times. From its snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monitoring.events.time_parts import NO_TIME, TimeParts, mean_of
from parallel3d.reports.snapshot import RankInfo, RunInfo, RunTotals, Snapshot

AXES = ("dp", "tp", "pp")
ALL_RANKS = "all ranks"
EFFICIENCY_MEANINGS = {
    "dp": "of the time is left when gradients are reduced",
    "tp": "of forward and backward is computing, not exchanging partial results",
    "pp": "of the pipeline's time is no bubble",
}


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the steps that count, in seconds."""

    num_steps: int
    num_warm_up: int
    """That are left out."""
    mean: float
    median: float
    p95: float
    p99: float
    least: float
    most: float

    @staticmethod
    def of(seconds: Sequence[float], num_warm_up: int) -> Statistics | None:
        """None where no step counts."""
        ordered = sorted(seconds)
        if not ordered:
            return None
        mean, (median, p95, p99) = math.fsum(ordered) / len(ordered), (quantile(ordered, q) for q in (0.5, 0.95, 0.99))
        return Statistics(len(ordered), num_warm_up, mean, median, p95, p99, ordered[0], ordered[-1])

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.num_steps,
            "warm_up_steps": self.num_warm_up,
            "step_seconds": {
                "mean": self.mean,
                "median": self.median,
                "p95": self.p95,
                "p99": self.p99,
                "min": self.least,
                "max": self.most,
            },
        }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest, as numpy has it."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def efficiency(parts: TimeParts, mesh: Mapping[str, int], bubble: float | None) -> dict[str, float | None]:
    """By axis, 0 to 1; None for an axis of one rank, and where no time is known.

    Waiting for stragglers counts against an axis where it is the only one: in a mesh of several, the time does not say
    for whose sake it passed, so it stands among the parts alone. `bubble` is the mean of the ranks' ratios.
    """
    several = [axis for axis in AXES if mesh.get(axis, 1) > 1]
    if not parts.total:
        return dict.fromkeys(AXES)
    waiting = parts["straggler"] if len(several) == 1 else 0.0
    working = parts["compute"] + parts["tp_comm"] + waiting
    found = {
        "dp": 1 - (parts["dp_comm"] + waiting) / parts.total,
        "tp": parts["compute"] / working if working else None,
        "pp": None if bubble is None else 1 - bubble,
    }
    return {axis: found[axis] if axis in several else None for axis in AXES}


@dataclass(frozen=True, slots=True)
class Report:
    """All that is said of a run, apart from its curves."""

    run: RunInfo
    totals: RunTotals
    first_loss: float | None
    bandwidth: float | None
    """Of the gradients' all-reduce, the steps' mean in 10^9 bytes a second."""
    parts: TimeParts
    """Seconds of the counted steps, the mean of the ranks."""
    remainder: float | None
    """Seconds of them that are in no part, the mean of the ranks; None where that was not noted."""
    efficiency: Mapping[str, float | None]
    bubble: float | None
    ranks: Sequence[RankInfo]
    memory_budget: int | None
    """Bytes of one rank."""
    bottlenecks: Sequence[Mapping[str, Any]]
    was_watched: bool
    """Whether bottlenecks were looked for."""
    statistics: Statistics | None

    @property
    def memory(self) -> dict[int, int]:
        """Bytes by rank, the most that was seen; without those that are not known."""
        return {rank.rank: rank.memory_bytes for rank in self.ranks if type(rank.memory_bytes) is int}

    def to_json(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "run": self.run.to_json(),
            "overall": {
                **self.totals.to_json(),
                "first_loss": self.first_loss,
                "allreduce_bandwidth_gbps": self.bandwidth,
            },
            "efficiency": dict(self.efficiency),
            "parts": self.parts.shares(),
            "part_seconds": self.parts.to_json(),
            "remainder": remainder_share(self.parts, self.remainder),
            "bubble": self.bubble,
            "memory": {
                "total_bytes": sum(memory.values()) if memory else None,
                "most_bytes": max(memory.values(), default=None),
                "budget_bytes": self.memory_budget,
                "ranks": {str(rank): count for rank, count in memory.items()},
            },
            "bottlenecks": [dict(each) for each in self.bottlenecks],
            "statistics": None if self.statistics is None else self.statistics.to_json(),
            "ranks": [rank.to_json() for rank in self.ranks],
        }


def make_report(
    snapshot: Snapshot,
    step_seconds: Sequence[float],
    num_warm_up: int,
    bandwidths: Sequence[float] = (),
    memory_budget: int | None = None,
    was_watched: bool = True,
) -> Report:
    """step_seconds: of all steps that count. was_watched: whether bottlenecks were looked for."""
    steps, ranks = snapshot.steps, snapshot.ranks
    parts, remainder = _times(ranks) or (_times_of_steps(steps, num_warm_up), None)
    bubble = _mean([rank.bubble for rank in ranks])
    return Report(
        run=snapshot.run,
        totals=snapshot.totals,
        first_loss=steps[0]["loss"] if steps else None,
        bandwidth=_mean(bandwidths),
        parts=parts,
        remainder=remainder,
        efficiency=efficiency(parts, snapshot.run.mesh, bubble),
        bubble=bubble,
        ranks=ranks,
        memory_budget=memory_budget,
        bottlenecks=snapshot.bottlenecks,
        was_watched=was_watched and bool(parts.total),
        statistics=Statistics.of(step_seconds, num_warm_up),
    )


@dataclass(frozen=True, slots=True)
class TimeRow:
    """A row of the table of where the time went."""

    name: str
    parts: TimeParts
    remainder: float | None = None
    """Seconds that are in no part."""
    score: float | None = None
    """A rank's own speed over the best."""


def time_rows(report: Report) -> list[TimeRow]:
    """One for each rank whose time is known, and one for all of them."""
    rows = [
        TimeRow(rank.name, parts, rank.remainder_seconds, rank.straggler_score)
        for rank in report.ranks
        if (parts := rank.parts) is not None
    ]
    return rows if len(rows) == 1 else [*rows, TimeRow(ALL_RANKS, report.parts, report.remainder)]


def remainder_share(parts: TimeParts, remainder: float | None) -> float | None:
    """Of the steps; may be below zero by a little."""
    return None if remainder is None or not parts.total else remainder / (parts.total + remainder)


def _times(ranks: Sequence[RankInfo]) -> tuple[TimeParts, float | None] | None:
    known = [parts for rank in ranks if (parts := rank.parts) is not None]
    if not known:
        return None
    return mean_of(known), _mean([rank.remainder_seconds for rank in ranks])


def _times_of_steps(steps: Sequence[Mapping[str, Any]], num_warm_up: int) -> TimeParts:
    """Of a run that was killed: what was noted of its steps meanwhile."""
    return sum((TimeParts.of(step["parts"]) for step in steps[num_warm_up:] if step["parts"]), NO_TIME)


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for value in values if type(value) in (int, float) and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None
