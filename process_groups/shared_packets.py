"""Sends and receives through shared memory: packets in the sender's arena, which the receiver reads.

A large registered tensor is one packet that only says where it lies. Everything else is copied into packets; a send
whose packets all found room has ended, whether or not the receiver has come.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import torch

from process_groups.arena import Mapping
from process_groups.lane import Lane, Steps
from process_groups.shared_layout import NUM_PACKETS, PACKET, GroupLayout
from process_groups.signals import Counter
from process_groups.transport import Call

_HEADER = struct.Struct("<QQ")


class _Pair:
    """The packets from one rank to another, as one of the two sees them."""

    def __init__(self, layout: GroupLayout, sender: Mapping, receiver: Mapping, source: int, target: int) -> None:
        self._sender, self._memory = sender, sender.memory
        self._headers = [layout.header(target, number) for number in range(NUM_PACKETS)]
        self._packets = [layout.packet(target, number) for number in range(NUM_PACKETS)]
        self.sent = Counter(sender, layout.sent(target))
        self.consumed = Counter(receiver, layout.consumed(source))
        self.number = 0
        """Packets so far."""

    def _packet(self, num_bytes: int) -> torch.Tensor:
        start = self._packets[self.number % NUM_PACKETS]
        return self._sender.bytes[start : start + num_bytes]


class Outbox(_Pair):
    """For the sender."""

    def send(self, call: Call) -> Steps:
        assert call.source is not None
        data = call.source.view(-1).view(torch.uint8)
        offset = self._sender.offset_of(data)
        if offset is not None and data.numel() > PACKET:
            yield from self._post(data.numel(), offset + 1)
            yield self.consumed, self.number
            return
        for start in range(0, data.numel(), PACKET):
            part = data[start : start + PACKET]
            if self.number >= NUM_PACKETS and self.consumed.value <= self.number - NUM_PACKETS:
                yield self.consumed, self.number - NUM_PACKETS + 1
            self._packet(part.numel()).copy_(part)
            yield from self._post(part.numel(), 0)

    def _post(self, num_bytes: int, place: int) -> Steps:
        if self.number >= NUM_PACKETS and self.consumed.value <= self.number - NUM_PACKETS:
            yield self.consumed, self.number - NUM_PACKETS + 1
        _HEADER.pack_into(self._memory, self._headers[self.number % NUM_PACKETS], num_bytes, place)
        self.number += 1
        self.sent.store(self.number)


class Inbox(_Pair):
    """For the receiver."""

    def receive(self, call: Call) -> Steps:
        assert call.target is not None
        data = call.target.view(-1).view(torch.uint8)
        start = 0
        while start < data.numel():
            if self.sent.value <= self.number:
                yield self.sent, self.number + 1
            num_bytes, place = _HEADER.unpack_from(self._memory, self._headers[self.number % NUM_PACKETS])
            packet = self._sender.bytes[place - 1 : place - 1 + num_bytes] if place else self._packet(num_bytes)
            data[start : start + num_bytes].copy_(packet)
            start += num_bytes
            self.number += 1
            self.consumed.store(self.number)


class Packets:
    """All sends and receives between this rank and those of its group that share its memory."""

    def __init__(
        self, arenas: Sequence[Mapping | None], me: int, layout: GroupLayout, make_lane: Callable[[str], Lane]
    ) -> None:
        self._arenas, self._me, self._layout, self._make_lane = arenas, me, layout, make_lane
        self._boxes: dict[tuple[str, int], tuple[Lane, Outbox | Inbox]] = {}

    def reaches(self, peer: int | None) -> bool:
        """Whether a peer shares this rank's memory."""
        return peer is not None and self._arenas[peer] is not None

    def lane_and_steps(self, call: Call) -> tuple[Lane, Steps]:
        """In which order a send or receive comes, and what is to be done."""
        assert call.peer is not None
        lane, box = self._boxes.get((call.kind, call.peer)) or self._open(call.kind, call.peer)
        return lane, box.send(call) if isinstance(box, Outbox) else box.receive(call)

    def _open(self, kind: str, peer: int) -> tuple[Lane, Outbox | Inbox]:
        mine, theirs = self._arenas[self._me], self._arenas[peer]
        assert mine is not None
        assert theirs is not None
        box = (
            Outbox(self._layout, mine, theirs, self._me, peer)
            if kind == "send"
            else Inbox(self._layout, theirs, mine, peer, self._me)
        )
        self._boxes[kind, peer] = self._make_lane(f"{kind}-{peer}"), box
        return self._boxes[kind, peer]

    def lanes(self) -> Iterator[Lane]:
        for lane, _ in self._boxes.values():
            yield lane
