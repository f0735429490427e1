"""Builds a schedule's table by name; raises InvalidCall with a reason if it can't have that size."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NoReturn

from parallel3d.pipeline.schedules.csv_table import read_csv
from parallel3d.pipeline.schedules.dualpipe_v import dualpipe_v
from parallel3d.pipeline.schedules.gpipe import gpipe
from parallel3d.pipeline.schedules.interleaved import interleaved
from parallel3d.pipeline.schedules.limits import (
    CSV_PREFIX,
    IMPLIES_TWO_VIRTUAL_STAGES,
    NEEDS_VIRTUAL_STAGES,
    NEEDS_WHOLE_ROUNDS,
    SCHEDULES,
    better_microbatches,
    has_one_stage_a_rank,
    is_csv,
)
from parallel3d.pipeline.schedules.one_f_one_b import one_f_one_b
from parallel3d.pipeline.schedules.round_robin import round_robin
from parallel3d.pipeline.schedules.table import Column, Table
from parallel3d.pipeline.schedules.zbv import zbv
from parallel3d.pipeline.schedules.zero_bubble import zero_bubble
from runtime.errors import InvalidCall

__all__ = ["SCHEDULES", "OtherSize", "build"]

_OF_FIXED_STAGES: dict[str, Callable[[int, int], tuple[Column, ...]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero-bubble": zero_bubble,
    "zbv": zbv,
    "dualpipe-v": dualpipe_v,
}
_OF_VIRTUAL_STAGES: dict[str, Callable[[int, int, int], tuple[Column, ...]]] = {
    "interleaved": interleaved,
    "round-robin": round_robin,
}
_WITH_ONE_STAGE = {"interleaved": "1f1b", "round-robin": "gpipe"}


class OtherSize(InvalidCall):
    """A CSV table has a different size than requested. `size` is `ranks`, `microbatches` or `stages`."""

    def __init__(self, problem: str, size: str, wanted: int, found: int) -> None:
        super().__init__(problem, size, wanted, found)
        self.problem, self.size, self.wanted, self.found = problem, size, wanted, found

    def __str__(self) -> str:
        return f"{self.problem} Use {self.found}."


def build(schedule: str, ranks: int | None, microbatches: int | None, virtual_stages: int | None = None) -> Table:
    """The schedule's table with compute actions only; `Table.with_communication` adds the others.

    `schedule` is one of `SCHEDULES`, or `csv:PATH`. For a CSV file, sizes that are not None must match the file, and
    its sends, receives and reductions are dropped. `virtual_stages` is the number of stages per rank; None means the
    schedule's default.
    """
    if is_csv(schedule):
        return _from_file(schedule.removeprefix(CSV_PREFIX), ranks, microbatches, virtual_stages)
    if schedule not in SCHEDULES:
        _refuse_name(schedule)
    if ranks is None or microbatches is None:
        raise InvalidCall(f"{schedule}: a table needs ranks and microbatches. Give both.")
    if virtual_stages is None:
        virtual_stages = 2 if schedule in IMPLIES_TWO_VIRTUAL_STAGES else 1
    for noun, count in (("ranks", ranks), ("microbatches", microbatches), ("virtual stages", virtual_stages)):
        if count < 1:
            raise InvalidCall(f"{schedule}: {count} {noun}. Use 1 or more.")
    _check_virtual_stages(schedule, virtual_stages)
    _check_microbatches(schedule, ranks, microbatches)
    if schedule in _OF_VIRTUAL_STAGES:
        columns = _OF_VIRTUAL_STAGES[schedule](ranks, microbatches, virtual_stages)
    else:
        columns = _OF_FIXED_STAGES[schedule](ranks, microbatches)
    return Table(schedule, ranks * virtual_stages, microbatches, columns)


def _refuse_name(schedule: str) -> NoReturn:
    close = difflib.get_close_matches(schedule[:40].lower(), SCHEDULES, n=1)
    remedy = f"Did you mean {close[0]}?" if close else "Use one of these."
    raise InvalidCall(f"{schedule[:40]!r} is no schedule: there are {', '.join(SCHEDULES)} and csv:PATH. {remedy}")


def _check_virtual_stages(schedule: str, virtual_stages: int) -> None:
    if has_one_stage_a_rank(schedule) and virtual_stages != 1:
        raise InvalidCall(f"{schedule} has one stage a rank; use interleaved or round-robin for {virtual_stages}.")
    if schedule in IMPLIES_TWO_VIRTUAL_STAGES and virtual_stages != 2:
        raise InvalidCall(f"{schedule} always has 2 stages a rank, not {virtual_stages}. Use 2, or leave it out.")
    if schedule in NEEDS_VIRTUAL_STAGES and virtual_stages < 2:
        other = _WITH_ONE_STAGE[schedule]
        raise InvalidCall(f"{schedule} has 2 or more stages a rank. Use 2, or {other} for 1.")


def _check_microbatches(schedule: str, ranks: int, microbatches: int) -> None:
    better = better_microbatches(schedule, ranks, microbatches)
    if not better:
        return
    found = "1 microbatch is" if microbatches == 1 else f"{microbatches} microbatches are"
    if schedule in NEEDS_WHOLE_ROUNDS:
        raise InvalidCall(f"{schedule}: {found} no multiple of {ranks} ranks. Use {' or '.join(map(str, better))}.")
    wanted = f"2 x {ranks} rank{'s' if ranks > 1 else ''}"
    raise InvalidCall(f"{schedule}: {found} fewer than {wanted}. Use {better[0]} or more, or zbv.")


def _from_file(path: str, ranks: int | None, microbatches: int | None, virtual_stages: int | None) -> Table:
    table = read_csv(path).compute_only()
    for noun, found, wanted in (
        ("ranks", table.num_ranks, ranks),
        ("microbatches", table.microbatches, microbatches),
        ("stages", table.stages, virtual_stages and virtual_stages * table.num_ranks),
    ):
        if wanted is not None and wanted != found:
            problem = f"{path}: {wanted} {noun} were asked for, but the file has {found}."
            raise OtherSize(problem, noun, wanted, found)
    return table
