"""Schedule tables as CSV files in torch's format: a row per rank, a cell per time step. Errors show the bad cell."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from monitoring.text import printable
from parallel3d.pipeline.schedules.actions import Action, Kind, parse_actions
from parallel3d.pipeline.schedules.limits import CSV_PREFIX
from parallel3d.pipeline.schedules.steps import in_steps
from parallel3d.pipeline.schedules.table import Table
from runtime.errors import InvalidCall

# torch writes these actions for weights that are sharded over the replicas (FSDP). They are ignored here.
_FOR_SHARDED_WEIGHTS = re.compile(r"\s*\d+(UNSHARD|RESHARD)\s*", re.ASCII)
_CELLS_AROUND = 6  # cells shown on each side of the bad one, so that the line fits a terminal
_LONGEST_CELL = 24


class _Cell(NamedTuple):
    """The position of an action in the file, counted from 0."""

    row: int
    cell: int
    part: int = 0
    """0 or 1 in an overlapped pair."""


_Placed = tuple[_Cell, Action]


def read_csv(path: str | Path) -> Table:
    """Read and check the table in a file.

    An empty cell means that the rank waits. Sends, receives and reductions are optional. The two actions of a pair
    such as `(0F3;0B1)OVERLAP_F_B` become consecutive actions.
    """
    sheet = _Sheet(str(path), _rows(Path(path)))
    placed = [list(sheet.actions(row)) for row in range(len(sheet.rows))]
    stages, microbatches = _check(sheet, placed)
    columns = tuple(tuple(action for _, action in row) for row in placed)
    return Table(f"{CSV_PREFIX}{path}", stages, microbatches, columns)


def write_csv(table: Table, path: str | Path) -> None:
    """Write a table as `read_csv` reads it. A table of compute actions only is laid out in time, a step per action."""
    rows: Iterable[Iterable[Action | None]] = table.columns
    if table.compute_only() == table:
        rows = in_steps(table)
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(["" if action is None else str(action) for action in row] for row in rows)


def _rows(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except OSError as error:
        raise InvalidCall(f"{path} cannot be read: {error.strerror}. Give the path of a CSV file.") from error
    except (ValueError, csv.Error) as error:  # not UTF-8, or not text at all
        raise InvalidCall(f"{path} is no CSV file: {error}. Write a row a rank, such as 0F0,0F1,,0B0,0B1.") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise InvalidCall(f"{path} is empty. Write a row a rank, such as 0F0,0F1,,0B0,0B1.")
    return rows


class _Sheet:
    """The file's cells, for parsing and for error messages."""

    def __init__(self, path: str, rows: list[list[str]]) -> None:
        self.path, self.rows = path, rows

    def actions(self, row: int) -> Iterator[_Placed]:
        """A row's actions with their positions."""
        for cell, text in enumerate(self.rows[row]):
            if not text.strip() or _FOR_SHARDED_WEIGHTS.fullmatch(text):
                continue
            try:
                actions = parse_actions(text)
            except InvalidCall as error:
                self.refuse(_Cell(row, cell), str(error))
            yield from ((_Cell(row, cell, part), action) for part, action in enumerate(actions))

    def refuse(self, at: _Cell, message: str) -> NoReturn:
        where = f"{self.path}, row {at.row + 1} (rank {at.row}), cell {at.cell + 1}"
        raise InvalidCall(f"{where}: {message}\n{self._drawn(at)}")

    def _drawn(self, at: _Cell) -> str:
        """The row with a mark under the cell; only the cells near it if the row is long."""
        cells = [_shown(text) for text in self.rows[at.row]] or ["."]
        first = max(0, at.cell - _CELLS_AROUND)
        last = at.cell + _CELLS_AROUND + 1
        before = " ".join([*(["…"] if first else []), *cells[first : at.cell], ""])
        after = " ".join(["", *cells[at.cell + 1 : last], *(["…"] if last < len(cells) else [])])
        bad = cells[at.cell]
        return f"    {before}{bad}{after}".rstrip() + f"\n    {' ' * len(before)}{'^' * len(bad)}"


def _shown(text: str) -> str:
    """A cell's text, shortened and without control characters; a dot for an empty cell."""
    text = printable(text.strip()) or "."
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"


def _check(sheet: _Sheet, placed: list[list[_Placed]]) -> tuple[int, int]:
    """Raise InvalidCall for an incomplete or inconsistent table; return the numbers of stages and microbatches."""
    for row, actions in enumerate(placed):
        if not actions:
            sheet.refuse(_Cell(row, 0), "a rank without actions. Give it a stage, or remove the row.")
    where = _check_owners(sheet, [entry for row in placed for entry in row])
    compute = [action for action in where if action.is_compute]
    if not compute:
        sheet.refuse(next(iter(where.values())), "there are only sends and receives. Add the forwards and backwards.")
    stages = _check_gaps(sheet, where, {action.stage for action in compute}, "stage")
    numbers = {action.microbatch for action in compute if action.microbatch is not None}
    microbatches = _check_gaps(sheet, where, numbers, "microbatch")
    for action in where:
        _check_partners(sheet, where, action)
    _check_nothing_is_missing(sheet, where, stages, microbatches)
    return stages, microbatches


def _check_owners(sheet: _Sheet, placed: list[_Placed]) -> dict[Action, _Cell]:
    """The position of each action. Checks that no action is repeated and that each stage is in one row."""
    where: dict[Action, _Cell] = {}
    owners: dict[int, int] = {}
    for at, action in placed:
        if owners.setdefault(action.stage, at.row) != at.row:
            text = f"stage {action.stage} is in row {owners[action.stage] + 1} already. A stage belongs to one rank."
            sheet.refuse(at, text)
        if action in where:
            sheet.refuse(at, f"{action} is in cell {where[action].cell + 1} already. Remove one of the two.")
        where[action] = at
    return where


def _check_gaps(sheet: _Sheet, where: dict[Action, _Cell], numbers: set[int], noun: str) -> int:
    """How many numbers there are. Checks that they count from 0 without a gap."""
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    for action, at in where.items():
        number = action.stage if noun == "stage" else action.microbatch
        if number is not None and number > missing:
            sheet.refuse(at, f"{noun} {number} is here, but there is no {noun} {missing}. Count from 0 without a gap.")
    return len(numbers)


_NEEDS: dict[Kind, tuple[str, ...]] = {
    Kind.F: (),
    Kind.B: ("F",),
    Kind.I: ("F", "W"),
    Kind.W: ("F", "I"),
    Kind.SEND_F: ("F",),
    Kind.RECV_F: ("F",),
    Kind.SEND_B: ("BI",),
    Kind.RECV_B: ("BI",),
    Kind.REDUCE_GRAD: (),
}
"""By kind: what the same stage and microbatch must also have. Each string lists alternatives, one letter each."""
_FOLLOWS: dict[Kind, Kind] = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


def _check_partners(sheet: _Sheet, where: dict[Action, _Cell], action: Action) -> None:
    at, (stage, kind, microbatch) = where[action], action
    for letters in _NEEDS[kind]:
        partners = [Action(stage, Kind(letter), microbatch) for letter in letters]
        if not any(partner in where for partner in partners):
            sheet.refuse(at, f"{action} is here, but there is no {' or '.join(map(str, partners))}. Add it.")
    if kind is Kind.REDUCE_GRAD and not any(other.stage == stage and other.is_compute for other in where):
        sheet.refuse(at, f"{action} is here, but stage {stage} does nothing. Remove it.")
    whole = Action(stage, Kind.B, microbatch)
    if kind in (Kind.I, Kind.W) and whole in where:
        text = f"{action} is a part of {whole}, which is in cell {where[whole].cell + 1}. Remove one of the two."
        sheet.refuse(at, text)
    if kind in _FOLLOWS:
        before = Action(stage, _FOLLOWS[kind], microbatch)
        if where[before] > at:
            sheet.refuse(at, f"{action} comes before {before}, which it needs, in cell {where[before].cell + 1}.")


def _check_nothing_is_missing(sheet: _Sheet, where: dict[Action, _Cell], stages: int, microbatches: int) -> None:
    rows = {action.stage: at.row for action, at in where.items()}
    for stage in range(stages):
        for microbatch in range(microbatches):
            forward = Action(stage, Kind.F, microbatch)
            backwards = [Action(stage, kind, microbatch) for kind in (Kind.B, Kind.I)]
            if forward not in where:
                place = f"{sheet.path}, row {rows[stage] + 1} (rank {rows[stage]})"
                sizes = f"there are {stages} stages and {microbatches} microbatches"
                raise InvalidCall(f"{place}: {forward} and its backward are missing. Add them: {sizes}.")
            if not any(backward in where for backward in backwards):
                parts = f"{stage}I{microbatch} and {stage}W{microbatch}"
                text = f"{forward} has no backward. Add {backwards[0]}, or {parts}."
                sheet.refuse(where[forward], text)
