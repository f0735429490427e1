"""Which action of a table waits for which, in plain integers: tables have a hundred thousand actions.

Every action has a number: the first column's actions in their order, then the second column's, and so on. It also has
a cell, (kind * stages + stage) * microbatches + microbatch, which says what it is.

An action always waits for the one before it in its column. So of what it needs, only that counts which this order does
not give already. There is at most one: no action needs two things of other ranks, and one that needs something further
on in its own column waits for ever anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from parallel3d.pipeline.schedules.actions import BACKWARD_FIRST, Action, Kind
from parallel3d.pipeline.schedules.table import Table
from runtime.errors import InvalidCall

KINDS = tuple(Kind)
_PLACE = {kind: place for place, kind in enumerate(KINDS)}
_GRADIENT = len(KINDS)
"""Stands beside the kinds for "B or I": whoever waits for a stage's gradient does not care which of them makes it."""
_ONE_NEED = {
    Kind.W: (_PLACE[Kind.I], 0),
    Kind.SEND_F: (_PLACE[Kind.F], 0),
    Kind.SEND_B: (_GRADIENT, 0),
    Kind.RECV_F: (_PLACE[Kind.SEND_F], -1),
    Kind.RECV_B: (_PLACE[Kind.SEND_B], 1),
}
"""The kinds that need the same on every stage: which kind, and how many stages on."""
_END_OF_LINE = {Kind.SEND_F: -1, Kind.RECV_B: -1, Kind.RECV_F: 0, Kind.SEND_B: 0}
"""What travels, and the stage that can't have it because nobody is beyond."""


@dataclass(frozen=True, slots=True)
class Waits:
    """A checked table: each stage on one rank, no action twice, and all that is needed is somewhere in it."""

    table: Table
    firsts: list[int]
    """The number of each column's first action; at the end, how many actions there are."""
    cells: list[int]
    """By action."""
    needs: list[int]
    """By action: the action it waits for besides the one before it, or -1."""

    def rank_of(self, number: int) -> int:
        return bisect_right(self.firsts, number) - 1

    def place_of(self, number: int) -> int:
        """Its place in its column."""
        return number - self.firsts[self.rank_of(number)]

    def action(self, number: int) -> Action:
        return self.table.columns[self.rank_of(number)][self.place_of(number)]


def read_waits(table: Table) -> Waits:
    """Refuses a table in which something is missing, foreign or there twice."""
    firsts = [0, *accumulate(len(column) for column in table.columns)]
    cells, owners = _read_cells(table)
    numbers = _read_numbers(table, firsts, cells)
    rules = _rules(table, owners)
    needs = [-1] * len(cells)
    for first, stop in pairwise(firsts):
        for number in range(first, stop):
            cell = cells[number]
            for shift in rules[cell // table.microbatches]:
                need = numbers[cell + shift]
                if first <= need < number:
                    continue  # the column's order gives it
                if need < 0:
                    raise _missing(table, cell, cell + shift, owners)
                if needs[number] < 0:  # else it waits for ever as it is
                    needs[number] = need
    return Waits(table, firsts, cells, needs)


def _read_cells(table: Table) -> tuple[list[int], list[int]]:
    """Each action's cell, and each stage's rank (-1 where it has none)."""
    stages, microbatches = table.stages, table.microbatches
    cells: list[int] = []
    owners = [-1] * stages
    for rank, column in enumerate(table.columns):
        for action in column:
            stage, kind, microbatch = action
            if kind is Kind.REDUCE_GRAD and microbatch is None:
                microbatch = 0
            if microbatch is None or not (0 <= stage < stages and 0 <= microbatch < microbatches):
                raise InvalidCall(
                    f"rank {rank} has {action}, but the table has {stages} stages and {microbatches} microbatches, "
                    "both counted from 0. Take it out, or give the table its real size."
                )
            if owners[stage] != rank:
                if owners[stage] >= 0:
                    raise InvalidCall(
                        f"stage {stage} is on rank {owners[stage]} and, with {action}, on rank {rank}. "
                        "Put all its actions into one column."
                    )
                owners[stage] = rank
            if kind in _END_OF_LINE and stage == _END_OF_LINE[kind] % stages:
                raise InvalidCall(f"rank {rank} has {action}, but there is no stage beyond stage {stage}. Take it out.")
            cells.append((_PLACE[kind] * stages + stage) * microbatches + microbatch)
    return cells, owners


def _read_numbers(table: Table, firsts: list[int], cells: list[int]) -> list[int]:
    """By cell, the number of the action that is there, or -1. B and I are there a second time, as the gradient."""
    area = table.stages * table.microbatches
    numbers = [-1] * (area * (_GRADIENT + 1))
    gradients = {_PLACE[kind] for kind in BACKWARD_FIRST}
    for number, cell in enumerate(cells):
        kind = cell // area
        for also in (cell, cell % area + _GRADIENT * area) if kind in gradients else (cell,):
            if numbers[also] >= 0:
                earlier = _name(table, cells[numbers[also]])
                raise InvalidCall(
                    f"rank {bisect_right(firsts, number) - 1} has {_name(table, cell)} after {earlier}: "
                    "a step does that once. Take one of them out."
                )
            numbers[also] = number
    return numbers


def _rules(table: Table, owners: list[int]) -> list[tuple[int, ...]]:
    """By kind and stage: how far from an action's cell the cells are that it needs."""
    kinds = {kind for column in table.columns for _, kind, _ in column}
    travels = not kinds.isdisjoint(_END_OF_LINE)

    def shifts(kind: Kind, stage: int) -> Iterator[int]:
        def to(kind_place: int, stages_on: int = 0) -> int:
            return ((kind_place - _PLACE[kind]) * table.stages + stages_on) * table.microbatches

        def is_far(other: int) -> bool:
            return owners[stage] != owners[other]

        if kind is Kind.F and stage > 0:
            yield to(_PLACE[Kind.RECV_F]) if travels and is_far(stage - 1) else to(_PLACE[Kind.F], -1)
        elif kind in BACKWARD_FIRST:
            yield to(_PLACE[Kind.F])
            if stage + 1 < table.stages:
                yield to(_PLACE[Kind.RECV_B]) if travels and is_far(stage + 1) else to(_GRADIENT, 1)
        elif kind in _ONE_NEED:
            yield to(*_ONE_NEED[kind])

    return [tuple(shifts(kind, stage)) for kind in KINDS for stage in range(table.stages)]


def _name(table: Table, cell: int) -> str:
    """As users write it."""
    code, microbatch = divmod(cell, table.microbatches)
    kind, stage = divmod(code, table.stages)
    if kind == _GRADIENT:
        return f"{Action(stage, Kind.B, microbatch)} or {Action(stage, Kind.I, microbatch)}"
    is_whole = KINDS[kind] is Kind.REDUCE_GRAD
    return str(Action(stage, KINDS[kind], None if is_whole else microbatch))


def _missing(table: Table, cell: int, needed: int, owners: list[int]) -> InvalidCall:
    action, stage = _name(table, cell), needed // table.microbatches % table.stages
    where = f"the column of rank {owners[stage]}" if owners[stage] >= 0 else "a column"
    rank = owners[cell // table.microbatches % table.stages]
    return InvalidCall(
        f"rank {rank} has {action}, which needs {_name(table, needed)}, and no column has it. "
        f"Add it to {where}, or take {action} out."
    )
