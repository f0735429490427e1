"""Round-robin: all microbatches through one virtual stage after another; also known as looped BFS."""

from __future__ import annotations

from parallel3d.pipeline.schedules.actions import Action, Kind
from parallel3d.pipeline.schedules.table import Column


def round_robin(ranks: int, microbatches: int, virtual_stages: int) -> tuple[Column, ...]:
    """All microbatches through one virtual stage after another; also known as looped BFS.

    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B2 2B1 2B0 0B2 0B1 0B0
    rank 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0

    Stage s is on rank `s % ranks`. A rank takes all microbatches through its first stage, then all through its
    second, and so on; backwards run in exactly the reverse order. So each stage's weights are used in one continuous
    block, and its gradients can be reduced while other stages still compute. All activations are kept.
    """
    return tuple(_column(range(rank, ranks * virtual_stages, ranks), microbatches) for rank in range(ranks))


def _column(stages: range, microbatches: int) -> Column:
    order = [(stage, microbatch) for stage in stages for microbatch in range(microbatches)]
    forwards = [Action(stage, Kind.F, microbatch) for stage, microbatch in order]
    backwards = [Action(stage, Kind.B, microbatch) for stage, microbatch in reversed(order)]
    return (*forwards, *backwards)
