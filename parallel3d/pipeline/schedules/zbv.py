"""ZB-V: two stages per rank in a V shape, so that the first and last stage share a rank and no bubble remains."""

from __future__ import annotations

from parallel3d.pipeline.schedules.phases import Phase, number_microbatches
from parallel3d.pipeline.schedules.table import Column


def zbv(ranks: int, microbatches: int) -> tuple[Column, ...]:
    """Rank r has stages r and 2 x ranks - 1 - r; the backward is split into I and W.

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    If F, I and W take the same time and there are at least 2 x ranks - 1 microbatches, a rank never waits after its
    first action. Every rank keeps activations of at most 2 x ranks microbatches of a stage. Stages are half as large
    as in 1F1B, so that equals the memory of 1F1B's first rank.
    """
    # Fewer microbatches would not fill the V. Removing the surplus afterwards keeps the order of the others valid.
    filled = max(microbatches, 2 * ranks - 1)
    columns = (number_microbatches(rank, ranks, _phases(rank, ranks, filled)) for rank in range(ranks))
    return tuple(tuple(action for action in column if (action.microbatch or 0) < microbatches) for column in columns)


def _phases(rank: int, ranks: int, microbatches: int) -> tuple[Phase, ...]:
    below = ranks - rank  # ranks from this one to the V's turning point
    return (
        (2 * below - 1, "0F"),  # until the first microbatch arrives at the second stage
        (rank, "1F 0F"),
        (below, "1F 1I 1W"),  # until its gradient arrives at the first stage
        (microbatches - 2 * ranks + rank + 1, "0F 0I 0W 1F 1I 1W"),  # both stages alternately
        (below - 1, "0I 0W 1F 1I 1W"),
        # No forwards are left. Other ranks wait for the input parts, so these come first.
        (rank, "0I 1I"),
        (below, "0I 0W"),
        (rank, "1W"),
        (rank, "0W"),
    )
