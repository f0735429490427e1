"""What is drawn: a lane a rank, with its actions and their times. Planned and measured runs look the same here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parallel3d.pipeline.schedules.actions import Action
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.pipeline.simulation.outcome import Simulation

_STRETCH = 8
"""What takes less than an eighth of the longest action does not decide how wide a unit of time is drawn."""


class Span(NamedTuple):
    """An action, from when to when."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Lane:
    """One row. Its spans are in the order of their times and don't overlap."""

    label: str
    spans: tuple[Span, ...]

    @cached_property
    def _stages(self) -> tuple[int, ...]:
        return tuple(sorted({span.action.stage for span in self.spans}))

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def place_of_stage(self, stage: int) -> int:
        """Which of the lane's stages it is: 0 is the first."""
        return self._stages.index(stage)

    def visible(self) -> Iterator[Span]:
        """What takes time."""
        return (span for span in self.spans if span.end > span.start)


def lanes_of(simulation: Simulation) -> tuple[Lane, ...]:
    """A lane a rank."""
    return tuple(
        Lane(f"rank {rank}", tuple(map(Span, starts, ends, column)))
        for rank, (column, starts, ends) in enumerate(
            zip(simulation.table.columns, simulation.starts, simulation.ends, strict=True)
        )
    )


def lanes_of_measured(measured: Measured) -> tuple[Lane, ...]:
    """A lane a rank, with what was computed."""
    return tuple(
        Lane(f"rank {rank}", tuple(span for span in map(Span, starts, ends, column) if span.action.is_compute))
        for rank, (column, starts, ends) in enumerate(
            zip(measured.table.columns, measured.starts, measured.ends, strict=True)
        )
    )


def end_of(lanes: Sequence[Lane]) -> float:
    """When all is over."""
    return max((span.end for lane in lanes for span in lane.spans), default=0.0)


def width_of_a_unit(lanes: Sequence[Lane], letter: float, around: float) -> float:
    """How wide a unit of time has to be for the names to fit, when a letter and what stands around a name are so wide.

    0 where nothing takes time.
    """
    spans = [span for lane in lanes for span in lane.visible()]
    longest = max((span.end - span.start for span in spans), default=0.0)
    return max(
        ((len(str(span.action)) * letter + around) / max(span.end - span.start, longest / _STRETCH) for span in spans),
        default=0.0,
    )
