"""ZB-V: two stages a rank, placed like a V, so that the first and the last stage share a rank and no bubble is left."""

from __future__ import annotations

from parallel3d.pipeline.schedules.phases import Phase, number_microbatches
from parallel3d.pipeline.schedules.table import Column


def zbv(ranks: int, microbatches: int) -> tuple[Column, ...]:
    """Rank r has the stages r and 2 x ranks - 1 - r, and the backward is cut in I and W.

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Where F, I and W take the same time and there are 2 x ranks - 1 microbatches or more, a rank that has begun never
    waits. Every rank keeps the activations of at most 2 x ranks microbatches of a stage. Its stages are half as large
    as 1F1B's, so that is as much as 1F1B's first rank keeps.
    """
    # Fewer would not fill the V. Without the microbatches that are too many the rest is still in a right order.
    filled = max(microbatches, 2 * ranks - 1)
    columns = (number_microbatches(rank, ranks, _phases(rank, ranks, filled)) for rank in range(ranks))
    return tuple(tuple(action for action in column if (action.microbatch or 0) < microbatches) for column in columns)


def _phases(rank: int, ranks: int, microbatches: int) -> tuple[Phase, ...]:
    below = ranks - rank  # ranks from here to the V's turning point
    return (
        (2 * below - 1, "0F"),  # down the V, until the first microbatch has come up again
        (rank, "1F 0F"),
        (below, "1F 1I 1W"),  # until its gradient has been down and up
        (microbatches - 2 * ranks + rank + 1, "0F 0I 0W 1F 1I 1W"),  # both legs in turns
        (below - 1, "0I 0W 1F 1I 1W"),
        # No forwards are left. Others wait for the input parts, so they come first.
        (rank, "0I 1I"),
        (below, "0I 0W"),
        (rank, "1W"),
        (rank, "0W"),
    )
