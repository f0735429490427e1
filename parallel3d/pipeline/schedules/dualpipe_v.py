"""DualPipe-V: two stages per rank in a V shape; forwards of one stage are paired with backwards of the other."""

from __future__ import annotations

from parallel3d.pipeline.schedules.phases import Phase, number_microbatches
from parallel3d.pipeline.schedules.table import Column


def dualpipe_v(ranks: int, microbatches: int) -> tuple[Column, ...]:
    """Rank r has stages r and 2 x ranks - 1 - r. A forward of one is paired with a backward of the other.

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

    The two actions of a pair are independent, so an executor may overlap the communication of one with the compute of
    the other. The backward is split into I and W only where it fills a bubble. Needs at least 2 x ranks microbatches.
    Every rank keeps activations of 2 x ranks + 1 microbatches of a stage: one more than ZB-V.
    """
    return tuple(number_microbatches(rank, ranks, _phases(rank, ranks, microbatches)) for rank in range(ranks))


def _phases(rank: int, ranks: int, microbatches: int) -> tuple[Phase, ...]:
    below = ranks - rank - 1  # ranks between this one and the V's turning point
    half, odd = divmod(rank + 1, 2)
    return (
        (2 * below, "0F"),
        (rank + 1, "0F 1F"),
        (below, "1I 1W 1F"),
        (microbatches - 2 * ranks + rank + 1, "0F 1B 1F 0B"),  # pairs in both directions
        (below, "1B 1F 0B"),
        # No forwards are left. From the second half on, weight parts are deferred to fill later bubbles.
        (half, "1B 0B"),
        (odd, "1B 0I"),
        (half, "1I 0I"),
        (below, "W 0I"),
        (rank + 1, "W"),
    )
