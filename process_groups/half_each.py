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
from runtime.errors import CommunicationError

_WORTH_READING = 4 << 20  # bytes: less stays in caches, however far apart
_READ_AT_ONCE = 2 * PIECE  # bytes: then whether the peer has given up


def is_worth_trying(exchange: Exchange, num_bytes: int) -> bool:
    """Whether this may be the faster way."""
    return exchange.size == 2 and num_bytes >= _WORTH_READING


def wants_to_read(exchange: Exchange, num_bytes: int) -> bool:
    """What this rank tells the other one, as both have to go the same way. The first one looks at the clock."""
    if not is_worth_trying(exchange, num_bytes) or not exchange.can_read_peers:
        return False
    return exchange.me != 0 or exchange.relay_or_half_each.is_second(num_bytes)


def half_each(exchange: Exchange, call: Call, addresses: Sequence[int]) -> Steps:
    """This rank's part. Before it both have arrived at a round, with the tensors at these addresses."""
    assert call.target is not None
    assert call.op is not None
    me, peer, values = exchange.me, 1 - exchange.me, call.target.view(-1)
    itemsize, address = values.element_size(), addresses[peer]
    read = torch.empty(PIECE // itemsize, dtype=values.dtype)
    for a, b in pieces(*part(values.numel(), me, 2), itemsize, 2):
        own, theirs = values[a:b], read[: b - a]
        yield from _read(exchange, theirs, address + a * itemsize)
        exchange.reduce(own, (own, theirs) if me == 0 else (theirs, own), call.op)
    yield from exchange.everybody(exchange.arrive())
    start, stop = part(values.numel(), peer, 2)
    step = _READ_AT_ONCE // itemsize
    for a in range(start, stop, step):
        yield from _read(exchange, values[a : min(stop, a + step)], address + a * itemsize)
    yield from exchange.everybody(exchange.arrive())


def _read(exchange: Exchange, target: torch.Tensor, address: int) -> Steps:
    peer = 1 - exchange.me
    try:
        exchange.read(target, peer, address)
    except ProcessLookupError:
        yield from exchange.until_lost(peer)
    except OSError as error:
        exchange.check()  # who gave up may have let go of its tensor
        raise CommunicationError(
            f"this rank could read the other one's memory, but not any more ({error.strerror}). Did one of them change "
            "its user or what it allows? With tensors of group.empty nothing has to be read that way."
        ) from error
    exchange.check()  # what a rank that gave up has in its tensor may be anything
