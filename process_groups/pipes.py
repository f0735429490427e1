"""Messages between the engine threads of two ranks: a few tensors of any shape, sent without waiting, taken in order.

Pipeline stages send activations and gradients through these. A group's calls are issued on the event loop; an engine
thread that used them directly would wait for two thread switches per message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from process_groups.work import Work
from runtime.errors import CommunicationError, DeadlineExceeded, InvalidCall

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_ABSENT = -1
_UNLIMITED = 1e8  # seconds: these calls are made long before anyone waits for them, and `receive` has a deadline
MESSAGE_WORDS = 256
"""Words of 8 bytes in a message's header: their number, then what the message consists of and where it lies."""

Message = Sequence[torch.Tensor | None]
"""What is sent: tensors, and None for an absent one. `requires_grad` is sent along."""

Idle = Callable[[], float]
"""Does a bit of other work; returns after how many seconds it has more: 0 at once, infinity for never."""


class Pipe(Protocol):
    """To and from one peer; for one thread at a time."""

    is_recorded_by_group: bool
    """Whether its messages are calls of its group, which records them itself."""

    def expect(self, num_messages: int) -> None:
        """Before a step: so many messages will be received."""

    def send(self, message: Message) -> None:
        """Never waits. The tensors must not change afterwards, and autograd must be off."""

    def receive(self, deadline: float, idle: Idle) -> list[torch.Tensor | None]:
        """The next message, in memory of its own; `deadline` is a moment of time.monotonic."""

    def push(self) -> bool:
        """Send what `send` found no room for, as far as there is room now; whether nothing is left."""


Signature = tuple[tuple[torch.dtype, torch.Size, bool] | None, ...]
"""Of each tensor its dtype, its shape, and whether it needs a gradient."""


class SendsAndReceives(Protocol):
    """The part of a group that a pipe over its calls uses."""

    device: torch.device

    def send(self, tensor: torch.Tensor, dst: int, timeout: float | None = None) -> Work: ...
    def recv(self, tensor: torch.Tensor, src: int, timeout: float | None = None) -> Work: ...


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


class CallPipe:
    """A pipe over a group's sends and receives, which its event loop makes: for transports that share no memory."""

    is_recorded_by_group = True

    def __init__(self, group: SendsAndReceives, peer: int, loop: asyncio.AbstractEventLoop) -> None:
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
        except BaseException as error:  # `receive` raises it
            self._received.put(CommunicationError(f"{type(error).__name__}: {error}"))
            raise

    async def _receive_one(self) -> list[torch.Tensor | None]:
        group, header = self._group, torch.empty(MESSAGE_WORDS, dtype=torch.int64, device=self._group.device)
        await group.recv(header, self._peer, timeout=_UNLIMITED)
        message: list[torch.Tensor | None] = []
        for each in read_description(header.tolist())[0]:
            if each is None:
                message.append(None)
                continue
            dtype, shape, requires_grad = each
            made = torch.empty(shape, dtype=dtype, device=group.device)
            await group.recv(made, self._peer, timeout=_UNLIMITED)
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
                # The group keeps it until it ends; nobody awaits it, so it is watched.
                self._group.send(tensor, self._peer, timeout=_UNLIMITED).watch()
        except CommunicationError as error:  # the group is closed: `receive` raises it
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
        return True  # the group closes only after what was issued has arrived
