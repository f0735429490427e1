"""Small raw workers of the gradient server for tests: version 1 by plain bytes, version 2 on a link. They know no more
of the server than the protocol."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from typing import Any

import numpy

from runtime.gradient_server.wire.auth import WorkerHandshake
from runtime.gradient_server.wire.chunks import make_chunk
from runtime.gradient_server.wire.frames import VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.link import Link, connect
from runtime.gradient_server.wire.messages import (
    AverageDone,
    Beat,
    Challenge,
    Codec,
    Dtype,
    GradientDone,
    Kind,
    Leave,
    Part,
    Refused,
    StateDone,
    Table,
    Welcome,
    encode,
    encode_parts,
)

SECONDS = 10.0
"""The most that anything takes here."""

_open: list[ClientV1 | ClientV2] = []


def hang_up() -> None:
    """All clients."""
    while _open:
        _open.pop().abort()


# Version 1, written from the protocol's table: no code of ours.


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def vector(values) -> bytes:
    array = numpy.asarray(values, "<f4")
    return struct.pack("<Q", array.size) + array.tobytes()


def frame(tag: int, *fields: bytes) -> bytes:
    body = bytes([tag]) + b"".join(fields)
    return struct.pack(">I", len(body)) + body


def gradient_v1(step, worker, values, loss=0.0, correct=0, total=0) -> bytes:
    return frame(4, struct.pack("<QI", step, worker), vector(values), struct.pack("<fQQ", loss, correct, total))


def block_v1(step, worker, number, num_blocks, values, sizes=None) -> bytes:
    sizes = [len(values)] if sizes is None else sizes
    head = struct.pack("<QIII", step, worker, number, num_blocks), struct.pack(f"<I{len(sizes)}I", len(sizes), *sizes)
    return frame(8, *head, vector(values))


def component_v1(step, worker, number, values) -> bytes:
    return frame(0x0A, struct.pack("<QIB", step, worker, number), vector(values))


class ClientV1:
    """Takes answers as bare tuples: ("assignment", step, start, end) and so on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.worker = self.total_workers = -1
        _open.append(self)

    @classmethod
    async def connect(cls, address: str) -> ClientV1:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    @classmethod
    async def join(cls, address: str, name: str = "old") -> ClientV1:
        client = await cls.connect(address)
        client.send(frame(1, text(name), struct.pack("<I", 1), text("cpu")))
        kind, client.worker, client.total_workers = await client.read()
        assert kind == "accepted"
        return client

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self, *, beats: bool = False) -> tuple[Any, ...]:
        """The next message; heartbeats only where they are asked for."""
        while True:
            async with asyncio.timeout(SECONDS):
                (length,) = struct.unpack(">I", await self.reader.readexactly(4))
                body = await self.reader.readexactly(length)
            if body[0] == 7:
                self.writer.write_eof()  # it has understood
            if body[0] != 6 or beats:
                return _read_v1(body)

    async def is_over(self) -> bool:
        """Whether the server hangs up without another word."""
        async with asyncio.timeout(SECONDS):
            try:
                said = await self.reader.read(1)
            except ConnectionError:
                said = b""
        self.writer.close()
        return not said

    def leave(self) -> None:
        self.send(frame(7))
        self.writer.write_eof()

    async def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()


def _read_v1(body: bytes) -> tuple[Any, ...]:
    tag, body = body[0], body[1:]
    if tag == 2:
        return "accepted", *struct.unpack("<II", body)
    if tag == 3:
        return "assignment", *struct.unpack("<QQQ", body)
    if tag == 5:
        values = numpy.frombuffer(body[16:-4], "<f4")
        assert len(values) == struct.unpack("<Q", body[8:16])[0]
        return "average", struct.unpack("<Q", body[:8])[0], values.tolist(), struct.unpack("<f", body[-4:])[0]
    if tag == 6:
        return "beat", struct.unpack("<Q", body[-8:])[0]
    if tag == 7:
        return ("shutdown",)
    if tag == 9:
        step, number, num_sizes = struct.unpack("<QII", body[:16])
        sizes, rest = struct.unpack(f"<{num_sizes}I", body[16 : 16 + 4 * num_sizes]), body[16 + 4 * num_sizes :]
        return "block", step, number, list(sizes), numpy.frombuffer(rest[8:], "<f4").tolist()
    assert tag == 0x0B
    return "component", *struct.unpack("<QB", body[:9]), numpy.frombuffer(body[17:], "<f4").tolist()


# Version 2.


@dataclass(frozen=True)
class Tensors:
    """A table and all of its chunks."""

    table: Table
    arrays: list[numpy.ndarray]
    end: AverageDone | StateDone


class ClientV2:
    """Keeps what comes in a queue: messages, and chunks as (chunk, bytes)."""

    def __init__(self, node_id: str, token: bytes, step: int, has_state: bool) -> None:
        self.handshake = WorkerHandshake(token, node_id, step=step, has_state=has_state)
        self.link: Link
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.welcome: Welcome | None = None
        self.num_beats = 0
        self._piece = bytearray()
        self._rest = b""

    @classmethod
    async def join(
        cls, address: str, node_id: str = "new", *, token: bytes = b"", step: int = 0, has_state: bool = False, tls=None
    ) -> ClientV2:
        client = cls(node_id, token, step, has_state)
        await client.connect(address, tls=tls)
        client.send(client.handshake.hello)
        answer = await client.read()
        if isinstance(answer, Challenge):
            client.send(client.handshake.prove(answer))
            answer = await client.read()
        if isinstance(answer, Welcome):
            client.handshake.check(answer)
            client.welcome = answer
        else:
            assert isinstance(answer, Refused)
            client.incoming.put_nowait(answer)
        return client

    async def connect(self, address: str, tls=None) -> None:
        def set_up(link: Link) -> None:
            link.on_item, link.on_lost = self._take, self.incoming.put_nowait

        self.link = await connect(address, timeout=SECONDS, tls=tls, on_link=set_up)
        _open.append(self)

    def abort(self) -> None:
        self.link.abort()

    @property
    def worker(self) -> int:
        assert self.welcome is not None
        return self.welcome.worker_id

    def _take(self, item: Any) -> None:
        if isinstance(item, Welcome):
            self.link.joined(2)
        if isinstance(item, Beat):
            self.num_beats += 1
        elif isinstance(item, VectorBegins):
            self._piece = bytearray()
        elif isinstance(item, VectorPiece):
            self._piece += item.data
        elif isinstance(item, VectorEnds):
            self.incoming.put_nowait((item.message, bytes(self._piece)))
        else:
            self.incoming.put_nowait(item)
            if isinstance(item, Leave | Refused):
                self.link.close()

    def send(self, message: Any) -> None:
        self.link.write(*encode_parts(message))

    async def read(self) -> Any:
        async with asyncio.timeout(SECONDS):
            return await self.incoming.get()

    async def expect(self, kind: type[Any]) -> Any:
        """The next message, which must be of this kind."""
        message = await self.read()
        assert isinstance(message, kind), message
        return message

    async def skip_to(self, kind: type[Any]) -> Any:
        """The next message of this kind."""
        while not isinstance(message := await self.read(), kind):
            assert not isinstance(message, Exception), message
        return message

    async def tensors(self) -> Tensors:
        """An average or a state, to its end."""
        return await self.rest_of(await self.expect(Table))

    async def rest_of(self, table: Table) -> Tensors:
        arrays = [numpy.zeros(part.count, part.dtype.numpy) for part in table.parts]
        while isinstance(message := await self.read(), tuple):
            chunk, data = message
            assert (chunk.kind, chunk.step, chunk.attempt) == (table.kind, table.step, table.attempt)
            values = numpy.frombuffer(data, arrays[chunk.part].dtype)
            arrays[chunk.part][chunk.offset : chunk.offset + len(values)] = values
        assert isinstance(message, AverageDone | StateDone), message
        return Tensors(table, arrays, message)

    def send_table(self, step, attempt, arrays, kind=Kind.GRADIENT, dtype=Dtype.FLOAT32) -> None:
        self.send(Table(kind, step, attempt, tuple(Part(dtype, len(array)) for array in arrays)))

    def send_chunk(self, step, attempt, part, offset, values, kind=Kind.GRADIENT, codec=Codec.NONE) -> None:
        data = memoryview(numpy.ascontiguousarray(values)).cast("B")
        where = {"kind": kind, "step": step, "attempt": attempt, "part": part, "offset": offset}
        self.send(make_chunk(data, count=len(values), codec=codec, **where))

    def half_a_chunk(self, step, attempt, part, offset, values) -> None:
        data = memoryview(numpy.ascontiguousarray(values)).cast("B")
        chunk = make_chunk(
            data, count=len(values), kind=Kind.GRADIENT, step=step, attempt=attempt, part=part, offset=offset
        )
        whole = encode(chunk)
        middle = len(whole) - len(data) // 2
        self._rest = whole[middle:]
        self.link.write(whole[:middle])

    def rest_of_chunk(self) -> None:
        self.link.write(self._rest)

    def send_tensors(self, step, attempt, arrays, kind=Kind.GRADIENT, dtype=Dtype.FLOAT32, chunk=1 << 17) -> None:
        self.send_table(step, attempt, arrays, kind, dtype)
        for number, array in enumerate(arrays):
            for offset in range(0, len(array), chunk):
                self.send_chunk(step, attempt, number, offset, array[offset : offset + chunk], kind)

    def send_gradient(self, assignment, arrays, loss=0.0, correct=0, dtype=Dtype.FLOAT32) -> None:
        """For an `Assignment`."""
        self.send_tensors(assignment.step, assignment.attempt, arrays, dtype=dtype)
        total = assignment.end - assignment.start
        self.send(GradientDone(assignment.step, assignment.attempt, loss, correct, total))

    def send_state(self, wanted, arrays, dtype=Dtype.FLOAT32) -> None:
        """For a `StateWanted`."""
        self.send_tensors(wanted.step, wanted.request, arrays, Kind.STATE, dtype)
        self.send(StateDone(wanted.step, wanted.request))

    async def gone(self) -> None:
        """Until the connection is."""
        async with asyncio.timeout(SECONDS):
            await self.link.closed()


def floats(*values: float) -> numpy.ndarray:
    return numpy.array(values, numpy.float32)
