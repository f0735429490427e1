"""All-reduces of large tensors that peers can't see: running sums go from rank to rank through shared memory.

A window of the tensor begins in the first rank's staging area with that rank's values; each rank in turn adds its own,
and all read the total. So values are touched twice, where putting them in, adding them up and reading them out would
touch them three times, and what the ranks work on at a time fits the cache.

    rank 0 | +0 +1 +2 .  =0 +3 =1 +4 =2     +w: put into window w, or add to it; =w: read its total
    rank 1 | .  +0 +1 +2 =0 +3 =1 +4 =2
    rank 2 | .  .  +0 +1 +2 .  +3 .  +4     the last one has the total when it has added

A window's memory is used again without asking whether it was read. Before the first rank puts in window w it has read
the total of w - 1 - LEAD, so every rank had added to that one, and had read w - 2 - 2 LEAD before.
"""

from __future__ import annotations

import torch

from process_groups.call import Call
from process_groups.call_queue import Steps
from process_groups.reduction import PIECE, combine, finish, wide_dtype
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import LEAD, WINDOW

assert WINDOW <= 2 * PIECE  # so that scratch memory has room for one


def relay(exchange: Exchange, call: Call) -> Steps:
    """This rank's part. Before it all have arrived at a round, so that nobody reads the staging area any more."""
    assert call.target is not None
    assert call.op is not None
    me, last, op = exchange.me, exchange.size - 1, call.op
    added, start = exchange.windows_added, exchange.num_windows
    wide = wide_dtype(call.target.dtype, op)
    parts = torch.split(call.target.view(-1), WINDOW // wide.itemsize)
    totals = [exchange.window(number, values.numel(), wide) for number, values in enumerate(parts)]
    exchange.num_windows += len(parts)
    for number in range(len(parts) + LEAD):
        if number < len(parts):
            if me:
                yield added[me - 1], start + number + 1
            exchange.check()
            _add(exchange, number, parts[number], totals[number], op)
            added[me].store(start + number + 1)
        if number >= LEAD and me != last:
            yield added[last], start + number - LEAD + 1
            exchange.check()
            parts[number - LEAD].copy_(totals[number - LEAD])
    yield from exchange.everybody(exchange.arrive())


def _add(exchange: Exchange, number: int, values: torch.Tensor, total: torch.Tensor, op: str) -> None:
    """Put this rank's values into a window; the last rank takes the total out at once."""
    me, last = exchange.me, exchange.size - 1
    if number and 0 < me < last and not exchange.writer.is_far:  # window 0 tells how far those are who read it
        combine(total, values, op)  # in place, as a core's cache has no room for a third tensor
        return
    uses_own = total.dtype is values.dtype and me in (0, last)
    so_far = values if uses_own else exchange.reduce.scratch(values.numel(), total.dtype)
    if me:
        combine(total, values, op, out=so_far)
    elif not uses_own:
        so_far.copy_(values)
    if me == last:
        finish(so_far, op, exchange.size)
    exchange.writer.write(total, so_far)
    if me == last and not uses_own:
        values.copy_(so_far)
