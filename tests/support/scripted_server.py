"""The server's end of a gradient worker's connection, which says what a test tells it to, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy

from runtime.gradient_server.wire.auth import SeenNonces, ServerHandshake
from runtime.gradient_server.wire.frames import Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.link import Link, serve
from runtime.gradient_server.wire.messages import (
    Beat,
    Codec,
    Dtype,
    GradientDone,
    Hello,
    Kind,
    Message,
    Part,
    Proof,
    Refused,
    StateDone,
    Table,
    Welcome,
    WireError,
    encode,
    make_chunk,
)

SECONDS = 10.0
CHUNK_BYTES = 64
Array = numpy.ndarray[Any, Any]
T = TypeVar("T")


class Gradient(NamedTuple):
    table: Table
    parts: list[Array]
    done: GradientDone


class ScriptedLink:
    """One joined worker."""

    def __init__(self, link: Link, server: ScriptedServer) -> None:
        self._link, self._server = link, server
        self._handshake = ServerHandshake(server.token, server.seen)
        self.hello: Hello | None = None
        self._items: asyncio.Queue[Message | bytes] = asyncio.Queue()
        self._chunk = bytearray()
        self.is_lost = asyncio.Event()
        link.on_item, link.on_lost = self._hear, lambda error: self.is_lost.set()

    def _hear(self, item: Item) -> None:
        match item:
            case Hello():
                if self._server.refusal is not None:
                    self.send(self._server.refusal)
                    self._link.close()
                    return
                self.send(self._handshake.challenge(item))
            case Proof():
                try:
                    self.hello, mac = self._handshake.check(item)
                except WireError as error:
                    self.send(Refused(error.reason, error.detail))
                    self._link.close()
                    return
                server = self._server
                times = server.beat_ms, server.timeout_ms
                welcome = Welcome(len(server.joined), 1, mac, *times, CHUNK_BYTES, server.codec)
                self.send(welcome, *server.with_welcome)
                self._link.joined(2)
                self._server.joined.append(self)
                self._server.joins.put_nowait(self)
            case VectorBegins():
                self._chunk.clear()
            case VectorPiece():
                self._chunk += item.data
            case VectorEnds():
                self._items.put_nowait(bytes(self._chunk))
            case _:
                self._items.put_nowait(item)

    def send(self, *messages: Message) -> None:
        self._link.write(b"".join(map(encode, messages)))

    def send_parts(
        self, kind: Kind, step: int, attempt: int, parts: list[Array], *, num_chunks: int | None = None
    ) -> None:
        """A table, and its chunks; or only so many of them."""
        dtypes = {each.numpy: each for each in Dtype}
        table = Table(kind, step, attempt, tuple(Part(dtypes[each.dtype], each.size) for each in parts))
        self.send(table)
        frames = []
        for index, part in enumerate(parts):
            size = CHUNK_BYTES // part.itemsize
            for offset in range(0, part.size, size):
                piece = part[offset : offset + size]
                frames.append(
                    make_chunk(
                        memoryview(piece).cast("B"),
                        count=piece.size,
                        kind=kind,
                        step=step,
                        attempt=attempt,
                        part=index,
                        offset=offset,
                    )
                )
        self.send(*frames[:num_chunks])

    async def expect(self, kind: type[T]) -> T:
        """The next message, which has to be of this kind; beats are passed over."""
        async with asyncio.timeout(SECONDS):
            while isinstance(item := await self._items.get(), Beat) and kind is not Beat:
                pass
        assert isinstance(item, kind), item
        return item

    async def gradient(self) -> Gradient:
        """A whole one."""
        table = await self.expect(Table)
        assert table.kind is Kind.GRADIENT
        return Gradient(table, await self._parts(table), await self.expect(GradientDone))

    async def state(self) -> tuple[Table, list[Array], StateDone]:
        table = await self.expect(Table)
        assert table.kind is Kind.STATE
        return table, await self._parts(table), await self.expect(StateDone)

    async def _parts(self, table: Table) -> list[Array]:
        found = []
        for part in table.parts:
            data = b""
            while len(data) < part.count * part.dtype.num_bytes:
                data += await self.expect(bytes)
            found.append(numpy.frombuffer(data, part.dtype.numpy))
        return found

    def cut(self) -> None:
        """As if the network had."""
        self._link.abort()


class ScriptedServer:
    """Takes every worker that proves the token."""

    def __init__(
        self,
        token: bytes = b"",
        *,
        codec: Codec = Codec.NONE,
        beat_ms: int = 60_000,
        timeout_ms: int = 60_000,
        port: int = 0,
    ) -> None:
        self.token, self.codec, self.beat_ms, self.timeout_ms = token, codec, beat_ms, timeout_ms
        self.seen = SeenNonces()
        self.refusal: Refused | None = None
        """What joins are answered with."""
        self.with_welcome: list[Message] = []
        """What is sent in one go with it."""
        self.joined: list[ScriptedLink] = []
        self.joins: asyncio.Queue[ScriptedLink] = asyncio.Queue()
        self._links: list[Link] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await serve(self._listener, self._take)
        return self

    def _take(self, link: Link) -> None:
        self._links.append(link)
        ScriptedLink(link, self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for link in self._links:
            link.abort()
        for link in self._links:
            await link.closed()

    async def next_join(self) -> ScriptedLink:
        async with asyncio.timeout(SECONDS):
            return await self.joins.get()
