"""One connection of a worker to the gradient server: the join, sending, and heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from runtime.gradient_server.client.protocol import ServerRefused, Share
from runtime.gradient_server.client.raw_parts import RawPart, Slice, rows, slices
from runtime.gradient_server.wire.auth import WorkerHandshake
from runtime.gradient_server.wire.frames import Item
from runtime.gradient_server.wire.link import Link, LinkLost, OnItem
from runtime.gradient_server.wire.messages import (
    VERSION,
    Beat,
    Challenge,
    Chunk,
    Codec,
    GradientDone,
    Kind,
    Leave,
    Message,
    Refused,
    StateDone,
    StateWanted,
    Table,
    Welcome,
    encode_parts,
    make_chunk,
)


class Outgoing:
    """A share's gradient, whose parts become ready in order. Kept until its average has arrived."""

    def __init__(self, parts: Sequence[RawPart]) -> None:
        self.parts = parts
        self.num_ready = 0
        self.report: tuple[float, int, int] | None = None
        """(loss, correct, total), once the gradient is complete."""
        self.changed = asyncio.Event()

    def advance(self, num_ready: int) -> None:
        """The first `num_ready` parts are final. Call it on the event loop."""
        self.num_ready = max(self.num_ready, num_ready)
        self.changed.set()

    def complete(self, loss: float, correct: int, total: int) -> None:
        """All parts are final."""
        self.report = loss, correct, total
        self.advance(len(self.parts))

    async def ready(self, index: int) -> RawPart:
        """Wait for a part to be ready."""
        while self.num_ready <= index:
            self.changed.clear()
            await self.changed.wait()
        return self.parts[index]


class Session:
    """One link, from the join to its close."""

    def __init__(self, link: Link, handshake: WorkerHandshake, on_item: OnItem) -> None:
        self._link, self._handshake, self._on_item = link, handshake, on_item
        loop = asyncio.get_running_loop()
        self._joined: asyncio.Future[Welcome] = loop.create_future()
        self._lost: asyncio.Future[Exception | None] = loop.create_future()
        self.welcome: Welcome | None = None
        link.on_item, link.on_lost = self._receive, self._on_lost

    async def join(self) -> Welcome:
        """Send Hello and wait for the Welcome. Raises LinkLost, WireError and ServerRefused."""
        self._write(self._handshake.hello)
        return await self._joined

    # Called by the link.

    def _receive(self, item: Item) -> memoryview | None:
        if self.welcome is not None:
            return self._on_item(item)
        match item:
            case Challenge():
                self._write(self._handshake.prove(item))
            case Welcome():
                self._handshake.check(item)
                self.welcome = item
                self._link.joined(VERSION)
                self._joined.set_result(item)
            case Refused():
                self.abort(ServerRefused(item.reason, item.detail))
            case _:
                self.abort(LinkLost("the server ends"))
        return None

    def _on_lost(self, error: Exception | None) -> None:
        """The link is gone."""
        if not self._joined.done():
            self._joined.set_exception(error or LinkLost("the server closed the connection during the join"))
        if not self._lost.done():
            self._lost.set_result(error)

    def abort(self, error: Exception) -> None:
        """Close the link at once, with this reason."""
        self._on_lost(error)
        self._link.abort()

    # Sending.

    def _write(self, message: Message) -> None:
        self._link.write(*encode_parts(message))

    async def send_gradient(self, outgoing: Outgoing, share: Share) -> None:
        """Send the parts as they become ready. Raises LinkLost."""
        self._write(Table(Kind.GRADIENT, share.step, share.attempt, rows(outgoing.parts)))
        for index in range(len(outgoing.parts)):
            part = await outgoing.ready(index)
            await self._send_part(part, Kind.GRADIENT, share.step, share.attempt, index)
        while outgoing.report is None:
            outgoing.changed.clear()
            await outgoing.changed.wait()
        self._write(GradientDone(share.step, share.attempt, *outgoing.report))

    async def send_state(self, parts: Sequence[RawPart], wanted: StateWanted) -> None:
        """Send a whole state; returns when its memory may change again. Raises LinkLost."""
        self._write(Table(Kind.STATE, wanted.step, wanted.request, rows(parts)))
        for index, part in enumerate(parts):
            await self._send_part(part, Kind.STATE, wanted.step, wanted.request, index)
        self._write(StateDone(wanted.step, wanted.request))
        await self.flushed()

    async def _send_part(self, part: RawPart, kind: Kind, step: int, attempt: int, index: int) -> None:
        assert self.welcome is not None
        for piece in slices(part, self.welcome.chunk_bytes):
            self._write(await self._chunk(piece, kind, step, attempt, index))
            await self._link.drain()

    async def _chunk(self, piece: Slice, kind: Kind, step: int, attempt: int, part: int) -> Chunk:
        assert self.welcome is not None

        def make() -> Chunk:
            return make_chunk(
                piece.data,
                count=piece.count,
                kind=kind,
                step=step,
                attempt=attempt,
                part=part,
                offset=piece.offset,
                codec=codec,
            )

        codec = self.welcome.codec
        if codec is Codec.NONE:
            return make()
        return await asyncio.to_thread(make)  # packing takes tens of milliseconds and releases the GIL

    async def flushed(self) -> None:
        """Wait until no unsent bytes refer to the caller's memory."""
        while self._link.is_open and self._link.bytes_waiting:  # noqa: ASYNC110 - the transport has no event for it
            await asyncio.sleep(0.001)

    async def closed(self) -> None:
        """Wait until the connection is closed, which takes seconds at most."""
        await self._link.closed()

    def leave(self, reason: str) -> None:
        """Send Leave, then close."""
        if self._link.is_open:
            if self.welcome is not None:
                self._write(Leave(reason))
            self._link.close()

    # Liveness.

    async def keep_alive(self) -> Exception | None:
        """Send heartbeats until the link is lost; returns the reason."""
        assert self.welcome is not None
        every, most = self.welcome.heartbeat_ms / 1e3, self.welcome.timeout_ms / 1e3
        while not self._lost.done():
            num_sent, slept = self._link.bytes_out, time.monotonic()
            await asyncio.wait([self._lost], timeout=every)
            now = time.monotonic()
            if self._lost.done():
                break
            if self._link.bytes_out == num_sent:
                self._write(Beat(int(time.time() * 1e3)))
            was_stalled = now - slept > 2 * every  # the caller blocked the loop: what arrived is not read yet
            if now - self._link.last_heard > most and not was_stalled:
                self.abort(LinkLost(f"the server was not heard for {most:g} s"))
        return self._lost.result()
