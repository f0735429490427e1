"""Schedule names, and which sizes each schedule supports. Used by the configuration and by `build`.

Imports nothing of parallel3d, so that reading a YAML file stays fast.
"""

from __future__ import annotations

from typing import Literal, get_args

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "round-robin", "zero-bubble", "zbv", "dualpipe-v"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)

CSV_PREFIX = "csv:"
"""Prefix of the path of a user's own table."""

NEEDS_VIRTUAL_STAGES = frozenset(("interleaved", "round-robin"))
IMPLIES_TWO_VIRTUAL_STAGES = frozenset(("zbv", "dualpipe-v"))

NEEDS_WHOLE_ROUNDS = frozenset(("interleaved",))
"""Microbatches run in rounds of one per rank, so their number must be a multiple of the ranks."""
NEEDS_A_MICROBATCH_A_STAGE = frozenset(("dualpipe-v",))
"""Forwards and backwards can be paired only with at least 2 microbatches per rank."""


def is_csv(schedule: str) -> bool:
    """Whether the schedule is a CSV file, which determines its own sizes."""
    return schedule.startswith(CSV_PREFIX) and schedule != CSV_PREFIX


def has_one_stage_a_rank(schedule: str) -> bool:
    return schedule not in NEEDS_VIRTUAL_STAGES | IMPLIES_TWO_VIRTUAL_STAGES and not is_csv(schedule)


def better_microbatches(schedule: str, ranks: int, microbatches: int) -> tuple[int, ...]:
    """The nearest numbers of microbatches that the schedule supports; empty if it supports the given one."""
    if schedule in NEEDS_WHOLE_ROUNDS and microbatches % ranks:
        below = microbatches - microbatches % ranks
        return tuple(number for number in (below, below + ranks) if number)
    if schedule in NEEDS_A_MICROBATCH_A_STAGE and microbatches < 2 * ranks:
        return (2 * ranks,)
    return ()
