"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.table import Column


def gpipe(ranks: int, microbatches: int) -> tuple[Column, ...]:
    """All forwards, then all backwards, both in the order of the microbatches. All activations are kept.

    rank 0 | 0F0 0F1 0F2 0F3 .   .   .   .   0B0 0B1 0B2 0B3
    rank 1 | .   1F0 1F1 1F2 1F3 .   .   1B0 1B1 1B2 1B3
    rank 2 | .   .   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
    """
    return tuple(
        tuple(Action(rank, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(microbatches))
        for rank in range(ranks)
    )
