"""What a rank's steps took, and what for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from parallel3d.executor import Timed
from parallel3d.schedules.actions import Kind

WARM_UP = 2  # steps that load what torch loads late, and say nothing of those that follow
_LATEST = 1000  # steps that performance is about
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_SENDS = (Kind.SEND_F, Kind.SEND_B)


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One step. What is the whole mesh's is the same on every rank."""

    step: int
    """From 0."""
    loss: float
    """The mean over the whole batch."""
    grad_norm: float
    """Of all gradients of the mesh together, before they were clipped."""
    learning_rate: float
    tokens: int
    """Targets of the whole batch."""
    seconds: float
    data_seconds: float
    """How long this rank waited for its batch before the step."""
    reduce_seconds: float
    """From the last action to the end of the gradients' reduction."""
    optimizer_seconds: float
    tensor_seconds: float
    """How long this rank waited for its tensor-parallel peers."""
    actions: tuple[Timed, ...]
    """This rank's, in order."""
    all_reduce_bandwidth: float | None = None
    """Bus bandwidth in 10⁹ bytes a second: of the gradients' reduction; with a single replica, of what tensor-parallel
    ranks added up. None where nothing was."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def pipeline_seconds(self) -> float:
        """How long this rank waited for other stages."""
        return sum(each.end - each.start for each in self.actions if each.action.kind in _RECEIVES)

    @property
    def transfer_seconds(self) -> float:
        """How long it sent."""
        return sum(each.end - each.start for each in self.actions if each.action.kind in _SENDS)

    @property
    def compute_seconds(self) -> float:
        done = sum(each.end - each.start for each in self.actions if each.action.is_compute)
        return done - self.tensor_seconds

    @property
    def bubble(self) -> float:
        """The share of its column's time in which this rank neither computed nor sent."""
        if not self.actions:
            return 0.0
        span = self.actions[-1].end - self.actions[0].start
        return self.pipeline_seconds / span if span > 0 else 0.0


_PARTS: dict[str, Callable[[TrainStep], float]] = {
    "waiting for data": lambda step: step.data_seconds,
    "compute": lambda step: step.compute_seconds,
    "waiting for tensor-parallel ranks": lambda step: step.tensor_seconds,
    "waiting for other stages": lambda step: step.pipeline_seconds,
    "sending to other stages": lambda step: step.transfer_seconds,
    "reducing gradients": lambda step: step.reduce_seconds,
    "optimizer": lambda step: step.optimizer_seconds,
}


class _Times(NamedTuple):
    """What is kept of a step: a run may have millions."""

    seconds: float
    """The wait for data included."""
    tokens: int
    bubble: float
    parts: tuple[float, ...]


class Performance:
    """Of one rank's latest steps; the run's first ones are left out."""

    def __init__(self, parameters: int) -> None:
        self.parameters = parameters
        """Numbers that this rank trains."""
        self.num_steps = 0
        self._steps: deque[_Times] = deque(maxlen=_LATEST)

    def add(self, step: TrainStep) -> None:
        """Made by the coordinator."""
        if self.num_steps == WARM_UP:
            self._steps.clear()
        self.num_steps += 1
        parts = tuple(part(step) for part in _PARTS.values())
        self._steps.append(_Times(step.seconds + step.data_seconds, step.tokens, step.bubble, parts))

    @property
    def tokens_per_second(self) -> float:
        """The whole mesh's."""
        seconds = sum(step.seconds for step in self._steps)
        return sum(step.tokens for step in self._steps) / seconds if seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Of a typical step."""
        return median(step.seconds for step in self._steps) if self._steps else 0.0

    @property
    def bubble(self) -> float:
        return fmean(step.bubble for step in self._steps) if self._steps else 0.0

    def parts(self) -> dict[str, float]:
        """Where the seconds of an average step went; they add up to it."""
        if not self._steps:
            return {}
        columns = zip(*(step.parts for step in self._steps), strict=True)
        parts = {name: fmean(column) for name, column in zip(_PARTS, columns, strict=True)}
        return {**parts, "other": fmean(step.seconds for step in self._steps) - sum(parts.values())}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "steps": self.num_steps,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            "bubble": self.bubble,
            "parameters": self.parameters,
            "seconds": self.parts(),
        }

    def report(self) -> str:
        """For people."""
        if not self._steps:
            return "no step was made yet"
        parts = self.parts()
        total = sum(parts.values())
        lines = [
            f"{self.num_steps} steps, {1e3 * self.step_seconds:.1f} ms each, "
            f"{self.tokens_per_second:,.0f} tokens/s, bubble {100 * self.bubble:.1f} %",
            *(f"{name:<34}{1e3 * part:9.2f} ms {100 * part / total:6.1f} %" for name, part in parts.items()),
        ]
        return "\n".join(lines)
