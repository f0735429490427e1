"""All-reduces of large tensors that peers can't see: running sums go from rank to rank through shared memory.

A window of the tensor begins in the first rank's staging area with that rank's values; each rank in turn adds its own,
and all read the total. So values are touched twice, where putting them in, adding them up and reading them out would
touch them three times, and what the ranks work on at a time fits the cache.

    rank 0 | +0 +1 +2 .  =0 +3 =1 +4 =2     +w: put into window w, or add to it; =w: read its total
    rank 1 | .  +0 +1 +2 =0 +3 =1 +4 =2
    rank 2 | .  .  +0 +1 +2 =0 +3 =1 …

A window's memory is used again without asking whether it was read. Before the first rank puts in window w it has read
the total of w - 1 - LEAD, so every rank had added to that one, and had read w - 2 - 2 LEAD before.
"""

from __future__ import annotations

import torch

from process_groups.exchange import Exchange
from process_groups.lane import Steps
from process_groups.shared_layout import LEAD, WINDOW
from process_groups.strategies.arithmetic import combine, finish, wide_dtype
from process_groups.transport import Call


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
            if me == 0:
                exchange.check()
                totals[number].copy_(parts[number])
            else:
                yield added[me - 1], start + number + 1
                exchange.check()
                combine(totals[number], parts[number], op)
            if me == last:
                finish(totals[number], op, exchange.size)
            added[me].store(start + number + 1)
        if number >= LEAD:
            yield added[last], start + number - LEAD + 1
            exchange.check()
            parts[number - LEAD].copy_(totals[number - LEAD])
    yield from exchange.everybody(exchange.arrive())
