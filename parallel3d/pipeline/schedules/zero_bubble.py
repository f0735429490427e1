"""ZB-H1: 1F1B with the backward split in two; the weight parts fill most of the bubble."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.pipeline.schedules.actions import Action, Kind
from parallel3d.pipeline.schedules.table import Column


def zero_bubble(ranks: int, microbatches: int) -> tuple[Column, ...]:
    """1F1B with the backward split into I, for the previous stage, and W, which rank r runs r microbatches later.

    rank 0 | 0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 | .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 | .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    If F, I and W take the same time, a third of 1F1B's bubble remains. A microbatch's activations are kept from F to W:
    at most `ranks` microbatches on every rank, the same as on 1F1B's first rank.
    """
    return tuple(tuple(_column(rank, ranks, microbatches)) for rank in range(ranks))


def _column(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    ahead = min(ranks - rank, microbatches)
    yield from (Action(rank, Kind.F, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        yield Action(rank, Kind.I, microbatch)
        if microbatch >= rank:
            yield Action(rank, Kind.W, microbatch - rank)
        if microbatch + ahead < microbatches:
            yield Action(rank, Kind.F, microbatch + ahead)
    yield from (Action(rank, Kind.W, microbatch) for microbatch in range(max(0, microbatches - rank), microbatches))
