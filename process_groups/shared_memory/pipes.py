"""Messages between the engine threads of two ranks: some tensors of any shape, sent without waiting, taken in order.

A pipeline's stages talk through these. Collectives are issued on the event loop; an engine thread that had to ask the
loop for every activation would wait for two hand-overs each time.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

import torch

from process_groups.arena import Mapping, no_memory
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import MESSAGE_WORDS, NUM_MESSAGES
from process_groups.shared_memory.writer import Writer
from process_groups.signals import Abandoned, Patience
from runtime.errors import CommunicationError, DeadlineExceeded, GroupClosed, InvalidCall

if TYPE_CHECKING:
    from process_groups.group import Group

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_ABSENT = -1
_LOOK = 0.05  # seconds between looks whether the peer is still there
_LONG = 1e8  # seconds: calls are made long before anybody waits for them, and who waits has a deadline
_MOST_KINDS = 64  # of messages whose memory is kept
_MOST_HEADERS = 1024  # whose meaning is kept

Message = Sequence[torch.Tensor | None]
"""What is sent: tensors, and None for one that is not there. `requires_grad` travels along."""

Idle = Callable[[], float]
"""Does a bit of something else; how many seconds later it has more to do: 0 at once, infinity when there is nothing."""


class Pipe(Protocol):
    """To and from one peer; for one thread at a time."""

    is_told_by_group: bool
    """Whether its messages are calls of its group, which notes them itself."""

    def expect(self, num_messages: int) -> None:
        """Before a step: so many messages will be received."""

    def send(self, message: Message) -> None:
        """Never waits. The tensors must stay as they are. Not where autograd follows."""

    def receive(self, deadline: float, idle: Idle) -> list[torch.Tensor | None]:
        """The next message, in memory of its own; `deadline` is a moment of time.monotonic."""

    def push(self) -> bool:
        """Send on what found no room before, as far as there is some now; whether everything is on its way."""


Signature = tuple[tuple[torch.dtype, torch.Size, bool] | None, ...]
"""What is the same of messages that are alike: of each tensor its dtype, its shape, and whether it needs a gradient."""


def signature_of(message: Message) -> Signature:
    return tuple(None if each is None else (each.dtype, each.shape, each.requires_grad) for each in message)


def describe(signature: Signature, places: Sequence[int]) -> list[int]:
    """A message's tensors as words: how many words follow; then for each dtype, requires_grad, place and shape."""
    words = [0]
    for each, place in zip(signature, places, strict=True):
        if each is None:
            words.append(_ABSENT)
            continue
        dtype, shape, requires_grad = each
        if dtype not in _CODES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InvalidCall(f"a stage can't pass {dtype} on; convert it to one of {known}.")
        words += [_CODES[dtype], requires_grad, place, len(shape), *shape]
    if len(words) > MESSAGE_WORDS:
        raise InvalidCall(f"a stage passes {len(signature)} tensors on, which are too many; join some of them.")
    words[0] = len(words) - 1
    return words


def read_description(words: Sequence[int]) -> tuple[Signature, list[int]]:
    """The signature, and the places."""
    found: list[tuple[torch.dtype, torch.Size, bool] | None] = []
    places, at = [], 1
    while at <= words[0]:
        if words[at] == _ABSENT:
            found.append(None)
            places.append(0)
            at += 1
            continue
        code, requires_grad, place, num_dims = words[at : at + 4]
        at += 4 + num_dims
        found.append((DTYPES[code], torch.Size(words[at - num_dims : at]), bool(requires_grad)))
        places.append(place)
    return tuple(found), places


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
    """Through shared memory: the sender copies into its registered memory, the receiver out of it.

    After a stage's own work caches are cold and each line of Python counts, so all that messages have in common is
    kept from one to the next.
    """

    is_told_by_group = False

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
        if self._exchange.is_abandoned():  # what a rank that gave up has in its memory may be anything
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
        return self._trouble() or GroupClosed("the group was given up")


def _header(arena: Mapping, start: int) -> memoryview:
    return arena.memory[start : start + 8 * MESSAGE_WORDS]


class CallPipe:
    """Through a group's sends and receives, which its event loop makes; where no memory is shared."""

    is_told_by_group = True

    def __init__(self, group: Group, peer: int, loop: asyncio.AbstractEventLoop) -> None:
        self._group, self._peer, self._loop = group, peer, loop
        self._received: SimpleQueue[list[torch.Tensor | None] | CommunicationError] = SimpleQueue()
        self._receiving: asyncio.Task[None] | None = None

    def expect(self, num_messages: int) -> None:
        self._loop.call_soon_threadsafe(self._start_receiving, num_messages)

    def _start_receiving(self, num_messages: int) -> None:
        self._receiving = self._loop.create_task(self._receive_all(num_messages))  # held, or it might be collected

    async def _receive_all(self, num_messages: int) -> None:
        try:
            for _ in range(num_messages):
                self._received.put(await self._receive_one())
        except CommunicationError as error:
            self._received.put(error)
        except BaseException as error:  # whoever waits shall know
            self._received.put(CommunicationError(f"{type(error).__name__}: {error}"))
            raise

    async def _receive_one(self) -> list[torch.Tensor | None]:
        group, header = self._group, torch.empty(MESSAGE_WORDS, dtype=torch.int64, device=self._group.device)
        await group.recv(header, self._peer, timeout=_LONG)
        message: list[torch.Tensor | None] = []
        for each in read_description(header.tolist())[0]:
            if each is None:
                message.append(None)
                continue
            dtype, shape, requires_grad = each
            made = torch.empty(shape, dtype=dtype, device=group.device)
            await group.recv(made, self._peer, timeout=_LONG)
            message.append(made.requires_grad_(requires_grad))
        return message

    def send(self, message: Message) -> None:
        words = describe(signature_of(message), [0] * len(message))
        header = torch.zeros(MESSAGE_WORDS, dtype=torch.int64)
        header[: len(words)] = torch.tensor(words)
        tensors = [header.to(self._group.device), *(tensor.detach() for tensor in message if tensor is not None)]
        self._loop.call_soon_threadsafe(self._issue, tensors)

    def _issue(self, tensors: Sequence[torch.Tensor]) -> None:
        try:
            for tensor in tensors:
                # The group holds it until it has ended, and learns of that although nobody awaits it.
                self._group.send(tensor, self._peer, timeout=_LONG).watch()
        except CommunicationError as error:  # the group is closed: whoever receives shall know
            self._received.put(error)

    def receive(self, deadline: float, idle: Idle) -> list[torch.Tensor | None]:
        while self._received.empty() and not idle():
            pass
        try:
            found = self._received.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise DeadlineExceeded("nothing came in time") from None
        if isinstance(found, CommunicationError):
            raise found
        return found

    def push(self) -> bool:
        return True  # whatever was issued arrives before the group is left
