"""From a table and its costs to what happens. A pure function of both."""

from __future__ import annotations

from itertools import pairwise
from math import fsum
from operator import mul

from parallel3d.pipeline.schedules.actions import Kind
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation.clock import Times, delays_of, run_clock, seconds_of
from parallel3d.pipeline.simulation.costs import Costs
from parallel3d.pipeline.simulation.deadlock import ScheduleDeadlock, trace_deadlock
from parallel3d.pipeline.simulation.outcome import CriticalStep, Peak, Reason, Simulation
from parallel3d.pipeline.simulation.waits import Waits, read_waits
from runtime.errors import InvalidCall


def simulate(table: Table, costs: Costs) -> Simulation:
    """Carry out a table on paper.

    A rank does one action at a time, in the order of its column, as soon as it is free and has what the action needs.
    Sends hold up nobody and receives are posted ahead, so a transfer only delays the one who waits for it. A reduction
    starts at its place in the column and holds up nobody either.

    Raises ScheduleDeadlock if ranks wait for each other for ever, and InvalidCall for a table that is not whole.
    """
    if costs.stages != table.stages:
        raise InvalidCall(
            f"the costs are of {costs.stages} stages, but the table of {table.schedule} has {table.stages}. "
            f"Give costs of {table.stages} stages."
        )
    waits, seconds, delays = read_waits(table), seconds_of(costs), delays_of(costs)
    times = run_clock(waits, seconds, delays)
    deadlock = trace_deadlock(waits, times.stuck)
    if deadlock is not None:
        raise ScheduleDeadlock(deadlock)
    ends = _ends_with_reductions(waits, times, costs)
    makespan = max(ends, default=0.0)
    idle, stage_idle = _idle(waits, times, makespan)
    peak_activations, peak_memory = _peaks(waits, times, costs)
    return Simulation(
        table=table,
        makespan=makespan,
        starts=_by_rank(waits, times.starts),
        ends=_by_rank(waits, ends),
        busy=_busy(waits, seconds),
        idle=idle,
        stage_idle=stage_idle,
        critical_path=_critical_path(waits, times, ends, delays),
        peak_activations=peak_activations,
        peak_memory=peak_memory,
    )


def makespan(table: Table, costs: Costs) -> float:
    """Only how long it takes, for whoever tries many: several times as quick. The table is free of deadlock."""
    waits = read_waits(table)
    times = run_clock(waits, seconds_of(costs), delays_of(costs))
    return max(_ends_with_reductions(waits, times, costs), default=0.0)


def _by_rank(waits: Waits, numbers: list[float]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(numbers[first:stop]) for first, stop in pairwise(waits.firsts))


def _ends_with_reductions(waits: Waits, times: Times, costs: Costs) -> list[float]:
    """When each action is over. A reduction goes on while its rank is free again."""
    ends = times.ends.copy()
    for first, column in zip(waits.firsts, waits.table.columns, strict=False):
        for number, (stage, kind, _) in enumerate(column, first):
            if kind is Kind.REDUCE_GRAD:
                ends[number] += costs.reduce_grad[stage]
    return ends


def _busy(waits: Waits, seconds: list[float]) -> tuple[float, ...]:
    width = waits.table.microbatches
    return tuple(
        fsum(seconds[cell // width] for cell in waits.cells[first:stop]) for first, stop in pairwise(waits.firsts)
    )


def _idle(waits: Waits, times: Times, makespan: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each rank, and of each stage. Added up from the gaps, so that rounding never makes it negative."""
    idle, stage_idle = [], [0.0] * waits.table.stages
    for first, column in zip(waits.firsts, waits.table.columns, strict=False):
        free = total = 0.0
        for number, action in enumerate(column, first):
            gap = times.starts[number] - free
            if gap:
                total += gap
                stage_idle[action.stage] += gap
            free = times.ends[number]
        if column:
            stage_idle[column[-1].stage] += makespan - free
        idle.append(total + (makespan - free))
    return tuple(idle), tuple(stage_idle)


def _peaks(waits: Waits, times: Times, costs: Costs) -> tuple[tuple[int, ...], tuple[Peak, ...]]:
    """Of each stage, and of each rank. A column's order is the order of its times, so nothing has to be sorted."""
    most, peaks = [0] * waits.table.stages, []
    for first, column in zip(waits.firsts, waits.table.columns, strict=False):
        stages = sorted({stage for stage, _, _ in column})
        sizes = [costs.memory[stage] for stage in stages]
        index_of = {stage: index for index, stage in enumerate(stages)}
        live = [0] * len(stages)
        peak = Peak(0.0, 0.0)
        for number, (stage, kind, _) in enumerate(column, first):
            if kind is Kind.F:
                live[index_of[stage]] += 1
                most[stage] = max(most[stage], live[index_of[stage]])
                memory = sum(map(mul, live, sizes))
                if memory > peak.memory:
                    peak = Peak(memory, times.starts[number])
            elif kind is Kind.B or kind is Kind.W:
                live[index_of[stage]] -= 1
        peaks.append(peak)
    return tuple(most), tuple(peaks)


def _critical_path(waits: Waits, times: Times, ends: list[float], delays: list[float]) -> tuple[CriticalStep, ...]:
    """Back from what ends last, each time to what the action waited for."""
    steps = []
    number = max(range(len(ends)), key=ends.__getitem__, default=-1)
    while number >= 0:
        start, before, need = times.starts[number], _before(waits, number), waits.needs[number]
        if before >= 0 and times.ends[before] == start:
            cause, reason, transfer = before, Reason.RANK, 0.0
        elif need >= 0:
            cause, reason, transfer = need, Reason.DATA, delays[waits.cells[number] // waits.table.microbatches]
        else:
            cause, reason, transfer = -1, Reason.START, 0.0
        rank, action = waits.rank_of(number), waits.action(number)
        steps.append(CriticalStep(rank, action, start, ends[number], reason, transfer))
        number = cause
    return tuple(reversed(steps))


def _before(waits: Waits, number: int) -> int:
    """What kept the rank busy before this, or -1. No reduction: they keep nobody busy."""
    column, place = waits.table.columns[waits.rank_of(number)], waits.place_of(number)
    while place > 0:
        place, number = place - 1, number - 1
        if column[place].kind is not Kind.REDUCE_GRAD:
            return number
    return -1
