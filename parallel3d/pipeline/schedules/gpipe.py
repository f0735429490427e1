"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.pipeline.schedules.actions import Action, Kind
from parallel3d.pipeline.schedules.table import Column, Table


def gpipe(ranks: int, microbatches: int) -> tuple[Column, ...]:
    """All forwards, then all backwards, both in microbatch order. All activations are kept.

    rank 0 | 0F0 0F1 0F2 0F3 .   .   .   .   0B0 0B1 0B2 0B3
    rank 1 | .   1F0 1F1 1F2 1F3 .   .   1B0 1B1 1B2 1B3
    rank 2 | .   .   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
    """
    return tuple(
        tuple(Action(rank, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(microbatches))
        for rank in range(ranks)
    )


def gpipe_of_stages(rank_of_stage: Sequence[int], microbatches: int) -> Table:
    """GPipe for any assignment of stages to ranks. A rank runs all microbatches through its first stage, then its next
    stage, and so on; backwards take its stages in reverse order."""
    columns = []
    for rank in range(max(rank_of_stage) + 1):
        stages = [stage for stage, owner in enumerate(rank_of_stage) if owner == rank]
        ways = (Kind.F, stages), (Kind.B, stages[::-1])
        columns.append(
            tuple(Action(stage, kind, number) for kind, way in ways for stage in way for number in range(microbatches))
        )
    return Table("gpipe", len(rank_of_stage), microbatches, tuple(columns))
