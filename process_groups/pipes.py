"""Messages between the engine threads of two ranks: some tensors of any shape, sent without waiting, taken in order.

A pipeline's stages talk through these. Collectives are issued on the event loop; an engine thread that had to ask the
loop for every activation would wait for two hand-overs each time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

import torch

from process_groups.exchange import Exchange
from process_groups.shared_layout import MESSAGE_WORDS, NUM_MESSAGES
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

Message = Sequence[torch.Tensor | None]
"""What is sent: tensors, and None for one that is not there. `requires_grad` travels along."""

Idle = Callable[[], bool]
"""Does a bit of something else; False when there is nothing to do."""


class Pipe(Protocol):
    """To and from one peer; for one thread at a time."""

    def expect(self, num_messages: int) -> None:
        """Before a step: so many messages will be received."""

    def send(self, message: Message) -> None:
        """Never waits. The tensors must stay as they are."""

    def receive(self, deadline: float, idle: Idle) -> list[torch.Tensor | None]:
        """The next message, in memory of its own; `deadline` is a moment of time.monotonic."""

    def flush(self, deadline: float) -> None:
        """Wait until everything is on its way."""


def describe(message: Message, places: Sequence[int]) -> list[int]:
    """A message's tensors as words: how many; then for each dtype, requires_grad, place and shape."""
    words = [len(message)]
    for tensor, place in zip(message, places, strict=True):
        if tensor is None:
            words.append(_ABSENT)
        elif tensor.dtype not in _CODES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InvalidCall(f"a stage can't pass {tensor.dtype} on; convert it to one of {known}.")
        else:
            words += [_CODES[tensor.dtype], tensor.requires_grad, place, tensor.dim(), *tensor.shape]
    if len(words) > MESSAGE_WORDS:
        raise InvalidCall(f"a stage passes {len(message)} tensors on, which are too many; join some of them.")
    return words


class Described:
    """One tensor of a message, as its receiver reads it."""

    __slots__ = ("dtype", "place", "requires_grad", "shape")

    def __init__(self, dtype: torch.dtype, requires_grad: bool, place: int, shape: tuple[int, ...]) -> None:
        self.dtype, self.requires_grad, self.place, self.shape = dtype, requires_grad, place, shape


def read_description(words: Sequence[int]) -> list[Described | None]:
    found: list[Described | None] = []
    at = 1
    for _ in range(words[0]):
        if words[at] == _ABSENT:
            found.append(None)
            at += 1
            continue
        code, requires_grad, place, num_dims = words[at : at + 4]
        at += 4 + num_dims
        found.append(Described(DTYPES[code], bool(requires_grad), place, tuple(words[at - num_dims : at])))
    return found


class _Buffers:
    """Registered memory that is used again and again. Pages that nobody touches cost nothing, so sizes are generous."""

    def __init__(self, exchange: Exchange) -> None:
        self._own, self._free = exchange.own, dict[int, list[torch.Tensor]]()

    def take(self, num_bytes: int) -> torch.Tensor:
        size = max(4096, 1 << (num_bytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        made = self._own.empty((size,), torch.uint8)
        if made is None:
            raise CommunicationError(f"no memory for a message of {num_bytes} bytes")
        return made

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        for buffer in buffers:
            self._free[buffer.numel()].append(buffer)


class SharedPipe:
    """Through shared memory: the sender copies into its registered memory, the receiver out of it."""

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
        self._buffers = _Buffers(exchange)
        self._num_sent = self._num_received = 0
        self._pending: deque[tuple[list[int], list[torch.Tensor]]] = deque()
        """Described and copied, but there was no room to show them."""
        self._shown: deque[list[torch.Tensor]] = deque()
        """What the peer has not taken yet, oldest first."""
        self._headers = [
            exchange.own.memory[at : at + 8 * MESSAGE_WORDS].cast("q")
            for at in (layout.message(peer, number) for number in range(NUM_MESSAGES))
        ]
        self._headers_of_peer = [
            arena.memory[at : at + 8 * MESSAGE_WORDS].cast("q")
            for at in (layout.message(me, number) for number in range(NUM_MESSAGES))
        ]

    def expect(self, num_messages: int) -> None:
        pass

    def send(self, message: Message) -> None:
        self._reclaim()
        buffers, places = [], []
        for tensor in message:
            if tensor is None or tensor.numel() == 0:
                places.append(0)
                continue
            buffer = self._buffers.take(tensor.nbytes)
            buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            place = self._exchange.own.offset_of(buffer)
            assert place is not None
            buffers.append(buffer)
            places.append(place)
        self._pending.append((describe(message, places), buffers))
        self._show()

    def _reclaim(self) -> None:
        while self._shown and self._taken_by_peer.value > self._num_sent - len(self._shown):
            self._buffers.give_back(self._shown.popleft())

    def _show(self) -> bool:
        """Show what waits, as far as there is room; whether none waits any more."""
        while self._pending and self._taken_by_peer.value > self._num_sent - NUM_MESSAGES:
            words, buffers = self._pending.popleft()
            header = self._headers[self._num_sent % NUM_MESSAGES]
            for index, word in enumerate(words):
                header[index] = word
            self._shown.append(buffers)
            self._num_sent += 1
            self._piped.store(self._num_sent)
        return not self._pending

    def receive(self, deadline: float, idle: Idle) -> list[torch.Tensor | None]:
        self._wait(self._has_come, deadline, idle)
        header = self._headers_of_peer[self._num_received % NUM_MESSAGES]
        message = [None if each is None else self._copy(each) for each in read_description(header)]
        self._exchange.check()  # what a rank that gave up has in its memory may be anything
        self._num_received += 1
        self._taken.store(self._num_received)
        return message

    def _has_come(self, end: float) -> bool:
        number = self._num_received + 1
        return self._piped_by_peer.reaches(number, end, self._patience, self._exchange.is_abandoned)

    def _copy(self, each: Described) -> torch.Tensor:
        made = torch.empty(each.shape, dtype=each.dtype)
        if made.numel():
            made.view(-1).copy_(self._arena.tensor(each.place, made.numel(), each.dtype))
        return made.requires_grad_(each.requires_grad)

    def flush(self, deadline: float) -> None:
        def all_shown(end: float) -> bool:
            room = self._num_sent - NUM_MESSAGES + 1
            return self._show() or (
                self._taken_by_peer.reaches(room, end, self._patience, self._exchange.is_abandoned) and self._show()
            )

        self._wait(all_shown, deadline, lambda: False)

    def _wait(self, is_over: Callable[[float], bool], deadline: float, idle: Idle) -> None:
        """Until `is_over`, which may itself wait until the moment it is given; meanwhile do what is to be done."""
        try:
            while not is_over(0.0):
                self._show()
                if idle():
                    continue
                now = time.monotonic()
                if is_over(min(deadline, now + _LOOK)):
                    return
                if (trouble := self._trouble()) is not None:
                    raise trouble
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded("nothing came in time")
        except Abandoned:
            raise self._trouble() or GroupClosed("the group was given up") from None


class CallPipe:
    """Through a group's sends and receives, which its event loop makes; where no memory is shared."""

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

    async def _receive_one(self) -> list[torch.Tensor | None]:
        group, header = self._group, torch.empty(MESSAGE_WORDS, dtype=torch.int64, device=self._group.device)
        await group.recv(header, self._peer)
        message: list[torch.Tensor | None] = []
        for each in read_description(header.tolist()):
            if each is None:
                message.append(None)
                continue
            made = torch.empty(each.shape, dtype=each.dtype, device=group.device)
            await group.recv(made, self._peer)
            message.append(made.requires_grad_(each.requires_grad))
        return message

    def send(self, message: Message) -> None:
        words = describe(message, [0] * len(message))
        header = torch.zeros(MESSAGE_WORDS, dtype=torch.int64)
        header[: len(words)] = torch.tensor(words)
        tensors = [header.to(self._group.device), *(tensor.detach() for tensor in message if tensor is not None)]
        self._loop.call_soon_threadsafe(self._issue, tensors)

    def _issue(self, tensors: Sequence[torch.Tensor]) -> None:
        try:
            for tensor in tensors:
                self._group.send(tensor, self._peer)  # the group holds it until it has ended
        except CommunicationError as error:  # the group is closed: whoever receives shall know
            self._received.put(error)

    def receive(self, deadline: float, idle: Idle) -> list[torch.Tensor | None]:
        while self._received.empty() and idle():
            pass
        try:
            found = self._received.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise DeadlineExceeded("nothing came in time") from None
        if isinstance(found, CommunicationError):
            raise found
        return found

    def flush(self, deadline: float) -> None:
        """Whatever was issued arrives before the group is left."""
