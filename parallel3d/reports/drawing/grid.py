"""The grid for terminals: a row a rank, time to the right, in bands as wide as the terminal.

An action is as wide as it takes long, and wide enough for its name; where that can't be, names win.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, TextIO

from parallel3d.pipeline.schedules.actions import Action, Kind
from parallel3d.reports.drawing.lanes import Lane, end_of, width_of_a_unit
from parallel3d.reports.drawing.palette import LETTERS, MEANINGS, on_terminal, shade
from parallel3d.reports.drawing.words import number, round_steps

_RESET, _DIM = "\x1b[0m", "\x1b[2m"
_SAME_MOMENT = 1e-9
"""Times that differ by less than this part of the whole are the same: they were added up in another order."""
_FULL_ENOUGH = 0.75
"""A band may be cut where all ranks begin something, if that leaves it at least so full."""

Paint = Callable[[str, str], str]
"""Text and its colour (empty for text that is to be dim) to what is printed."""


class _Cell(NamedTuple):
    """Its last letter is left empty."""

    first: int
    stop: int
    action: Action | None
    """None where the rank is idle."""
    colour: str = ""


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def painter(environ: Mapping[str, str]) -> Paint:
    """Paints with the colours that the terminal knows."""
    exact = environ.get("COLORTERM") in ("truecolor", "24bit")

    def paint(text: str, colour: str) -> str:
        return f"{on_terminal(colour, LETTERS, exact) if colour else _DIM}{text}{_RESET}"

    return paint


def grid(lanes: Sequence[Lane], width: int, paint: Paint | None = None) -> list[str]:
    """The lines. Without paint, plain text. No action is broken at the width; one that is wider is left whole."""
    scale = _Scale(lanes)
    rows = [list(_cells(lane, scale, max(lane.num_stages for lane in lanes))) for lane in lanes]
    margin = max(len("time"), *(len(lane.label) for lane in lanes))
    room = max([width - margin - 3 + 1, *(cell.stop - cell.first for row in rows for cell in row)])
    lines: list[str] = []
    for left, right, parts in _bands(rows, room):
        if lines:
            lines.append("")
        axis = f"{'time':<{margin}} | {_axis(scale, left, right, room)}".rstrip()
        lines.append(paint(axis, "") if paint else axis)
        for lane, cells in zip(lanes, parts, strict=True):
            lines.append(f"{lane.label:<{margin}} | {_row(cells, left, paint)}".rstrip())
    if paint:
        lines += ["", *_legend(lanes, width, paint)]
    return lines


class _Scale:
    """Which letter of a line belongs to which moment."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.end = end_of(lanes)
        self.unit = width_of_a_unit(lanes, 1, 1)
        names = (len(str(span.action)) for lane in lanes for span in lane.visible())
        self.idle = max(names, default=1) + 1
        starts_of_ends: dict[int, list[tuple[int, int]]] = {}
        moments = {0}
        for lane in lanes:
            for span in lane.visible():
                start, end = self._moment(span.start), self._moment(span.end)
                if start == end:
                    continue  # too short to be seen
                starts_of_ends.setdefault(end, []).append((start, len(str(span.action)) + 1))
                moments |= {start, end}
        self._columns: dict[int, int] = {}
        column = 0
        for moment in sorted(moments):
            wanted = round(moment * self.end * _SAME_MOMENT * self.unit)
            needed = (self._columns[start] + name for start, name in starts_of_ends.get(moment, ()))
            column = max(column, wanted, *needed, 0)
            self._columns[moment] = column
        self._moments = sorted(self._columns)
        self.ticks = self._ticks()

    def _moment(self, time: float) -> int:
        return round(time / (self.end * _SAME_MOMENT))

    @property
    def width(self) -> int:
        return self._columns[self._moments[-1]]

    def _ticks(self) -> list[tuple[int, str]]:
        """As many as there is room for."""
        most = self.width / self.idle
        while True:
            ticks = [(self.column(time), number(time)) for time in round_steps(self.end, most)]
            if len(ticks) < 2 or all(at + len(text) < later for (at, text), (later, _) in pairwise(ticks)):
                return ticks
            most = len(ticks) / 2

    def column(self, time: float) -> int:
        """Between two moments at which something happens, time is evenly spread."""
        moment = self._moment(time)
        index = min(bisect_right(self._moments, moment), len(self._moments) - 1)
        before, after = self._moments[max(index - 1, 0)], self._moments[index]
        if moment in self._columns or before == after:
            return self._columns.get(moment, 0)
        part = (moment - before) / (after - before)
        return round(self._columns[before] + part * (self._columns[after] - self._columns[before]))


def _cells(lane: Lane, scale: _Scale, stages: int) -> Iterator[_Cell]:
    """From the first letter to the last, without a gap."""
    at = 0
    for span in lane.visible():
        first, stop = scale.column(span.start), scale.column(span.end)
        if first == stop:
            continue
        yield from _idle(at, first, scale.idle)
        colour = shade(span.action.kind, lane.place_of_stage(span.action.stage), stages)
        yield _Cell(first, stop, span.action, colour)
        at = stop
    yield from _idle(at, scale.width, scale.idle)


def _idle(first: int, stop: int, step: int) -> Iterator[_Cell]:
    return (_Cell(at, min(at + step, stop), None) for at in range(first, stop, step))


def _bands(rows: list[list[_Cell]], room: int) -> Iterator[tuple[int, int, list[list[_Cell]]]]:
    """Where each band begins and ends, and its cells. What would not fit is in the next band."""
    common = sorted(set.intersection(*({cell.stop for cell in row} for row in rows)))
    rest = [list(row) for row in rows]
    while any(rest):
        left = min(row[0].first for row in rest if row)
        full = left + room
        clean = max((stop for stop in common if left < stop <= full), default=left)
        right = clean if clean - left >= _FULL_ENOUGH * room or clean == common[-1] else full
        stops = [bisect_right(row, right, key=attrgetter("stop")) for row in rest]
        parts = [row[:stop] for row, stop in zip(rest, stops, strict=True)]
        rest = [row[stop:] for row, stop in zip(rest, stops, strict=True)]
        yield left, min(right, max(part[-1].stop for part in parts if part)), parts


def _axis(scale: _Scale, left: int, right: int, room: int) -> str:
    """The times of one band; of the last one, no part."""
    line = ""
    for at, text in scale.ticks:
        if left <= at < right and at - left + len(text) < room:
            line = f"{line:<{at - left}}{text}"
    return line


def _row(cells: list[_Cell], left: int, paint: Paint | None) -> str:
    line, at = "", left
    for cell in cells:
        line += " " * (cell.first - at) + _cell(cell, cell.stop - cell.first - 1, paint) + " "
        at = cell.stop
    return line


def _cell(cell: _Cell, width: int, paint: Paint | None) -> str:
    if cell.action is None:
        text = f"{'.' * (width > 0):<{width}}"
        return paint(text, "") if paint and width else text
    name = str(cell.action)
    return paint(f"{name:<{width}}", cell.colour) if paint else f"{name:-<{width}}"


def _legend(lanes: Sequence[Lane], width: int, paint: Paint) -> list[str]:
    """The kinds that there are; with several stages a rank, the shades of each."""
    stages = max(lane.num_stages for lane in lanes)
    there = {span.action.kind for lane in lanes for span in lane.visible()}
    entries: list[tuple[int, str]] = []
    for kind in (kind for kind in Kind if kind in there):
        shades = "".join(paint(f" {kind} ", shade(kind, place, stages)) for place in range(stages))
        meaning = MEANINGS.get(kind, "")
        entries.append((stages * (len(kind) + 2) + 1 + len(meaning), f"{shades} {meaning}"))
    if stages > 1:
        text = "shades: stages of a rank, first to last"
        entries.append((len(text), text))
    lines, free = [""], width
    for length, text in entries:
        if lines[-1] and length + 3 > free:
            lines.append("")
            free = width
        lines[-1] += f"   {text}" if lines[-1] else text
        free -= length + 3
    return lines


def columns(lists: Sequence[Sequence[Action]], width: int) -> list[str]:
    """A column a rank, an action a line; as many ranks beside each other as the width has room for."""
    texts = [[f"rank {rank}", *map(str, actions)] for rank, actions in enumerate(lists)]
    each = max(len(text) for column in texts for text in column) + 2
    beside = max(1, (width + 2) // each)
    lines: list[str] = []
    for first in range(0, len(texts), beside):
        block = texts[first : first + beside]
        if lines:
            lines.append("")
        for index in range(max(map(len, block))):
            cells = (column[index] if index < len(column) else "" for column in block)
            lines.append("".join(f"{cell:<{each}}" for cell in cells).rstrip())
    return lines
