"""Pipes through shared memory: the sender copies a message into its registered memory, the receiver out of it."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable

import torch

from process_groups.arena import Mapping, no_memory
from process_groups.counters import Abandoned, Patience
from process_groups.pipes import MESSAGE_WORDS, Idle, Message, Signature, describe, read_description, signature_of
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import NUM_MESSAGES
from process_groups.shared_memory.writer import Writer
from runtime.errors import CommunicationError, DeadlineExceeded, GroupClosed

_LOOK = 0.05  # seconds between looks whether the peer is still there
_MOST_KINDS = 64  # signatures whose message memory is kept
_MOST_HEADERS = 1024  # headers whose decoded form is kept


class _Prepared:
    """Registered memory for messages that are alike, and what says where it lies: made once, used again and again."""

    def __init__(self, exchange: Exchange, signature: Signature) -> None:
        self.signature = signature
        self._targets: list[torch.Tensor | None] = []
        places = []
        for each in signature:
            made = None if each is None else exchange.own.empty(each[1], each[0])
            if each is not None and made is None:
                raise no_memory(f"a message with {each[0]} {tuple(each[1])}", each[1].numel() * each[0].itemsize)
            self._targets.append(made)
            place = None if made is None or not made.numel() else exchange.own.offset_of(made)
            places.append(0 if place is None else place)
        words = describe(signature, places)
        self.header = memoryview(array("q", words)).cast("B")

    def fill(self, message: Message, writer: Writer) -> None:
        for target, tensor in zip(self._targets, message, strict=True):
            if target is not None and tensor is not None:
                writer.write(target, tensor)


class SharedPipe:
    """A pipe to and from one peer on this host.

    After a stage's own work the caches are cold and each line of Python counts, so memory and headers are kept from
    one message to the next of the same signature.
    """

    is_recorded_by_group = False

    def __init__(
        self,
        exchange: Exchange,
        peer: int,
        patience: Patience,
        trouble: Callable[[], CommunicationError | None],
    ) -> None:
        me, layout = exchange.me, exchange.layout
        arena = exchange.arenas[peer]
        assert arena is not None
        self._exchange, self._peer, self._arena = exchange, peer, arena
        self._patience, self._trouble = patience, trouble
        self._piped = exchange.counter(me, layout.piped(peer), peer)
        self._taken_by_peer = exchange.counter(peer, layout.taken(me), peer)
        self._piped_by_peer = exchange.counter(peer, layout.piped(me), peer)
        self._taken = exchange.counter(me, layout.taken(peer), peer)
        self._num_sent = self._num_received = 0
        self._writer = Writer()
        self._free: dict[Signature, list[_Prepared]] = {}
        self._pending: deque[_Prepared] = deque()
        """Filled, but there was no room to show them."""
        self._shown: deque[_Prepared] = deque()
        """What the peer has not taken yet, oldest first."""
        self._known: dict[bytes, list[tuple[torch.Tensor, bool] | None]] = {}
        """The peer's memory that a header stands for."""
        self._headers = [_header(exchange.own, layout.message(peer, number)) for number in range(NUM_MESSAGES)]
        self._headers_of_peer = [_header(arena, layout.message(me, number)) for number in range(NUM_MESSAGES)]

    def expect(self, num_messages: int) -> None:
        pass

    def send(self, message: Message) -> None:
        signature = signature_of(message)
        free = self._free.get(signature)
        prepared = free.pop() if free else self._prepare(signature)
        prepared.fill(message, self._writer)
        self._pending.append(prepared)
        self.push()

    def _prepare(self, signature: Signature) -> _Prepared:
        """Memory that the peer has done with, or else new."""
        while self._shown and self._taken_by_peer.value > self._num_sent - len(self._shown):
            done = self._shown.popleft()
            self._free.setdefault(done.signature, []).append(done)
        if len(self._free) > _MOST_KINDS:  # shapes that come and go: let go of memory that others used
            self._free = {signature: self._free.get(signature, [])}
        free = self._free.get(signature)
        return free.pop() if free else _Prepared(self._exchange, signature)

    def push(self) -> bool:
        while self._pending and self._taken_by_peer.value > self._num_sent - NUM_MESSAGES:
            prepared = self._pending.popleft()
            self._headers[self._num_sent % NUM_MESSAGES][: len(prepared.header)] = prepared.header
            self._num_sent += 1
            self._piped.store(self._num_sent)
            self._shown.append(prepared)
        if not self._pending:
            return True
        if self._exchange.is_abandoned():
            raise self._given_up()
        if (trouble := self._trouble()) is not None:  # there will never be room
            raise trouble
        return False

    def receive(self, deadline: float, idle: Idle) -> list[torch.Tensor | None]:
        self._wait(self._has_come, deadline, idle)
        message = [
            None if each is None else each[0].clone().requires_grad_() if each[1] else each[0].clone()
            for each in self._sources(self._headers_of_peer[self._num_received % NUM_MESSAGES])
        ]
        if self._exchange.is_abandoned():  # what a rank that aborted has in its memory may be anything
            raise self._given_up()
        is_full = self._piped_by_peer.value - self._num_received >= NUM_MESSAGES - 1
        self._num_received += 1
        if is_full:
            self._taken.store(self._num_received)
        else:  # nobody waits for room
            self._taken.words[0] = self._num_received
        return message

    def _sources(self, header: memoryview) -> list[tuple[torch.Tensor, bool] | None]:
        text = bytes(header[: 8 + 8 * header[0]])  # of a message with less than 256 words the first byte says how many
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= _MOST_HEADERS:
                self._known.clear()
            signature, places = read_description(memoryview(text).cast("q").tolist())
            found = self._known[text] = [
                None if each is None else (self._arena.tensor(place, each[1].numel(), each[0]).view(each[1]), each[2])
                for each, place in zip(signature, places, strict=True)
            ]
        return found

    def _has_come(self, end: float) -> bool:
        number = self._num_received + 1
        return self._piped_by_peer.reaches(number, end, self._patience, self._exchange.is_abandoned)

    def _wait(self, is_over: Callable[[float], bool], deadline: float, idle: Idle) -> None:
        """Until `is_over`, which may itself wait until the moment it is given; meanwhile do what is to be done."""
        try:
            while not is_over(0.0):
                if not (pause := idle()):
                    continue
                if is_over(min(deadline, time.monotonic() + min(pause, _LOOK))):
                    return
                if (trouble := self._trouble()) is not None:
                    raise trouble
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded("nothing came in time")
        except Abandoned:
            raise self._given_up() from None

    def _given_up(self) -> CommunicationError:
        return self._trouble() or GroupClosed("the group was aborted")


def _header(arena: Mapping, start: int) -> memoryview:
    return arena.memory[start : start + 8 * MESSAGE_WORDS]
