"""Interleaved 1F1B: v stages per rank, which makes the bubble v times smaller."""

from __future__ import annotations

from parallel3d.pipeline.schedules.actions import Action, Kind
from parallel3d.pipeline.schedules.one_f_one_b import in_turns
from parallel3d.pipeline.schedules.table import Column


def interleaved(ranks: int, microbatches: int, virtual_stages: int) -> tuple[Column, ...]:
    """1F1B with several stages per rank: stage s is on rank `s % ranks`; a round is `ranks` microbatches.

    rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

    A rank takes a round through all its stages before the next round begins.
    """
    return tuple(_column(rank, ranks, microbatches, virtual_stages) for rank in range(ranks))


def _column(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Column:
    stages = range(rank, ranks * virtual_stages, ranks)
    rounds = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    return in_turns(
        [Action(s, Kind.F, m) for a_round in rounds for s in stages for m in a_round],
        [Action(s, Kind.B, m) for a_round in rounds for s in reversed(stages) for m in a_round],
        # The first round reaches the rank's last stage after (virtual_stages - 1) x ranks forwards. Each rank after
        # this one adds two steps: a forward on the way to the last rank, a backward on the way back.
        ahead=(virtual_stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1,
    )
