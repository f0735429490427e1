"""Actions that wait for each other: found before anything runs, and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from parallel3d.pipeline.schedules.actions import Action
from parallel3d.pipeline.schedules.table import Column, Table
from parallel3d.pipeline.simulation.clock import run_clock
from parallel3d.pipeline.simulation.waits import KINDS, Waits, read_waits
from runtime.errors import InvalidCall

SMALL = 12
"""A table of at most so many ranks, and so many actions on each, is drawn whole: it fits a terminal."""
AROUND = 2
"""How many actions are drawn on each side of a marked one in a larger table."""


class Place(NamedTuple):
    """An action and where it stands."""

    rank: int
    position: int
    """In the rank's column."""
    action: Action


class Blocked(NamedTuple):
    """A rank that can't go on."""

    at: Place
    """Its next action."""
    needs: Place
    """What that waits for: the next blocked rank's next action, or one further on in its column."""


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Ranks that wait for each other in a circle; as text, a drawing of it."""

    table: Table
    cycle: tuple[Blocked, ...]
    """The first one's rank is the lowest."""

    def __str__(self) -> str:
        lines = ["deadlock: these actions wait for each other"]
        for index, (at, needs) in enumerate(self.cycle):
            end = ", which has not come" if index == 0 else ""
            lines.append(f"  rank {at.rank}: {at.action} waits for {needs.action} (rank {needs.rank}){end}")
            ahead = self.cycle[(index + 1) % len(self.cycle)].at
            if needs != ahead:
                lines.append(f"  rank {needs.rank}: {needs.action} comes after {ahead.action} in its column")
        lines += ["", *self._grid(), "", "One of the actions that come after another has to come before it."]
        return "\n".join(lines)

    def _grid(self) -> list[str]:
        """The columns as rows, the actions of the circle in brackets; of a large table only what is around them."""
        columns = self.table.columns
        marked: dict[int, set[int]] = {}
        for place in (place for blocked in self.cycle for place in blocked):
            marked.setdefault(place.rank, set()).add(place.position)
        if len(columns) <= SMALL and max(map(len, columns)) <= SMALL:
            drawn = {rank: set(range(len(column))) for rank, column in enumerate(columns)}
        else:
            drawn = {rank: _around(marked[rank], len(columns[rank])) for rank in sorted(marked)}
        width = max(len(str(columns[rank][index])) for rank in drawn for index in drawn[rank]) + 2
        label = len(str(max(drawn)))
        lines = [
            f"  rank {rank:<{label}} | {_row(columns[rank], marked.get(rank, set()), drawn[rank], width)}".rstrip()
            for rank in drawn
        ]
        left_out = len(columns) - len(drawn)
        return [*lines, f"  ({left_out} more ranks)"] if left_out else lines


def _around(marked: set[int], length: int) -> set[int]:
    near = {index + step for index in marked for step in range(-AROUND, AROUND + 1)}
    return near & set(range(length))


def _row(column: Column, marked: set[int], drawn: set[int], width: int) -> str:
    cells = []
    for is_drawn, indexes in groupby(range(len(column)), drawn.__contains__):
        if is_drawn:
            texts = (f"[{column[index]}]" if index in marked else f" {column[index]}" for index in indexes)
            cells += [text.ljust(width) for text in texts]
        else:
            cells.append(f"({len(list(indexes))} more)")
    return " ".join(cells)


class ScheduleDeadlock(InvalidCall):
    """The table can't be carried out: some ranks would wait for each other for ever."""

    def __init__(self, deadlock: Deadlock) -> None:
        super().__init__(deadlock)
        self.deadlock = deadlock


def find_deadlock(table: Table) -> Deadlock | None:
    """None is a proof: every action was carried out once, whatever the actions cost."""
    waits = read_waits(table)
    no_time = [0.0] * (len(KINDS) * table.stages)
    return trace_deadlock(waits, run_clock(waits, no_time, no_time).stuck)


def trace_deadlock(waits: Waits, stuck: list[int]) -> Deadlock | None:
    """The circle that the stuck ranks end in. What a stuck rank waits for is in a stuck rank's column, so following
    them comes back to a rank seen before."""
    rank = next((rank for rank, number in enumerate(stuck) if number >= 0), None)
    if rank is None:
        return None
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = waits.rank_of(waits.needs[stuck[rank]])
    cycle = seen[seen.index(rank) :]
    lowest = cycle.index(min(cycle))
    cycle = cycle[lowest:] + cycle[:lowest]
    return Deadlock(waits.table, tuple(_blocked(waits, stuck[rank]) for rank in cycle))


def _blocked(waits: Waits, number: int) -> Blocked:
    return Blocked(_place(waits, number), _place(waits, waits.needs[number]))


def _place(waits: Waits, number: int) -> Place:
    return Place(waits.rank_of(number), waits.place_of(number), waits.action(number))
