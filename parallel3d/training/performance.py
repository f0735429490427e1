"""How long a rank's steps took and where the time went, as far as the rank alone can tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from monitoring.analysis.totals import WARM_UP
from monitoring.events.time_parts import MEANINGS, NO_TIME, TimeParts, mean_of
from monitoring.messages import RunStep
from parallel3d.pipeline.pipeline_pass import TimedAction
from parallel3d.pipeline.schedules.actions import RECEIVES, SENDS
from parallel3d.training.step_events import Span, StepMoments

_LATEST = 1000  # steps that performance is about


@dataclass(frozen=True, slots=True)
class TrainStep(RunStep):
    """One step as a rank made it; `seconds` are those of the step alone, without the wait for its batch."""

    data_seconds: float
    """How long this rank waited for its batch before the step."""
    reduce_seconds: float
    """From the last action to the end of the gradients' reduction, and before the first action, while replicas
    exchange how much their parts of the batch count."""
    optimizer_seconds: float
    """Without `meet_seconds`."""
    tensor_seconds: float
    """How long this rank waited for its tensor-parallel peers."""
    actions: tuple[TimedAction, ...]
    """This rank's, in order."""
    meet_seconds: float = 0.0
    """How long this rank waited for the norms of all ranks."""
    core_wait_seconds: float = 0.0
    """How long forwards and backwards waited for a core; 0 if that is not measured."""
    began: float = 0.0
    """The end of the step before, in seconds of time.monotonic."""
    ended: float = 0.0

    @classmethod
    def of(
        cls,
        moments: StepMoments,
        whole: Span,
        actions: tuple[TimedAction, ...],
        *,
        start: float,
        has_cpu_times: bool,
        **values: Any,
    ) -> TrainStep:
        """From what was measured; `start` is when the step was asked for, and `values` are the other fields."""
        agreed = 0.0 if moments.agreed is None else moments.agreed.seconds
        return cls(
            seconds=whole.end - start,
            data_seconds=0.0 if moments.data is None else moments.data.seconds,
            reduce_seconds=agreed + moments.reduced - actions[-1].end,
            optimizer_seconds=whole.end - moments.reduced - moments.met.seconds,
            meet_seconds=moments.met.seconds,
            tensor_seconds=sum(each.waited for each in actions),
            core_wait_seconds=_core_wait(actions) if has_cpu_times else 0.0,
            actions=actions,
            began=whole.start,
            ended=whole.end,
            **values,
        )

    @property
    def pipeline_seconds(self) -> float:
        """How long this rank waited for other stages and computed nothing meanwhile."""
        return sum(each.end - each.start - each.cpu for each in self.actions if each.action.kind in RECEIVES)

    @property
    def transfer_seconds(self) -> float:
        """How long it was sending."""
        return sum(each.end - each.start for each in self.actions if each.action.kind in SENDS)

    @property
    def compute_seconds(self) -> float:
        """Forwards and backwards with a core, including weight gradients that were computed inside of receives."""
        done = sum(each.end - each.start for each in self.actions if each.action.is_compute)
        meanwhile = sum(each.cpu for each in self.actions if each.action.kind in RECEIVES)
        return done + meanwhile - self.tensor_seconds - self.core_wait_seconds

    @property
    def bubble(self) -> float:
        """The share of time, from its first action to its last, in which this rank neither computed nor sent."""
        if not self.actions:
            return 0.0
        span = self.actions[-1].end - self.actions[0].start
        return self.pipeline_seconds / span if span > 0 else 0.0

    def parts(self, seconds: float) -> TimeParts:
        """Where these seconds went, which include the step; what it does not explain is `other`.

        A rank alone can't know whether another one came late or the schedule makes it wait: all waits for other stages
        are `bubble`, those for replicas `dp_comm`, for tensor-parallel ranks `tp_comm`, and `straggler` is 0. The run's
        metrics are attributed from all ranks' events (monitoring.analysis.attribution) and know.
        """
        is_pipelined = any(each.action.kind in RECEIVES for each in self.actions)
        known = {
            "compute": self.compute_seconds,
            "tp_comm": self.tensor_seconds,
            "pp_comm": self.transfer_seconds,
            "dp_comm": self.reduce_seconds,
            "bubble": self.pipeline_seconds + (self.meet_seconds if is_pipelined else 0.0),
            "data": self.data_seconds,
            "optimizer": self.optimizer_seconds + (0.0 if is_pipelined else self.meet_seconds),
        }
        return TimeParts.of({**known, "other": seconds - sum(known.values())})


def _core_wait(actions: Sequence[TimedAction]) -> float:
    """How long computing waited for a core."""
    computed = [each for each in actions if each.action.is_compute]
    return sum(max(0.0, each.end - each.start - each.waited - each.cpu) for each in computed)


class _Times(NamedTuple):
    """What is kept of a step: a run may have millions."""

    seconds: float
    """Including the wait for data."""
    tokens: int
    bubble: float
    parts: TimeParts


class Performance:
    """Of one rank's latest steps; the run's first ones are left out."""

    def __init__(self, parameters: int) -> None:
        self.parameters = parameters
        """Elements of this rank's parameters."""
        self.num_steps = 0
        self.total = NO_TIME
        """Where the time of all steps went, the first ones included."""
        self._steps: deque[_Times] = deque(maxlen=_LATEST)

    def add(self, step: TrainStep) -> None:
        """Called by the coordinator."""
        if self.num_steps == WARM_UP:
            self._steps.clear()
        self.num_steps += 1
        seconds = step.seconds + step.data_seconds
        parts = step.parts(seconds)
        self.total += parts
        self._steps.append(_Times(seconds, step.tokens, step.bubble, parts))

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
        """Where the seconds of an average step went, by the names that metrics have, as this rank sees it (see
        `TrainStep.parts`); they add up to it."""
        return (mean_of([step.parts for step in self._steps]) if self._steps else NO_TIME).to_json()

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
        parts = {name: seconds for name, seconds in self.parts().items() if seconds}
        total = sum(parts.values())
        lines = [
            f"{self.num_steps} steps, {1e3 * self.step_seconds:.1f} ms each (median), "
            f"{self.tokens_per_second:,.0f} tokens/s, bubble {100 * self.bubble:.1f} %",
            *(
                f"{name:<10}{1e3 * part:9.2f} ms {100 * part / total:6.1f} %  {MEANINGS[name]}"
                for name, part in parts.items()
            ),
        ]
        return "\n".join(lines)
