"""All schedules beside each other: the same work for every rank, dealt out differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.schedules.limits import (
    IMPLIES_TWO_VIRTUAL_STAGES,
    NEEDS_VIRTUAL_STAGES,
    SCHEDULES,
    better_microbatches,
)
from parallel3d.pipeline.simulation.costs import Costs
from parallel3d.pipeline.simulation.simulator import simulate
from runtime.errors import InvalidCall


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What a whole rank takes for one microbatch, however many stages it is cut into."""

    forward: float = 1.0
    input_backward: float = 1.0
    weight_backward: float = 1.0
    transfer: float = 0.0
    """From rank to rank: as long for a smaller stage, because what travels is as large."""

    def of_stages(self, ranks: int, virtual_stages: int) -> Costs:
        return Costs(
            ranks * virtual_stages,
            self.forward / virtual_stages,
            self.input_backward / virtual_stages,
            self.weight_backward / virtual_stages,
            self.transfer,
            memory=1 / virtual_stages,
        )


class Outcome(NamedTuple):
    """What a schedule comes to."""

    makespan: float
    relative_makespan: float
    """Beside 1F1B's."""
    bubble_ratio: float
    peak_activations: float
    """Of the rank that holds the most, in microbatches of a whole rank."""


class Refusal(NamedTuple):
    """Why a schedule can't have these sizes, and the nearest that it can have."""

    reason: str
    microbatches: int
    virtual_stages: int


class Entry(NamedTuple):
    """A schedule of the comparison."""

    schedule: str
    virtual_stages: int
    result: Outcome | Refusal


def compare(ranks: int, microbatches: int, virtual_stages: int | None, costs: RankCosts) -> tuple[Entry, ...]:
    """Every schedule; `virtual_stages` are for those that can choose, 2 unless given."""
    whole = simulate(build("1f1b", ranks, microbatches), costs.of_stages(ranks, 1)).makespan
    return tuple(_entry(schedule, ranks, microbatches, virtual_stages, costs, whole) for schedule in SCHEDULES)


def _entry(
    schedule: str, ranks: int, microbatches: int, virtual_stages: int | None, costs: RankCosts, whole: float
) -> Entry:
    virtual = 1
    if schedule in IMPLIES_TWO_VIRTUAL_STAGES:
        virtual = 2
    elif schedule in NEEDS_VIRTUAL_STAGES:
        virtual = 2 if virtual_stages is None else virtual_stages
    try:
        table = build(schedule, ranks, microbatches, virtual)
    except InvalidCall as error:
        better = better_microbatches(schedule, ranks, microbatches) or (microbatches,)
        nearest = min(better, key=lambda number: abs(number - microbatches))
        reason = str(error).removeprefix(f"{schedule}: ")
        return Entry(schedule, virtual, Refusal(reason, nearest, max(virtual, 2)))
    result = simulate(table, costs.of_stages(ranks, virtual))
    peak = max(peak.memory for peak in result.peak_memory)
    relative = result.makespan / whole if whole else 1.0
    return Entry(schedule, virtual, Outcome(result.makespan, relative, result.bubble_ratio, peak))
