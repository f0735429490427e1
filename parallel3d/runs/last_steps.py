"""The last steps of a rank, told as spans of a trace when the run ends, from the events that its recorder still has."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from monitoring.events.event_spans import spans_of
from monitoring.events.events import unpack
from monitoring.events.recorder import Recorder
from monitoring.events.trace import Span
from parallel3d.rank_mesh import Mesh

if TYPE_CHECKING:
    from parallel3d.training.performance import TrainStep

KEPT = 3  # where no configuration says how many


class LastSteps:
    """Of one rank. Without a recorder there is nothing to tell."""

    def __init__(self, mesh: Mesh, recorder: Recorder | None) -> None:
        self._mesh, self._recorder = mesh, recorder
        num_steps = KEPT if mesh.config is None else mesh.config.monitoring.trace_steps
        self._facts: deque[tuple[int, dict[str, Any]]] = deque(maxlen=num_steps)

    def add(self, step: TrainStep) -> None:
        """Which has ended just now."""
        facts = {"loss": step.loss, "tokens": step.tokens, "learning_rate": step.learning_rate}
        self._facts.append((step.step, facts))

    def spans(self, offset: float = 0.0) -> Iterator[Span]:
        """Of the last steps, with `offset` added to this rank's moments."""
        if self._recorder is None or not self._facts:
            return
        facts = dict(self._facts)
        dp, tp, _ = self._mesh.coords
        events = (event for event in unpack(self._recorder.latest()) if event.step >= min(facts))
        yield from spans_of(events, f"{dp}.{tp}", facts, offset)
