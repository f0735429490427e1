"""What the schedules are called, and which sizes each can have. The configuration and `build` both ask here.

Plain facts and no imports of ours, so that reading a YAML file stays quick.
"""

from __future__ import annotations

from typing import Literal, get_args

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "round-robin", "zero-bubble", "zbv", "dualpipe-v"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)

CSV_PREFIX = "csv:"
"""Before the path of a table of the user's own."""

NEEDS_VIRTUAL_STAGES = frozenset(("interleaved", "round-robin"))
IMPLIES_TWO_VIRTUAL_STAGES = frozenset(("zbv", "dualpipe-v"))

NEEDS_WHOLE_ROUNDS = frozenset(("interleaved",))
"""Microbatches go in rounds of one a rank, so their number is a multiple of the ranks."""
NEEDS_A_MICROBATCH_A_STAGE = frozenset(("dualpipe-v",))
"""Its pairs of a forward and a backward only meet where at least 2 microbatches a rank are under way."""


def is_csv(schedule: str) -> bool:
    """Whether this names a file; the file then decides about its sizes."""
    return schedule.startswith(CSV_PREFIX) and schedule != CSV_PREFIX


def has_one_stage_a_rank(schedule: str) -> bool:
    return schedule not in NEEDS_VIRTUAL_STAGES | IMPLIES_TWO_VIRTUAL_STAGES and not is_csv(schedule)


def better_microbatches(schedule: str, ranks: int, microbatches: int) -> tuple[int, ...]:
    """The nearest numbers of microbatches that the schedule can have; none when it can have this one."""
    if schedule in NEEDS_WHOLE_ROUNDS and microbatches % ranks:
        below = microbatches - microbatches % ranks
        return tuple(number for number in (below, below + ranks) if number)
    if schedule in NEEDS_A_MICROBATCH_A_STAGE and microbatches < 2 * ranks:
        return (2 * ranks,)
    return ()
