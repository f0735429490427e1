"""Hands one worker's state on to others, chunk by chunk: no more than one chunk of it is ever held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from runtime.gradient_server.outbox import Outbox
from runtime.gradient_server.wire.frame_reader import Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.link import Link
from runtime.gradient_server.wire.messages import Chunk, Codec, Kind, Reason, StateDone, Table, WireError, encode_parts


class StateRelay:
    """From one source to those sinks that are still there. What belongs to an older request is passed over.

    A chunk goes on when all of it has come and its checksum is right, so that sinks see whole frames only, also of a
    source that is lost in the midst of one.
    """

    def __init__(self, step: int, request: int, source: Link, sinks: Mapping[int, Outbox]) -> None:
        self.step, self.request = step, request
        self._source, self._sinks = source, dict(sinks)
        self._held: bytearray | None = None
        self._waiting: asyncio.Task[None] | None = None
        self.last_moved = time.monotonic()

    def take(self, item: Item, on_done: Callable[[int], None]) -> None:
        """An item of the source's state. Raises WireError."""
        self.last_moved = time.monotonic()
        match item:
            case VectorPiece():
                if self._held is not None:
                    self._held += item.data
            case VectorBegins(head=Chunk() as chunk):
                self._held = bytearray() if self._is_mine(chunk.step, chunk.attempt) else None
            case VectorEnds(message=Chunk() as chunk):
                self._pass_on(chunk)
            case Table():
                if self._is_mine(item.step, item.attempt):
                    self._send(encode_parts(item))
            case StateDone():
                if self._is_mine(item.step, item.request):
                    self._send(encode_parts(item))
                    on_done(self.request)

    def _is_mine(self, step: int, request: int) -> bool:
        if request > self.request or (request == self.request and step != self.step):
            raise WireError(Reason.UNEXPECTED, f"a state of step {step} that nobody asked for.")
        return request == self.request

    def _pass_on(self, chunk: Chunk) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        whole = Chunk(
            Kind.STATE,
            chunk.step,
            chunk.attempt,
            chunk.part,
            chunk.offset,
            Codec.NONE,
            chunk.count,
            chunk.checksum,
            memoryview(held),
        )
        self._send(encode_parts(whole))

    def _send(self, parts: list[bytes | memoryview]) -> None:
        for outbox in self._sinks.values():
            outbox.put_all((parts,))
        if self._sinks and self._waiting is None:
            self._source.pause()
            self._wait()

    def _wait(self) -> None:
        self._waiting = asyncio.create_task(self._until_there_is_room(), name="state relay")

    async def _until_there_is_room(self) -> None:
        """The source is read again when no sink has anything left to send on."""
        for outbox in list(self._sinks.values()):
            await outbox.emptied()
        self._go_on()

    def _go_on(self) -> None:
        self._waiting = None
        self.last_moved = time.monotonic()
        self._source.resume()

    def without(self, worker: int) -> None:
        """A sink is gone, and waited for no longer."""
        if self._sinks.pop(worker, None) is not None and self._waiting is not None:
            self._waiting.cancel()
            self._wait()

    @property
    def held_up_by(self) -> tuple[int, ...]:
        """Sinks that have not taken what there is."""
        return tuple(worker for worker, outbox in self._sinks.items() if not outbox.is_empty)

    @property
    def is_held_up(self) -> bool:
        """Whether the source waits for a sink, and not the other way round."""
        return self._waiting is not None

    def end(self) -> None:
        """Nothing of it is wanted any more."""
        self._sinks.clear()
        if self._waiting is not None:
            self._waiting.cancel()
            self._go_on()  # not in the task: one that is cancelled before it has begun never runs
