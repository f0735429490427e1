"""A step's pipeline for whoever draws it: a list of actions a rank, as they were and as planned, in JSON's values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from parallel3d.pipeline.simulation.measured import Measured, compare
from parallel3d.reports.drawing.lanes import Lane, lanes_of, lanes_of_measured
from runtime.errors import InvalidCall


def pipeline_view(step: int, schedule: str, measured: Measured) -> dict[str, Any] | None:
    """Moments are seconds from the step's first action; a list a rank of the pipeline. None where it can't be planned.

    The plan is the same table simulated with what the step's own actions took.
    """
    try:
        compared = compare(measured)
    except (InvalidCall, ValueError, ArithmeticError):  # a table that is not whole, of a run that was cut short
        return None
    late = compared.first_late
    return {
        "step": step,
        "schedule": schedule,
        "stages": measured.table.stages,
        "microbatches": measured.table.microbatches,
        "measured": _actions(lanes_of_measured(measured)),
        "planned": _actions(lanes_of(compared.planned)),
        "makespan": {"planned": compared.planned.makespan, "measured": measured.makespan},
        "bubble_ratio": {"planned": compared.planned.bubble_ratio, "measured": measured.bubble_ratio},
        "first_late": None if late is None else str(late),
    }


def _actions(lanes: Iterable[Lane]) -> list[list[dict[str, Any]]]:
    """What is computed: the rest is too short to be seen."""
    return [
        [
            {"action": str(span.action), "start": span.start, "end": span.end}
            for span in lane.spans
            if span.action.is_compute
        ]
        for lane in lanes
    ]
