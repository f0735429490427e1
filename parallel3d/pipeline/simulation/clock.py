"""When each action starts and ends, if every rank carries out its column in order and as early as it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.pipeline.schedules.actions import Kind
from parallel3d.pipeline.simulation.costs import Costs
from parallel3d.pipeline.simulation.waits import KINDS, Waits

NEVER = -1.0
"""The times of an action that is not carried out. Real times are not negative."""


@dataclass(frozen=True, slots=True)
class Times:
    """By action. If ranks wait for each other for ever, the rest of their columns is never carried out."""

    starts: list[float]
    ends: list[float]
    """When its rank is free again."""
    stuck: list[int]
    """By rank: the action it waits with for ever, or -1."""


def run_clock(waits: Waits, seconds: Sequence[float], delays: Sequence[float]) -> Times:
    """`seconds` and `delays` are by kind and stage: how long an action takes, how long what it waits for travels.

    Each rank goes on until what it needs has not come; it goes on again when that is done. In which order ranks get
    their turn does not change a time: a start is the later of two ends, and both are fixed.
    """
    width, firsts, cells, needs = waits.table.microbatches, waits.firsts, waits.cells, waits.needs
    starts, ends = [NEVER] * len(cells), [NEVER] * len(cells)
    ranks = len(firsts) - 1
    heads, free = firsts[:-1], [0.0] * ranks
    sleepers = [-1] * len(cells)  # by action, the rank that goes on when it is done
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        number, stop, now = heads[rank], firsts[rank + 1], free[rank]
        while number < stop:
            code = cells[number] // width
            need = needs[number]
            if need >= 0:
                arrival = ends[need]
                if arrival < 0:
                    sleepers[need] = rank
                    break
                arrival += delays[code]
                if arrival > now:
                    now = arrival
            starts[number] = now
            now += seconds[code]
            ends[number] = now
            if sleepers[number] >= 0:
                ready.append(sleepers[number])
            number += 1
        heads[rank], free[rank] = number, now
    return Times(starts, ends, [head if head < stop else -1 for head, stop in zip(heads, firsts[1:], strict=True)])


def seconds_of(costs: Costs) -> list[float]:
    """By kind and stage: how long a rank is busy with it. Sends, receives and reductions hold up no rank."""
    backward = [dx + dw for dx, dw in zip(costs.input_backward, costs.weight_backward, strict=True)]
    busy = {Kind.F: costs.forward, Kind.B: backward, Kind.I: costs.input_backward, Kind.W: costs.weight_backward}
    nothing = (0.0,) * costs.stages
    return [seconds for kind in KINDS for seconds in busy.get(kind, nothing)]


def delays_of(costs: Costs) -> list[float]:
    """By kind and stage: how long that takes to arrive which it waits for, from another rank."""
    there, back = (0.0, *costs.transfer), (*costs.backward_transfer, 0.0)
    ways = {Kind.F: there, Kind.RECV_F: there, Kind.B: back, Kind.I: back, Kind.RECV_B: back}
    nothing = (0.0,) * costs.stages
    return [seconds for kind in KINDS for seconds in ways.get(kind, nothing)]
