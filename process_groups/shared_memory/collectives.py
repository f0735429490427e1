"""Collectives through shared memory: what one rank does, as steps that yield where it has to wait for its peers.

Small calls go through the staging slots in one round: each rank puts its values into its slot, all arrive, and each
takes what it needs from the others' slots. Larger ones read and write registered buffers in place if every rank's
tensor is one, or else pass through the slots a chunk at a time; all-reduces do that as `relay` says. A slot is used
again three rounds later, when every rank has arrived at a round after the one in which it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from process_groups.arena import PAGE
from process_groups.call import Call
from process_groups.call_queue import Steps
from process_groups.reduction import part, pieces
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import CHUNK
from process_groups.shared_memory.relay import relay

FLAT = 64 << 10  # bytes: up to here one round costs less than two, though it does not share the work


def steps_of(exchange: Exchange, call: Call) -> Steps:
    """This rank's part in a collective."""
    if call.kind == "all_reduce":
        return (_all_reduce_flat if is_flat(call) else _all_reduce)(exchange, call)
    return _barrier(exchange) if call.kind == "barrier" else _exposing(exchange, call)


def _barrier(exchange: Exchange) -> Steps:
    yield from exchange.everybody(exchange.arrive())


class FlatAllReduce:
    """A small all-reduce in one round. Two ranks each add up both values; of more, the first adds up all of them, and
    the others read its result: where ranks outnumber the cores, n times n additions would take too long."""

    __slots__ = ("_exchange", "_op", "_reads_result", "_round", "_slots", "_target")

    def __init__(self, exchange: Exchange, call: Call) -> None:
        """Put this rank's values in, and arrive."""
        target, op = call.target, call.op
        assert target is not None
        assert op is not None
        self._exchange, self._op = exchange, op
        self._reads_result = exchange.size > 2 and exchange.me != 0
        self._target = target if target.dim() == 1 else target.view(-1)
        self._slots = exchange.slots(exchange.next_round, target.numel(), target.dtype)
        if call.memory is not None:
            exchange.own_slot(exchange.next_round, len(call.memory))[:] = call.memory
        else:
            self._slots[exchange.me].copy_(self._target)
        self._round = exchange.arrive()

    def at_once(self) -> bool:
        """Finish it if nothing has to be waited for."""
        exchange, result = self._exchange, self._exchange.result
        assert result is not None
        if result.words[0] < self._round if self._reads_result else not exchange.has_everybody(self._round):
            return False
        self._finish()
        return True

    def steps(self) -> Steps:
        """What is left to do."""
        if self._reads_result:
            assert self._exchange.result is not None
            yield self._exchange.result, self._round
        else:
            yield from self._exchange.everybody(self._round)
        self._finish()

    def _finish(self) -> None:
        exchange, first = self._exchange, self._slots[0]
        if self._reads_result:
            self._target.copy_(first)
        elif exchange.size == 2:
            exchange.reduce(self._target, self._slots, self._op)
        else:
            assert exchange.result is not None
            exchange.reduce(first, self._slots, self._op)
            exchange.result.store(self._round)
            self._target.copy_(first)


def is_flat(call: Call) -> bool:
    """Whether an all-reduce is small enough for one round."""
    return call.kind == "all_reduce" and call.target is not None and call.target.nbytes <= FLAT


def _all_reduce_flat(exchange: Exchange, call: Call) -> Steps:
    yield from FlatAllReduce(exchange, call).steps()


def _all_reduce(exchange: Exchange, call: Call) -> Steps:
    target = call.target
    assert target is not None
    exchange.show(target)
    round_number = exchange.arrive()
    yield from exchange.everybody(round_number)
    offsets = exchange.offers(round_number)
    if offsets is None:
        yield from relay(exchange, call)
        return
    if call.shared and can_be_joined(offsets):
        cuts = cuts_at_pages(offsets[0], target.numel(), target.element_size(), exchange.size)
        _reduce_in_place(exchange, call, offsets, (cuts[exchange.me], cuts[exchange.me + 1]), copies=False)
        call.result = exchange.joined(offsets, cuts, target.dtype)
    else:
        _reduce_in_place(exchange, call, offsets, part(target.numel(), exchange.me, exchange.size))
    yield from exchange.everybody(exchange.arrive())


def _reduce_in_place(
    exchange: Exchange, call: Call, offsets: Sequence[int], mine: tuple[int, int], copies: bool = True
) -> None:
    """Reduce this rank's slice straight from all ranks' buffers, and write it to all of them, or to its own alone."""
    assert call.target is not None
    assert call.op is not None
    me, dtype = exchange.me, call.target.dtype

    def views_of_pieces() -> Iterator[list[torch.Tensor]]:
        for a, b in pieces(*mine, dtype.itemsize, exchange.size):
            yield [
                arena.tensor(offset + a * dtype.itemsize, b - a, dtype)
                for arena, offset in zip(exchange.arenas, offsets, strict=True)
                if arena is not None
            ]

    views = exchange.remembered((*mine, dtype, *offsets), lambda: list(views_of_pieces()))
    for inputs in views:
        if copies:
            first, *others = inputs
            exchange.reduce(first, inputs, call.op)
            for other in others:
                other.copy_(first)
        else:
            exchange.reduce(inputs[me], inputs, call.op)
        exchange.check()
    views.reverse()  # so the next call of these tensors begins with what this one has left in the cache


def can_be_joined(offsets: Sequence[int]) -> bool:
    """Whether slices of tensors that lie there can be mapped in a row: a page has its place in all of them."""
    return len({offset % PAGE for offset in offsets}) == 1


def cuts_at_pages(offset: int, numel: int, itemsize: int, num: int) -> list[int]:
    """Where a tensor is cut for `num` ranks so that each slice but the first begins with a page: elements, 0 to numel.
    Slices may be empty."""
    in_page = offset % PAGE
    ends = [(in_page + part(numel, rank, num)[1] * itemsize) // PAGE * PAGE - in_page for rank in range(num - 1)]
    return [0, *(max(0, end // itemsize) for end in ends), numel]


# The other collectives: each rank shows its source, and takes what it needs from the others'.

Take = Callable[[Sequence[torch.Tensor], int, int], None]
"""Given all ranks' sources as (rows, columns a to b), do this rank's part for these columns."""


def _exposing(exchange: Exchange, call: Call) -> Steps:
    assert call.source is not None
    if call.source.nbytes > FLAT and not _may_be_read_meanwhile(exchange, call):
        call = replace(call, source=call.source.clone())
    source, take = _roles(exchange, call)
    if source.nbytes > FLAT:
        exchange.show(source)
        round_number = exchange.arrive()
        yield from exchange.everybody(round_number)
        shown = range(exchange.size) if call.peer is None else (call.peer,)
        offsets = [exchange.offer_of(rank, round_number) for rank in shown]
        if None not in offsets:
            take(_in_place(exchange, source, dict(zip(shown, offsets, strict=True))), 0, source.shape[1])
            exchange.check()  # what a rank that aborted has in its buffer may be anything
            yield from exchange.everybody(exchange.arrive())
            return
    rows, columns = source.shape
    step = max(1, CHUNK // (rows * source.element_size()))
    for a in range(0, columns, step):
        b = min(columns, a + step)
        slots = exchange.slots(exchange.next_round, rows * (b - a), source.dtype)
        if call.peer is None or call.peer == exchange.me:
            exchange.writer.write(slots[exchange.me].view(rows, -1), source[:, a:b])
        yield from exchange.everybody(exchange.arrive())
        take([slot.view(rows, -1) for slot in slots], a, b)


def _may_be_read_meanwhile(exchange: Exchange, call: Call) -> bool:
    """Whether this rank writes nothing that peers may still have to read: `out` may be a part of the source, or it of
    `out`."""
    source, target, me = call.source, call.target, exchange.me
    assert source is not None
    assert target is not None
    begin, target_begin = source.data_ptr(), target.data_ptr()
    if call.kind == "broadcast" or begin + source.nbytes <= target_begin or target_begin + target.nbytes <= begin:
        return True
    # In its own place, a value is only written over itself, or read by this rank alone.
    return (call.kind == "all_gather" and begin == target_begin + me * source.nbytes) or (
        call.kind == "reduce_scatter" and target_begin == begin + me * target.nbytes
    )


def _in_place(exchange: Exchange, like: torch.Tensor, offsets: dict[int, int | None]) -> list[torch.Tensor]:
    """Every rank's registered source; this rank's own stands for those that nobody reads."""
    found = []
    for rank, arena in enumerate(exchange.arenas):
        offset = offsets.get(rank)
        if offset is None or arena is None:
            found.append(like)
        else:
            found.append(arena.tensor(offset, like.numel(), like.dtype).view(like.shape))
    return found


def _roles(exchange: Exchange, call: Call) -> tuple[torch.Tensor, Take]:
    source, target, me, size, op = call.source, call.target, exchange.me, exchange.size, call.op
    assert source is not None
    assert target is not None
    flat = target.view(-1)

    def gather(sources: Sequence[torch.Tensor], a: int, b: int) -> None:
        for rank, theirs in enumerate(sources):
            place = flat.view(size, -1)[rank, a:b]
            if place.data_ptr() != theirs.data_ptr():  # this rank's own part may lie there already
                place.copy_(theirs[0])

    def copy_root(sources: Sequence[torch.Tensor], a: int, b: int) -> None:
        assert call.peer is not None
        if call.peer != me:
            flat[a:b].copy_(sources[call.peer][0])

    def reduce(sources: Sequence[torch.Tensor], a: int, b: int) -> None:
        assert op is not None
        for c, d in pieces(0, b - a, flat.element_size(), size):
            exchange.reduce(flat[a + c : a + d], [theirs[me, c:d] for theirs in sources], op)

    def pick(sources: Sequence[torch.Tensor], a: int, b: int) -> None:
        for rank, theirs in enumerate(sources):
            flat.view(size, -1)[rank, a:b].copy_(theirs[me])

    takes = {"all_gather": gather, "broadcast": copy_root, "reduce_scatter": reduce, "all_to_all": pick}
    rows = 1 if call.kind in ("all_gather", "broadcast") else size
    return source.view(rows, -1), takes[call.kind]
