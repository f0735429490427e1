"""All-reduces of two ranks' large tensors that are not registered: each reads the other's memory, by the kernel.

A rank adds up one half, and then reads the other half's sums where its peer has them:

    rank 0 | first half  += peer's | second half  = peer's
    rank 1 | second half += peer's | first half   = peer's

Which is faster than a running sum where the cores share no cache: writing what the other core has just read takes four
times as long there, and a running sum writes every value where both work on it. Where they share one, the kernel's
work for every page weighs more; so both ways are tried. Of more ranks each would read nearly all of every other's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from process_groups.exchange import Exchange
from process_groups.lane import Steps
from process_groups.reduction import PIECE, part, pieces
from process_groups.transport import Call

_WORTH_READING = 4 << 20  # bytes: less stays in caches, however far apart
_READ_AT_ONCE = 4 * PIECE  # bytes: then whether the peer has given up


def can_be_read(size: int, num_bytes: int) -> bool:
    """Whether this may be the faster way."""
    return size == 2 and num_bytes >= _WORTH_READING


def half_each(exchange: Exchange, call: Call, addresses: Sequence[int]) -> Steps:
    """This rank's part. Before it both have arrived at a round, with the tensors at these addresses."""
    assert call.target is not None
    assert call.op is not None
    me, peer, values = exchange.me, 1 - exchange.me, call.target.view(-1)
    itemsize, address = values.element_size(), addresses[peer]
    read = torch.empty(PIECE // itemsize, dtype=values.dtype)
    for a, b in pieces(*part(values.numel(), me, 2), itemsize):
        own, theirs = values[a:b], read[: b - a]
        if not exchange.read(theirs, peer, address + a * itemsize):
            yield from exchange.until_lost(peer)
        exchange.check()
        exchange.reduce(own, (own, theirs) if me == 0 else (theirs, own), call.op)
    yield from exchange.everybody(exchange.arrive())
    start, stop = part(values.numel(), peer, 2)
    step = _READ_AT_ONCE // itemsize
    for a in range(start, stop, step):
        if not exchange.read(values[a : min(stop, a + step)], peer, address + a * itemsize):
            yield from exchange.until_lost(peer)
        exchange.check()
    yield from exchange.everybody(exchange.arrive())
