"""A run at a moment: what its page, its report and their JSON are made from, while it goes on and afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monitoring.events.time_parts import PARTS, TimeParts
from parallel3d.pipeline.simulation.measured import Measured, compare
from parallel3d.reports.drawing.lanes import Lane, lanes_of, lanes_of_measured
from runtime.errors import Coords, InvalidCall, name_rank

MOST_STEPS = 2000
"""Of a snapshot: more than a picture has pixels."""

Json = dict[str, Any]
T = TypeVar("T")


class _Plain:
    """Fields that are plain values of JSON."""

    __slots__ = ()

    def to_json(self) -> Json:
        names: tuple[str, ...] = self.__slots__
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class RunInfo(_Plain):
    """What the run is, and how. None: not known, as of a folder that is not complete."""

    run_id: str
    status: str
    started: float | None
    """Seconds of time.time."""
    world_size: int
    mesh: Mapping[str, int]
    """Ranks along dp, tp and pp."""
    model: str | None = None
    parameters: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    steps: int | None = None
    """That are configured."""
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RunTotals(_Plain):
    """Of all steps; speed and the length of a step without the warm-up."""

    steps: int
    tokens: int
    tokens_per_second: float
    step_seconds: float | None
    mfu: float | None
    final_loss: float | None


@dataclass(frozen=True, slots=True)
class RankInfo(_Plain):
    """One rank; its times are those of the counted steps. None: not known."""

    rank: int
    coords: Mapping[str, int] | None
    host: str | None = None
    device: str | None = None
    parameters: int | None = None
    memory_bytes: int | None = None
    """The most that was seen."""
    memory_kinds: Mapping[str, int] = field(default_factory=dict)
    bubble: float | None = None
    straggler_score: float | None = None
    seconds: Mapping[str, float] | None = None
    """By part."""
    remainder_seconds: float | None = None
    compute_cpu_seconds: float | None = None
    core_wait_seconds: float | None = None

    @property
    def name(self) -> str:
        return name_rank(self.rank, None if self.coords is None else Coords(**self.coords))

    @property
    def parts(self) -> TimeParts | None:
        """None where nothing is known of the rank's time."""
        seconds = self.seconds or {}
        parts = TimeParts.of({part: seconds.get(part) or 0.0 for part in PARTS})
        return parts if parts.total else None


@dataclass(frozen=True, slots=True)
class Snapshot:
    run: RunInfo
    totals: RunTotals
    ranks: Sequence[RankInfo]
    bottlenecks: Sequence[Mapping[str, Any]]
    pipeline: Json | None
    """See `pipeline_view`."""
    steps: Sequence[Mapping[str, Any]] = ()
    """At most `MOST_STEPS`, as `RunStep.to_json_with` has them."""
    log: Sequence[Mapping[str, Any]] = ()

    def state_json(self) -> Json:
        """What has no history, and is sent as a whole when it changes."""
        return {
            "run": self.run.to_json(),
            "totals": self.totals.to_json(),
            "ranks": [rank.to_json() for rank in self.ranks],
            "bottlenecks": list(self.bottlenecks),
            "pipeline": self.pipeline,
        }

    def to_json(self) -> Json:
        return {**self.state_json(), "steps": list(self.steps), "log": list(self.log)}


def thinned(rows: Sequence[T], most: int = MOST_STEPS) -> Sequence[T]:
    """At most so many, evenly spread, the first and the last among them."""
    if len(rows) <= most:
        return rows
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def pipeline_view(step: int, schedule: str, measured: Measured) -> Json | None:
    """A step's pipeline: a list of actions for each of its ranks, measured and planned. None if it can't be planned.

    Moments are seconds from the step's first action. The plan is the same table, simulated with what the step's own
    actions took.
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


def _actions(lanes: Iterable[Lane]) -> list[list[Json]]:
    """Only computing: the rest is too short to be seen."""
    return [
        [
            {"action": str(span.action), "start": span.start, "end": span.end}
            for span in lane.spans
            if span.action.is_compute
        ]
        for lane in lanes
    ]
