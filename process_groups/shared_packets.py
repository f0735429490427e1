"""Sends and receives through shared memory: packets in the sender's arena, which the receiver reads.

A registered tensor above 64 KiB is one packet that only says where it lies. Everything else is copied into packets; a
send whose packets all found room has ended, whether or not the receiver has come.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import increment_version

from process_groups.exchange import Exchange
from process_groups.lane import Lane, Quick, Steps
from process_groups.shared_layout import NUM_PACKETS, PACKET
from process_groups.signals import Abandoned
from process_groups.transport import Call

_HEADER = struct.Struct("<QQ")
_WORTH_SHOWING = 64 << 10  # bytes: a larger registered tensor is read where it lies, and the sender waits for that
_MOST_KNOWN = 256  # sizes whose views are kept


class _Pair:
    """The packets from one rank to another, as one of the two sees them."""

    def __init__(self, exchange: Exchange, source: int, target: int) -> None:
        layout, sender = exchange.layout, exchange.arenas[source]
        assert sender is not None
        peer = target if source == exchange.me else source
        self._sender, self._memory, self._is_abandoned = sender, sender.memory, exchange.is_abandoned
        self._headers = [layout.header(target, number) for number in range(NUM_PACKETS)]
        self._places = [layout.packet(target, number) for number in range(NUM_PACKETS)]
        self.sent = exchange.counter(source, layout.sent(target), peer)
        self.consumed = exchange.counter(target, layout.consumed(source), peer)
        self.number = 0
        """Packets so far."""
        self._views: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def _packet(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The beginning of the next packet."""
        views = self._views.get((numel, dtype))
        if views is None:
            if len(self._views) >= _MOST_KNOWN:
                self._views.clear()
            views = self._views[numel, dtype] = [self._sender.tensor(place, numel, dtype) for place in self._places]
        return views[self.number % NUM_PACKETS]


class Outbox(_Pair):
    """For the sender."""

    def send(self, call: Call) -> Steps:
        source = call.source
        assert source is not None
        source = source if source.dim() == 1 else source.view(-1)
        offset = self._sender.offset_of(source) if source.nbytes > _WORTH_SHOWING else None
        if offset is not None:
            return self._show(source, offset)
        if source.nbytes > PACKET:
            return self._put(torch.split(source.view(torch.uint8), PACKET))
        return self._put((source,) if source.numel() else ())

    def at_once(self, call: Call) -> bool:
        source = call.source
        assert source is not None
        if not 0 < source.nbytes <= _WORTH_SHOWING or self.consumed.words[0] <= self.number - NUM_PACKETS:
            return False
        if call.memory is not None:
            place = self._places[self.number % NUM_PACKETS]
            self._memory[place : place + source.nbytes] = call.memory
        else:
            source = source if source.dim() == 1 else source.view(-1)
            self._packet(source.numel(), source.dtype).copy_(source)
        self.number += 1
        self.sent.store(self.number)
        return True

    def begin(self, call: Call) -> Steps | None:
        return None if self.at_once(call) else self.send(call)

    def _put(self, parts: Sequence[torch.Tensor]) -> Steps:
        for part in parts:
            if self.consumed.value <= self.number - NUM_PACKETS:
                yield self.consumed, self.number - NUM_PACKETS + 1
            self._packet(part.numel(), part.dtype).copy_(part)
            if part.nbytes > _WORTH_SHOWING or len(parts) > 1:
                self._write_header(part.nbytes, 0)
            self.number += 1
            self.sent.store(self.number)

    def _show(self, source: torch.Tensor, offset: int) -> Steps:
        """Let the receiver read where the values lie, and wait until it has; they are held until then."""
        if self.consumed.value <= self.number - NUM_PACKETS:
            yield self.consumed, self.number - NUM_PACKETS + 1
        self._write_header(source.nbytes, offset + 1)
        self.number += 1
        self.sent.store(self.number)
        yield self.consumed, self.number

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

    def at_once(self, call: Call) -> bool:
        target = call.target
        assert target is not None
        if not 0 < target.nbytes <= _WORTH_SHOWING or self.sent.words[0] <= self.number:
            return False
        self._take_one(target if target.dim() == 1 else target.view(-1), call.memory)
        return True

    def begin(self, call: Call) -> Steps | None:
        return None if self.at_once(call) else self.receive(call)

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
            packet = (
                self._sender.bytes[place - 1 : place - 1 + num_bytes] if place else self._packet(num_bytes, torch.uint8)
            )
            target[start : start + num_bytes].copy_(packet)
            if place and self._is_abandoned():  # what a sender that gave up has in its buffer may be anything
                raise Abandoned
            start += num_bytes
            self.number += 1
            self.consumed.store(self.number)


class Packets:
    """All sends and receives between this rank and those of its group that share its memory."""

    def __init__(self, exchange: Exchange, make_lane: Callable[[str], Lane]) -> None:
        self._exchange, self._make_lane = exchange, make_lane
        self._boxes: dict[tuple[str, int], tuple[Lane, Outbox | Inbox]] = {}

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
        lane, box = self._boxes.get((call.kind, call.peer)) or self._open(call.kind, call.peer)
        return Quick(lane, lambda: lane.is_idle, box.begin)

    def lane_and_steps(self, call: Call) -> tuple[Lane, Steps]:
        """In which order a send or receive comes, and what is to be done."""
        assert call.peer is not None
        lane, box = self._boxes.get((call.kind, call.peer)) or self._open(call.kind, call.peer)
        return lane, box.send(call) if isinstance(box, Outbox) else box.receive(call)

    def _open(self, kind: str, peer: int) -> tuple[Lane, Outbox | Inbox]:
        lane, me = self._make_lane(f"{kind}-{peer}"), self._exchange.me
        box = Outbox(self._exchange, me, peer) if kind == "send" else Inbox(self._exchange, peer, me)
        self._boxes[kind, peer] = lane, box
        return self._boxes[kind, peer]

    def lanes(self) -> Iterator[Lane]:
        for lane, _ in self._boxes.values():
            yield lane
