"""Sends and receives through shared memory: packets in the sender's arena, which the receiver reads.

A registered tensor above 64 KiB is one packet that only says where it lies, unless the receiver is far (`writer`).
Everything else is copied into packets; a send whose packets all found room has ended, whether or not the receiver has
come.

Where the receiver's tensor is registered too, both copy, for one core alone gets only half as much out of the other's
cache: the receiver begins with the first piece, the sender with the last, until they meet.

    receiver  ──▶  0  1  2  3  4  5  6  7  ◀──  sender

Either may come late or be interrupted, so neither leaves a piece to the other that has not begun it. Whoever begins a
piece says so before it looks how far the other is. Both may then copy the piece at which they meet, which does no harm;
what must not be is that the sender still writes when the receiver has ended, so that one waits for it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import increment_version

from process_groups.call import Call
from process_groups.call_queue import CallQueue, Quick, Steps
from process_groups.counters import Abandoned
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import NUM_PACKETS, PACKET
from process_groups.shared_memory.streaming import stream
from process_groups.shared_memory.writer import WORTH_STREAMING, Writer

_HEADER = struct.Struct("<QQ")
_WORTH_SHOWING = 64 << 10  # bytes: a larger registered tensor may be read where it lies; then the sender waits
_PIECE = 256 << 10  # bytes that one of them copies at once
_MOST_KNOWN = 256  # sizes whose views are kept


def _pieces(num_bytes: int) -> tuple[int, int]:
    """How many, and the size of all but the last: whole cache lines."""
    size = min(_PIECE, -(-num_bytes // 2 // 64) * 64)
    return -(-num_bytes // size), size


class _Pair:
    """The packets from one rank to another, as one of the two sees them."""

    def __init__(self, exchange: Exchange, source: int, target: int) -> None:
        layout, sender = exchange.layout, exchange.arenas[source]
        assert sender is not None
        peer = target if source == exchange.me else source
        receiver = exchange.arenas[target]
        assert receiver is not None
        self._sender, self._receiver, self._memory = sender, receiver, sender.memory
        self._is_abandoned, self._fence = exchange.is_abandoned, threading.Lock()
        self._receiving = exchange.words(target, layout.receiving(source), 2)
        self._helping = exchange.words(source, layout.helping(target), 3)
        self.helped = exchange.counter(source, layout.helping(target), peer)
        self._headers = [layout.header(target, number) for number in range(NUM_PACKETS)]
        self._places = [layout.packet(target, number) for number in range(NUM_PACKETS)]
        self.sent = exchange.counter(source, layout.sent(target), peer)
        self.consumed = exchange.counter(target, layout.consumed(source), peer)
        self.number = 0
        """Packets so far; a tensor that is shown counts for two."""
        self._views: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def _packet(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The beginning of the next packet."""
        views = self._views.get((numel, dtype))
        if views is None:
            if len(self._views) >= _MOST_KNOWN:
                self._views.clear()
            views = self._views[numel, dtype] = [self._sender.tensor(place, numel, dtype) for place in self._places]
        return views[self.number % NUM_PACKETS]

    def _claim(self, words: memoryview, index: int, value: int) -> None:
        """Have the other one see it before this one looks at what the other has claimed."""
        words[index] = value
        with self._fence:  # never contended
            pass


class Outbox(_Pair):
    """For the sender."""

    def __init__(self, exchange: Exchange, source: int, target: int) -> None:
        super().__init__(exchange, source, target)
        self._writer = Writer()

    def send(self, call: Call) -> Steps:
        source = call.source
        assert source is not None
        source = source if source.dim() == 1 else source.view(-1)
        is_worth_showing = source.nbytes > _WORTH_SHOWING and not self._writer.is_far
        offset = self._sender.offset_of(source) if is_worth_showing else None
        if offset is not None:
            return self._show(source, offset)
        if source.nbytes > PACKET:
            return self._put(torch.split(source.view(torch.uint8), PACKET))
        return self._put((source,) if source.numel() else ())

    def begin(self, call: Call) -> Steps | None:
        """As much as can be done at once; what is left to do."""
        source = call.source
        assert source is not None
        if not 0 < source.nbytes <= _WORTH_SHOWING or self.consumed.words[0] <= self.number - NUM_PACKETS:
            return self.send(call)
        if call.memory is not None and source.nbytes < WORTH_STREAMING:
            place = self._places[self.number % NUM_PACKETS]
            self._memory[place : place + source.nbytes] = call.memory
        else:
            packet, source = (
                self._packet(source.numel(), source.dtype),
                source if source.dim() == 1 else source.view(-1),
            )
            if source.nbytes < WORTH_STREAMING:
                packet.copy_(source)
            else:
                stream(packet, source)  # near, the cache would save two microseconds; far, this saves ten
        self.number += 1
        self.sent.store(self.number)
        return None

    def _put(self, parts: Sequence[torch.Tensor]) -> Steps:
        for part in parts:
            if self.consumed.value <= self.number - NUM_PACKETS:
                yield self.consumed, self.number - NUM_PACKETS + 1
            self._writer.write(self._packet(part.numel(), part.dtype), part)
            if part.nbytes > _WORTH_SHOWING or len(parts) > 1:
                self._write_header(part.nbytes, 0)
            self.number += 1
            self.sent.store(self.number)

    def _show(self, source: torch.Tensor, offset: int) -> Steps:
        """Let the receiver read where the values lie, and help it; they are held until it has all of them."""
        if self.consumed.value <= self.number - NUM_PACKETS:
            yield self.consumed, self.number - NUM_PACKETS + 1
        self._helping[2] = _pieces(source.nbytes)[0]
        self._write_header(source.nbytes, offset + 1)
        self.number += 2  # for the receiver says twice that it is there: when it begins, and when it has done
        self.sent.store(self.number - 1)
        yield self.consumed, self.number - 1
        self._help(source)
        yield self.consumed, self.number

    def _help(self, source: torch.Tensor) -> None:
        """Copy pieces, the last one first, until the receiver has begun all that are left."""
        place = self._receiving[1] - 1
        if place < 0:
            return
        values, (left, size) = source.view(torch.uint8), _pieces(source.nbytes)
        while True:
            begun = self._helping[1] + 1
            self._claim(self._helping, 1, begun)
            if left <= self._receiving[0]:
                break
            left -= 1
            self._helping[2] = left
            if self._is_abandoned():  # a receiver that aborted may use its buffer for something else
                raise Abandoned
            part = values[left * size : (left + 1) * size]
            start = place + left * size
            self._writer.write(self._receiver.bytes[start : start + len(part)], part)
            self.helped.store(begun)
        self.helped.store(begun)

    def _write_header(self, num_bytes: int, place: int) -> None:
        _HEADER.pack_into(self._memory, self._headers[self.number % NUM_PACKETS], num_bytes, place)


class Inbox(_Pair):
    """For the receiver."""

    def receive(self, call: Call) -> Steps:
        target = call.target
        assert target is not None
        target = target if target.dim() == 1 else target.view(-1)
        if target.nbytes <= _WORTH_SHOWING:
            return self._take(target, call.memory)
        return self._take_all(target.view(torch.uint8))

    def begin(self, call: Call) -> Steps | None:
        """As much as can be done at once; what is left to do."""
        target = call.target
        assert target is not None
        if not 0 < target.nbytes <= _WORTH_SHOWING or self.sent.words[0] <= self.number:
            return self.receive(call)
        self._take_one(target if target.dim() == 1 else target.view(-1), call.memory)
        return None

    def _take(self, target: torch.Tensor, memory: memoryview | None) -> Steps:
        """One packet, which needs no header: both ends know its size."""
        if target.numel() == 0:
            return
        if self.sent.value <= self.number:
            yield self.sent, self.number + 1
        self._take_one(target, memory)

    def _take_one(self, target: torch.Tensor, memory: memoryview | None) -> None:
        if memory is not None:
            place = self._places[self.number % NUM_PACKETS]
            memory[:] = self._memory[place : place + len(memory)]
            increment_version(target)  # torch has not seen that it was written to
        else:
            target.copy_(self._packet(target.numel(), target.dtype))
        self.number += 1
        self.consumed.store(self.number)

    def _take_all(self, target: torch.Tensor) -> Steps:
        start = 0
        while start < target.numel():
            if self.sent.value <= self.number:
                yield self.sent, self.number + 1
            num_bytes, place = _HEADER.unpack_from(self._memory, self._headers[self.number % NUM_PACKETS])
            if place:
                yield from self._take_shown(target, place - 1)
                return
            target[start : start + num_bytes].copy_(self._packet(num_bytes, torch.uint8))
            start += num_bytes
            self.number += 1
            self.consumed.store(self.number)

    def _take_shown(self, target: torch.Tensor, place: int) -> Steps:
        """Copy the sender's tensor, the first piece first, but for what the sender has begun to copy."""
        own_place, begun, (_, size) = self._receiver.offset_of(target), 0, _pieces(len(target))
        self._receiving[0], self._receiving[1] = 0, 0 if own_place is None else own_place + 1
        self.consumed.store(self.number + 1)
        while True:
            self._claim(self._receiving, 0, begun + 1)
            if begun >= self._helping[2]:
                break
            part = target[begun * size : (begun + 1) * size]
            start = place + begun * size
            part.copy_(self._sender.bytes[start : start + len(part)])
            begun += 1
        if self.helped.value < (last := self._helping[1]):
            yield self.helped, last
        if self._is_abandoned():  # what a sender that aborted has in its buffer may be anything
            raise Abandoned
        self.number += 2
        self.consumed.store(self.number)


class Packets:
    """All sends and receives between this rank and those of its group that share its memory."""

    def __init__(self, exchange: Exchange, make_queue: Callable[[str], CallQueue]) -> None:
        self._exchange, self._make_queue = exchange, make_queue
        self._boxes: dict[tuple[str, int], tuple[CallQueue, Outbox | Inbox]] = {}

    def reaches(self, peer: int | None) -> bool:
        """Whether a peer shares this rank's memory."""
        return peer is not None and self._exchange.arenas[peer] is not None

    def quick(self, call: Call) -> Quick | None:
        """How a small send or receive is carried out at once."""
        tensor = call.source if call.kind == "send" else call.target
        assert tensor is not None
        assert call.peer is not None
        if not 0 < tensor.nbytes <= _WORTH_SHOWING:
            return None
        queue, box = self._boxes.get((call.kind, call.peer)) or self._open(call.kind, call.peer)
        return Quick(queue, lambda: queue.is_idle, box.begin)

    def queue_and_steps(self, call: Call) -> tuple[CallQueue, Steps]:
        """In which order a send or receive comes, and what is to be done."""
        assert call.peer is not None
        queue, box = self._boxes.get((call.kind, call.peer)) or self._open(call.kind, call.peer)
        return queue, box.send(call) if isinstance(box, Outbox) else box.receive(call)

    def _open(self, kind: str, peer: int) -> tuple[CallQueue, Outbox | Inbox]:
        queue, me = self._make_queue(f"{kind}-{peer}"), self._exchange.me
        box = Outbox(self._exchange, me, peer) if kind == "send" else Inbox(self._exchange, peer, me)
        self._boxes[kind, peer] = queue, box
        return self._boxes[kind, peer]

    def queues(self) -> Iterator[CallQueue]:
        for queue, _ in self._boxes.values():
            yield queue
