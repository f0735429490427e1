"""What was made of the events: each rank's share of a step, and means over a window of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from monitoring.events.loop_lag import LagHistogram
from monitoring.events.time_parts import NO_TIME, TimeParts


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Of one stage in one step: all its microbatches together, without waits for tensor-parallel peers."""

    forward: float = 0.0
    backward: float = 0.0
    """Whole ones, and the input part of split ones."""
    weight: float = 0.0
    """The weight part of split ones."""

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's share of one step."""

    rank: int
    seconds: float
    """Of the whole step, from the end of the one before."""
    parts: TimeParts
    remainder: float
    """What is left of the step when all parts, `other` too, are taken off; may be below zero."""
    compute_wall: float
    """Own forwards and backwards by the clock, without waits for peers."""
    compute_cpu: float
    """The same in processor time."""
    core_wait: float
    """Of `other`: computing without a core. 0 on devices other than the processor."""
    pipeline: float
    """From the step's first action in this rank's pipeline to the last end of all its ranks."""
    lateness: float = 0.0
    """By how much ranks with the same work came earlier to where they meet, as far as nothing known explains it:
    neither waits for others or in its pipeline, nor data, saving or longer computing."""
    stages: Mapping[int, StageSeconds] = field(default_factory=dict)

    @property
    def bubble_ratio(self) -> float:
        """Of the pipeline's time."""
        return self.parts["bubble"] / self.pipeline if self.pipeline > 0 else 0.0


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """Calls of one op on one axis, all ranks together, in a step; in a window, on average."""

    op: str
    axis: str
    calls: float
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of the whole mesh."""

    step: int
    seconds: float
    """The mean of the ranks'."""
    ranks: tuple[RankStep, ...]
    """In order of their numbers; all of them."""
    parts: TimeParts
    """The mean of the ranks'."""
    traffic: tuple[AxisTraffic, ...] = ()


@dataclass(frozen=True, slots=True)
class RankWindow:
    """Means of a rank over a window's steps."""

    rank: int
    seconds: float
    parts: TimeParts
    remainder: float
    compute_wall: float
    compute_cpu: float
    core_wait: float
    bubble_ratio: float
    score: float | None
    """Own speed over the best, 0 to 1; None before it is known."""
    stages: Mapping[int, StageSeconds] = field(default_factory=dict)
    memory: int | None = None
    """Bytes, the most seen."""


@dataclass(frozen=True, slots=True)
class Window:
    """What rules look at: the latest steps, warm-up left out. Empty where nothing is known yet."""

    num_steps: int = 0
    first_step: int = 0
    last_step: int = 0
    seconds: float = 0.0
    """A step's mean."""
    ranks: Mapping[int, RankWindow] = field(default_factory=dict)
    parts: TimeParts = NO_TIME
    """The ranks' mean."""
    traffic: tuple[AxisTraffic, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    """Named by the detector."""
    lag: Mapping[int, LagHistogram] = field(default_factory=dict)
    """Of ranks' event loops, lately."""
    queue: Mapping[int, float] = field(default_factory=dict)
    """Mean number of batches that wait in a rank's queue when it asks for one."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than it should be, step after step."""

    rank: int
    score: float
    """Own speed over what is compared with."""
    compared_with: str
    """`peers`: ranks with the same work. `itself`: its own earlier steps. `processor`: it had a core for less of its
    computing than other ranks. `arrival`: it comes late to where ranks meet, for a reason other than its computing,
    its data, its saving or its pipeline."""
    since_step: int
    host: str | None = None
    """Where all ranks of a host, and none elsewhere, are slow."""

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "score": self.score,
            "compared_with": self.compared_with,
            "since_step": self.since_step,
            "host": self.host,
        }


class Severity(StrEnum):
    """In rising order."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Something that costs time or will, with its remedy."""

    kind: str
    severity: Severity
    message: str
    """One sentence, with numbers."""
    evidence: Mapping[str, float | int | str]
    remedy: str
    """What to do, in words."""
    key: str
    """The YAML key to change, such as `pipeline.microbatches`."""
    value: str | None = None
    """What to set it to, where that can be said."""
    gain: float | None = None
    """The share of the step that the remedy would save, as predicted; None where that can't be said."""
    rank: int | None = None
    host: str | None = None
    axis: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "severity": self.severity.value,
            "message": self.message,
            "evidence": dict(self.evidence),
            "remedy": self.remedy,
            "key": self.key,
            "value": self.value,
            "gain": self.gain,
            "rank": self.rank,
            "host": self.host,
            "axis": self.axis,
        }
