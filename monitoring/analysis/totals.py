"""What a rank's steps took, added up: all of them, for counters; and those that count for speed, for reports."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from monitoring.analysis.observations import RankStep
from monitoring.events.time_parts import NO_TIME, TimeParts

WARM_UP = 2
"""Steps that load what torch loads late, and the second still grows its buffers; so they say nothing of speed."""


@dataclass(slots=True)
class StepSums:
    """Of some steps of a rank, in seconds."""

    num_steps: int = 0
    seconds: float = 0.0
    parts: TimeParts = NO_TIME
    remainder: float = 0.0
    unattributed: float = 0.0
    """The remainders without their signs, so that they don't make up for each other."""
    compute_cpu: float = 0.0
    core_wait: float = 0.0
    bubble_ratios: float = 0.0
    """One for each step."""

    def add(self, step: RankStep) -> None:
        self.num_steps += 1
        self.seconds += step.seconds
        self.parts += step.parts
        self.remainder += step.remainder
        self.unattributed += abs(step.remainder)
        self.compute_cpu += step.compute_cpu
        self.core_wait += step.core_wait
        self.bubble_ratios += step.bubble_ratio

    def merged(self, other: StepSums) -> StepSums:
        return StepSums(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def bubble(self) -> float:
        """The mean share of the pipeline's time."""
        return self.bubble_ratios / self.num_steps if self.num_steps else 0.0

    def to_json(self) -> dict[str, Any]:
        """As `metrics.json` has it."""
        return {
            "steps": self.num_steps,
            "seconds": self.parts.to_json(),
            "total_seconds": self.seconds,
            "remainder_seconds": self.remainder,
            "compute_cpu_seconds": self.compute_cpu,
            "core_wait_seconds": self.core_wait,
            "bubble": self.bubble,
        }


@dataclass(slots=True)
class RankTotals:
    """Of one rank. One step always counts, so where there is no other yet it is the last of the warm-up."""

    uncounted: StepSums = field(default_factory=StepSums)
    counted: StepSums = field(default_factory=StepSums)

    @property
    def all(self) -> StepSums:
        return self.uncounted.merged(self.counted)

    def add(self, step: RankStep, warm_up: int) -> None:
        if self.uncounted.num_steps < warm_up:
            self.uncounted, self.counted = self.all, StepSums()
        self.counted.add(step)
