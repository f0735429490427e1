"""Forwards one worker's state to others, chunk by chunk: at most one chunk is held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from runtime.gradient_server.senders import Outbox
from runtime.gradient_server.wire.frames import Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.link import Link
from runtime.gradient_server.wire.messages import Chunk, Codec, Kind, Reason, StateDone, Table, WireError, encode_parts


class StateRelay:
    """From one source to the sinks that are still connected. Items of an older request are ignored.

    A chunk is forwarded once it is complete and its checksum is right, so sinks receive whole frames even if the
    source is lost within one.
    """

    def __init__(self, step: int, request: int, source: Link, sinks: Mapping[int, Outbox]) -> None:
        self.step, self.request = step, request
        self._source, self._sinks = source, dict(sinks)
        self._held: bytearray | None = None
        self._waiting: asyncio.Task[None] | None = None
        self.progress_at = time.monotonic()

    def take(self, item: Item, on_done: Callable[[int], None]) -> None:
        """Handle an item of the source's state. Raises WireError."""
        self.progress_at = time.monotonic()
        match item:
            case VectorPiece():
                if self._held is not None:
                    self._held += item.data
            case VectorBegins(head=Chunk() as chunk):
                self._held = bytearray() if self._is_current(chunk.step, chunk.attempt) else None
            case VectorEnds(message=Chunk() as chunk):
                self._forward(chunk)
            case Table():
                if self._is_current(item.step, item.attempt):
                    self._send(encode_parts(item))
            case StateDone():
                if self._is_current(item.step, item.request):
                    self._send(encode_parts(item))
                    on_done(self.request)

    def _is_current(self, step: int, request: int) -> bool:
        if request > self.request or (request == self.request and step != self.step):
            raise WireError(Reason.UNEXPECTED, f"a state of step {step} that was not requested.")
        return request == self.request

    def _forward(self, chunk: Chunk) -> None:
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
            self._start_waiting()

    def _start_waiting(self) -> None:
        self._waiting = asyncio.create_task(self._until_sinks_are_empty(), name="state relay")

    async def _until_sinks_are_empty(self) -> None:
        """The source is read again when every sink's outbox is empty."""
        for outbox in list(self._sinks.values()):
            await outbox.emptied()
        self._resume()

    def _resume(self) -> None:
        self._waiting = None
        self.progress_at = time.monotonic()
        self._source.resume()

    def without(self, worker: int) -> None:
        """Stop forwarding to a sink, and waiting for it."""
        if self._sinks.pop(worker, None) is not None and self._waiting is not None:
            self._waiting.cancel()
            self._start_waiting()

    @property
    def held_up_by(self) -> tuple[int, ...]:
        """Sinks that have not received everything forwarded so far."""
        return tuple(worker for worker, outbox in self._sinks.items() if not outbox.is_empty)

    @property
    def is_held_up(self) -> bool:
        """Whether the source waits for a sink."""
        return self._waiting is not None

    def end(self) -> None:
        """Stop forwarding."""
        self._sinks.clear()
        if self._waiting is not None:
            self._waiting.cancel()
            self._resume()  # not in the task: one that is cancelled before it has begun never runs
