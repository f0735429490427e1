"""The last steps of a rank, kept until the run ends and then told as spans of a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from monitoring.collectives import CollectiveEvent
from monitoring.trace import ACTIONS, COLLECTIVES, STEPS, Span
from parallel3d.rank_mesh import Mesh
from parallel3d.schedules.actions import Action, receive_of, send_of

if TYPE_CHECKING:
    from parallel3d.performance import TrainStep

KEPT = 3


class _Kept(NamedTuple):
    step: TrainStep
    start: float
    end: float


class LastSteps:
    """Moments are those of time.perf_counter, which on Linux is time.monotonic too."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._kept: deque[_Kept] = deque(maxlen=KEPT)

    def add(self, step: TrainStep, start: float, end: float) -> None:
        """From the end of the step before, to its own."""
        self._kept.append(_Kept(step, start, end))

    def spans(self) -> Iterator[Span]:
        """Of what was kept, and the collectives meanwhile."""
        if not self._kept:
            return
        for kept in self._kept:
            yield from self._of_step(kept)
        yield from map(_of_collective, self._mesh.collectives.since(self._kept[0].start))

    def _of_step(self, kept: _Kept) -> Iterator[Span]:
        step, start, end = kept
        facts = {"loss": step.loss, "tokens": step.tokens, "learning_rate": step.learning_rate}
        yield Span(STEPS, f"step {step.step}", "step", start, end, facts)
        if step.data_seconds > 0:
            yield Span(STEPS, "data", "data", start, min(end, start + step.data_seconds))
        for action, began, ended, waited in step.actions:
            sends, receives = self._messages(step.step, action)
            where: dict[str, Any] = {"stage": action.stage, "microbatch": action.microbatch, "step": step.step}
            if waited:
                where["waited"] = waited
            yield Span(ACTIONS, str(action), action.kind, began, ended, where, sends, receives)

    def _messages(self, step: int, action: Action) -> tuple[str, str]:
        """A message has the name of its receive, of the step, and of the pipeline it is in."""
        dp, tp, _ = self._mesh.coords
        received = receive_of(action)
        if received is not None:
            return f"{step}.{dp}.{tp}.{received}", ""
        return "", f"{step}.{dp}.{tp}.{action}" if send_of(action) is not None else ""


def _of_collective(event: CollectiveEvent) -> Span:
    facts = {"group": event.group, "bytes": event.num_bytes, "ranks": event.num_ranks, "strategy": event.strategy}
    return Span(COLLECTIVES, f"{event.kind} {event.group}", event.kind, event.began, event.began + event.seconds, facts)
