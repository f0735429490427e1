"""1F1B: forwards until the first backward can run, then one backward and one forward alternately."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.pipeline.schedules.actions import Action, Kind
from parallel3d.pipeline.schedules.table import Column


def one_f_one_b(ranks: int, microbatches: int) -> tuple[Column, ...]:
    """`ranks - r` forwards on rank r, then a backward and a forward alternately.

    rank 0 | 0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3
    rank 1 | .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3
    rank 2 | .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Stage s keeps activations of at most `ranks - s` microbatches.
    """
    return tuple(
        in_turns(
            [Action(rank, Kind.F, microbatch) for microbatch in range(microbatches)],
            [Action(rank, Kind.B, microbatch) for microbatch in range(microbatches)],
            ahead=ranks - rank,
        )
        for rank in range(ranks)
    )


def in_turns(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> Column:
    """`ahead` forwards, then a backward and a forward alternately, then the remaining backwards."""
    first = forwards[:ahead]
    turns = zip(backwards, forwards[ahead:], strict=False)
    rest = backwards[len(forwards) - len(first) :]
    return (*first, *(action for turn in turns for action in turn), *rest)
