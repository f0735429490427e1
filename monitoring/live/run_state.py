"""What a run's ranks have reported so far. Not thread-safe."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from monitoring.analysis.facts import RankFacts, RunFacts
from monitoring.analysis.totals import WARM_UP
from monitoring.analysis.traffic import Traffic
from monitoring.analysis.window import RecentLag
from monitoring.events.loop_lag import LagHistogram
from monitoring.events.time_parts import TimeParts
from monitoring.messages import RankEndpoint, Ready, RunStep

MOST_STEPS, MOST_LOGS = 10_000, 1000
_MOST_AHEAD = 256  # extra entries for steps that are analysed before rank 0 reports them
_QUEUE_REPORTS = 20


class StepCount(NamedTuple):
    """Totals over a set of steps."""

    num_steps: int
    tokens: int
    seconds: float


@dataclass(slots=True)
class RunState:
    facts: RunFacts
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    """Ranks that have joined their mesh."""
    ready: dict[int, Ready] = field(default_factory=dict)
    endpoints: dict[int, RankEndpoint] = field(default_factory=dict)
    steps: deque[RunStep] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    parts: dict[int, TimeParts] = field(default_factory=dict)
    """By step, the ranks' mean. Usually known after rank 0 reports the step, sometimes before."""
    num_steps: int = 0
    """All steps that rank 0 has reported, including those no longer in `steps`."""
    num_tokens: int = 0
    step_seconds: float = 0.0
    warm_up: list[RunStep] = field(default_factory=list)
    """The first steps, which are left out of speed figures."""
    memory: dict[int, dict[str, int]] = field(default_factory=dict)
    """Latest report of each rank: bytes by kind. `process` is the total, the other kinds are parts of it."""
    peak_memory: dict[int, int] = field(default_factory=dict)
    """Largest reported `process` of each rank."""
    queue: dict[int, deque[float]] = field(default_factory=dict)
    """Latest reports of each rank, newest last: batches that were ready when it asked for one."""
    queue_capacity: int | None = None
    lag: dict[int, LagHistogram] = field(default_factory=dict)
    recent_lag: RecentLag = field(default_factory=RecentLag)
    offsets: dict[int, float] = field(default_factory=dict)
    """By rank, seconds to add to its times to get rank 0's clock."""
    dropped: dict[int, int] = field(default_factory=dict)
    """Number of lost events by rank."""
    malformed: int = 0
    nonfinite: int = 0
    """Steps whose gradients were not finite."""
    last_nonfinite: int | None = None
    last_seen: dict[int, float] = field(default_factory=dict)
    """Time of each rank's latest message, in seconds of time.time."""
    logs: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_LOGS))
    traffic: Traffic = field(init=False)

    def __post_init__(self) -> None:
        facts = self.facts
        self.traffic = Traffic({"world": facts.world_size, "dp": facts.dp, "tp": facts.tp, "pp": facts.pp})

    def add_step(self, step: RunStep) -> None:
        self.steps.append(step)
        if self.num_steps < WARM_UP:
            self.warm_up.append(step)
        self.num_steps += 1
        self.num_tokens += step.tokens
        self.step_seconds += step.seconds

    def counted(self) -> StepCount:
        """Totals without the warm-up steps; the latest step always counts."""
        left_out = self.warm_up[: max(0, self.num_steps - 1)]
        return StepCount(
            self.num_steps - len(left_out),
            self.num_tokens - sum(step.tokens for step in left_out),
            self.step_seconds - sum(step.seconds for step in left_out),
        )

    def add_parts(self, step: int, parts: TimeParts) -> None:
        self.parts[step] = parts
        if len(self.parts) > MOST_STEPS + _MOST_AHEAD:
            del self.parts[next(iter(self.parts))]

    def steps_json(self, steps: Iterable[RunStep]) -> list[dict[str, Any]]:
        """The form that the page reads."""
        return [step.to_json_with(self.parts.get(step.step)) for step in steps]

    def add_queue(self, rank: int, mean: float, capacity: int) -> None:
        self.queue_capacity = capacity
        self.queue.setdefault(rank, deque(maxlen=_QUEUE_REPORTS)).append(mean)
