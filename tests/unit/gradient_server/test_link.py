"""A link over real sockets, with TLS and without: who is slow is held back, and who is lost is told of."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy
import pytest
import trustme
import uvloop

from monitoring.http.endpoint import tls_context
from runtime.errors import InvalidCall, Parallel3DError
from runtime.gradient_server.wire import link as link_module
from runtime.gradient_server.wire.frames import Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.link import BUDGET_BYTES, Link, LinkLost, ReceiveBuffer, connect, serve, split_address
from runtime.gradient_server.wire.messages import (
    MAX_CHUNK,
    Beat,
    Challenge,
    GradientPayload,
    Hello,
    JoinRequest,
    Kind,
    Leave,
    Reason,
    Refused,
    Shutdown,
    WireError,
    encode,
    encode_parts,
    make_chunk,
)

HELLO = Hello(2, "n1", bytes(16), 0, False)
Run = Callable[[Coroutine[Any, Any, None]], None]
Tls = tuple[ssl.SSLContext | None, ssl.SSLContext | None]


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    def run(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(main, 30))

    return run


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: trustme.CA, tmp_path: Path) -> Tls:
    """The server's, and a worker's that trusts it."""
    if not request.param:
        return None, None
    issued = authority.issue_cert("127.0.0.1")
    (tmp_path / "key.pem").write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "cert.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return tls_context(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")), trusting


class End:
    """What a link told, and waiting for it."""

    def __init__(self, link: Link | None = None) -> None:
        self.items: list[Item] = []
        self.data = bytearray()
        self.pieces: list[tuple[int, int]] = []
        """Where each began in its vector, and in memory."""
        self.homes: list[memoryview] = []
        """Where vectors are to be received; others come in pieces."""
        self.lost: list[Exception | None] = []
        self.link: Link
        self.told = asyncio.Event()
        if link is not None:
            self.take(link)

    def take(self, link: Link) -> None:
        self.link, link.on_item, link.on_lost = link, self.on_item, self.on_lost

    def on_item(self, item: Item) -> memoryview | None:
        if isinstance(item, VectorBegins) and self.homes:
            return self.homes.pop(0)
        if isinstance(item, VectorPiece):
            self.data += item.data
            self.pieces.append((item.offset_bytes, numpy.frombuffer(item.data, numpy.uint8).ctypes.data))
        else:
            self.items.append(item)
        if isinstance(item, Hello | Challenge):
            self.link.joined(2)
        if isinstance(item, JoinRequest):
            self.link.joined(1)
        self.told.set()
        return None

    def on_lost(self, error: Exception | None) -> None:
        self.lost.append(error)
        self.told.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.told.clear()
            await self.told.wait()

    async def until_has(self, num_bytes: int) -> None:
        await self.until(lambda: len(self.data) == num_bytes or bool(self.lost))

    async def until_lost(self) -> Exception | None:
        await self.until(lambda: bool(self.lost))
        return self.lost[0]


class Served:
    """A server's ends, in the order in which they came."""

    def __init__(self, port: int) -> None:
        self.address, self.port = f"127.0.0.1:{port}", port
        self.ends: list[End] = []
        self.workers: list[Link] = []
        self.came = asyncio.Event()

    def on_link(self, link: Link) -> None:
        self.ends.append(End(link))
        self.came.set()

    async def end(self, number: int = 0) -> End:
        while len(self.ends) <= number:
            self.came.clear()
            await self.came.wait()
        return self.ends[number]


@contextlib.asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0))
    found = Served(listener.getsockname()[1])
    server = await serve(listener, found.on_link, **options)
    try:
        yield found
    finally:
        server.close()
        for link in (*(end.link for end in found.ends), *found.workers):
            link.abort()
            await link.closed()


async def joined(found: Served, tls: ssl.SSLContext | None = None, number: int = 0, **options: Any) -> tuple[End, End]:
    """A worker's end and the server's, that speak version 2."""
    worker = End()
    found.workers.append(await connect(found.address, timeout=10, tls=tls, on_link=worker.take, **options))
    worker.link.write(encode(HELLO))
    server = await found.end(number)
    await server.until(lambda: server.items == [HELLO])
    server.link.write(encode(Challenge(bytes(32))))
    await worker.until(lambda: worker.items == [Challenge(bytes(32))])
    server.items.clear()
    worker.items.clear()
    return worker, server


def chunk_parts(data: Any, part: int = 0) -> list[bytes | memoryview]:
    count = memoryview(data).nbytes // 4
    return encode_parts(
        make_chunk(memoryview(data), count=count, kind=Kind.STATE, step=1, attempt=0, part=part, offset=0)
    )


def test_messages_go_both_ways_and_are_counted(run: Run, tls: Tls) -> None:
    async def main() -> None:
        async with served(tls=tls[0]) as found:
            began = time.monotonic()
            worker, server = await joined(found, tls[1])
            values = numpy.arange(MAX_CHUNK // 4, dtype="<f4")
            for part in range(5):
                worker.link.write(*chunk_parts(values, part))
                await worker.link.drain()
            server.link.write(encode(Beat(1)), encode(Beat(2)))
            await worker.until(lambda: len(worker.items) == 2)
            await server.until(lambda: sum(isinstance(item, VectorEnds) for item in server.items) == 5)
            assert worker.items == [Beat(1), Beat(2)]
            assert bytes(server.data) == values.tobytes() * 5
            assert server.link.bytes_in == len(encode(HELLO)) + 5 * (43 + MAX_CHUNK) == worker.link.bytes_out
            assert worker.link.bytes_in == server.link.bytes_out == len(encode(Challenge(bytes(32)))) + 26
            assert worker.link.bytes_waiting == server.link.bytes_waiting == 0
            assert worker.link.peer == found.address
            assert server.link.peer.startswith("127.0.0.1:")
            assert began <= server.link.last_heard <= time.monotonic()
            assert worker.link.is_open
            assert not server.link.is_mid_frame

            worker.link.close()
            assert not worker.link.is_open
            error = await server.until_lost()
            assert isinstance(error, LinkLost)
            assert str(error) == f"{server.link.peer}: it hung up."
            assert not error.is_mid_frame
            await worker.link.closed()
            assert worker.lost == [None], "we closed it"
            assert worker.link.bytes_out == server.link.bytes_in

    run(main())


def test_a_slow_reader_holds_its_writer_back(run: Run, tls: Tls) -> None:
    async def main() -> None:
        async with served(tls=tls[0]) as found:
            worker, server = await joined(found, tls[1])
            worker.link.pause()
            worker.link.pause()
            values = numpy.zeros(MAX_CHUNK // 4, "<f4")
            most_waiting = num_written = 0

            async def write() -> None:
                nonlocal most_waiting, num_written
                for part in range(64):
                    server.link.write(*chunk_parts(values, part))
                    num_written += 1
                    most_waiting = max(most_waiting, server.link.bytes_waiting)
                    await server.link.drain()
                    assert server.link.bytes_waiting < BUDGET_BYTES

            writing = asyncio.create_task(write())
            await until_still(lambda: num_written)
            assert not writing.done(), "what sockets hold is less than 64 MiB"
            assert most_waiting < BUDGET_BYTES + 2 * MAX_CHUNK
            worker.link.resume()
            await writing
            await worker.until(lambda: sum(isinstance(item, VectorEnds) for item in worker.items) == 64)
            assert len(worker.data) == 64 << 20

    run(main())


async def until_still(number: Callable[[], int]) -> None:
    """Until it is not 0 and has not changed for a while: that nothing happens takes time to see."""
    before, num_same = 0, 0
    while num_same < 10:
        await asyncio.sleep(0.01)
        before, num_same = number(), num_same + 1 if 0 != number() == before else 0


def test_drain_says_when_the_slow_reader_is_gone(run: Run, tls: Tls) -> None:
    async def main() -> None:
        async with served(tls=tls[0]) as found:
            worker, server = await joined(found, tls[1])
            worker.link.pause()
            values = numpy.zeros(MAX_CHUNK // 4, "<f4")

            async def write() -> None:
                while True:
                    server.link.write(*chunk_parts(values))
                    await server.link.drain()

            writing = asyncio.create_task(write())
            await until_still(lambda: server.link.bytes_waiting)
            worker.link.abort()
            with pytest.raises(LinkLost, match="the connection is gone"):
                await writing
            error = await server.until_lost()
            assert isinstance(error, LinkLost | None)
            assert not server.link.is_open
            sent = server.link.bytes_out
            server.link.write(bytes(1000))
            assert server.link.bytes_out == sent, "dropped"
            with pytest.raises(LinkLost):
                await server.link.drain()

    run(main())


def test_links_share_one_buffer(run: Run, tls: Tls) -> None:
    async def main() -> None:
        shared = ReceiveBuffer(10_001)
        async with served(tls=tls[0], buffer=shared) as found:
            pairs = [await joined(found, tls[1], number) for number in range(4)]
            sent = [numpy.random.default_rng(seed).random(250_000, numpy.float32) for seed in range(4)]
            for at in range(0, 250_000, 1000):
                for (worker, _), values in zip(pairs, sent, strict=True):
                    parts = chunk_parts(numpy.ascontiguousarray(values[at : at + 1000]))
                    worker.link.write(parts[0][:30], parts[0][30:], parts[1][:2001])
                await asyncio.sleep(0)  # the vectors of all four are now in the midst of an element
                for (worker, _), values in zip(pairs, sent, strict=True):
                    worker.link.write(chunk_parts(numpy.ascontiguousarray(values[at : at + 1000]))[1][2001:])
            for (_, server), values in zip(pairs, sent, strict=True):
                await server.until_has(1_000_000)
                assert bytes(server.data) == values.tobytes()
                assert server.link.get_buffer(-1).obj is shared.view.obj

    run(main())


def test_elements_are_aligned_however_they_come(run: Run, tls: Tls) -> None:
    async def main() -> None:
        async with served(tls=tls[0], buffer=ReceiveBuffer(10_000)) as found:
            worker, server = await joined(found, tls[1])
            values = numpy.random.default_rng(0).random(100_000, numpy.float32)
            head, body = chunk_parts(values)
            worker.link.write(head)
            for begin in range(0, len(body), 4999):
                worker.link.write(body[begin : begin + 4999])
                await asyncio.sleep(0)
            await server.until_has(values.nbytes)
            assert bytes(server.data) == values.tobytes()
            inside = [address for offset, address in server.pieces if offset]
            assert len(inside) > 30
            assert all(address % 4 == 0 for address in inside)

    run(main())


def test_vectors_are_received_where_they_belong(run: Run, tls: Tls) -> None:
    async def main() -> None:
        async with served(tls=tls[0]) as found:
            worker, server = await joined(found, tls[1])
            sent = [numpy.random.default_rng(seed).random(200_000, numpy.float32) for seed in range(3)]
            homes = [numpy.zeros(200_000, numpy.float32) for _ in range(2)]
            worker.homes = [memoryview(each).cast("B") for each in homes]
            for values in sent:
                server.link.write(*chunk_parts(values))
            await worker.until_has(sent[2].nbytes)  # for which there is no home
            for home, values in zip(homes, sent, strict=False):
                assert home.tobytes() == values.tobytes()
            assert bytes(worker.data) == sent[2].tobytes()

    run(main())


def test_nothing_is_received_in_place_once_a_link_is_closed(run: Run, tls: Tls) -> None:
    async def main() -> None:
        async with served(tls=tls[0]) as found:
            worker, server = await joined(found, tls[1])
            home, values = numpy.zeros(200_000, numpy.float32), numpy.ones(200_000, numpy.float32)
            worker.homes = [memoryview(home).cast("B")]
            head, body = chunk_parts(values)
            server.link.write(head, body[:100_000])
            while not home[20_000]:  # noqa: ASYNC110 - memory tells nobody
                await asyncio.sleep(0.001)
            worker.link.close()
            before = home.copy()
            server.link.write(body[100_000:])
            await worker.link.closed()
            assert home.tobytes() == before.tobytes()

    run(main())


def test_a_worker_lost_in_the_midst_of_a_frame(run: Run, tls: Tls) -> None:
    async def main() -> None:
        async with served(tls=tls[0]) as found:
            worker, server = await joined(found, tls[1])
            head, payload = chunk_parts(numpy.zeros(1000, "<f4"))
            worker.link.write(head, payload[:1001])
            await server.until(lambda: len(server.data) == 1000)
            assert server.link.is_mid_frame
            worker.link.abort()
            error = await server.until_lost()
            assert isinstance(error, LinkLost)
            assert error.is_mid_frame
            assert "within a message" in str(error)
            await worker.link.closed()
            assert worker.lost == [None]
            assert len(server.lost) == 1

    run(main())


def test_what_is_refused_is_answered_before_the_end(run: Run, tls: Tls) -> None:
    """Even where the peer has sent far more than was read: hanging up on that would lose the answer."""

    async def main() -> None:
        async with served(tls=tls[0]) as found:
            worker, server = await joined(found, tls[1])

            def refuse(error: Exception | None) -> None:
                assert isinstance(error, WireError)
                server.link.write(encode(Refused(error.reason, error.detail)))
                server.on_lost(error)

            server.link.on_lost = refuse
            worker.link.write(encode(Beat(1)), encode(HELLO), encode(Beat(2)), bytes(20 << 20))
            error = await server.until_lost()
            assert isinstance(error, WireError)
            assert error.reason is Reason.ALREADY_JOINED
            await worker.until(lambda: bool(worker.lost))
            assert worker.items == [Refused("already_joined", error.detail)]
            assert server.items == [Beat(1)]
            await server.link.closed()
            assert len(server.lost) == 1

    run(main())


def test_other_protocols_are_told_apart(run: Run) -> None:
    async def main() -> None:
        async with served() as found:
            for number, data in enumerate((b"GET / HTTP/1.1\r\n\r\n", bytes.fromhex("1603010200010001fc0303"))):
                reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
                writer.write(data)
                server = await found.end(number)
                error = await server.until_lost()
                assert isinstance(error, WireError)
                assert error.reason is Reason.NOT_A_FRAME
                assert await reader.read() == b""
                writer.close()
                await writer.wait_closed()

    run(main())


def test_a_bug_of_ours_ends_the_link(run: Run) -> None:
    async def main() -> None:
        async with served() as found:
            worker, server = await joined(found)

            def fail(item: Item) -> None:
                raise ZeroDivisionError("a bug")

            server.link.on_item = fail
            worker.link.write(encode(Beat(1)), encode(Beat(2)))
            assert isinstance(await server.until_lost(), ZeroDivisionError)
            assert isinstance(await worker.until_lost(), LinkLost)
            await server.link.closed()
            assert len(server.lost) == 1

    run(main())


def test_a_refusal_of_ones_own(run: Run) -> None:
    async def main() -> None:
        async with served() as found:
            worker, server = await joined(found)

            def refuse(item: Item) -> None:
                raise WireError(Reason.WRONG_WORKER, "3 is 4.")

            def answer(error: Exception | None) -> None:
                server.link.write(encode(Leave(str(error))))
                server.on_lost(error)

            server.link.on_item, server.link.on_lost = refuse, answer
            worker.link.write(encode(Beat(1)))
            await worker.until_lost()
            assert worker.items == [Leave("wrong_worker: another worker's id: 3 is 4.")]

    run(main())


def test_nothing_comes_after_we_closed(run: Run) -> None:
    async def main() -> None:
        async with served() as found:
            worker, server = await joined(found)

            def close(item: Item) -> None:
                server.on_item(item)
                server.link.close()

            server.link.on_item = close
            worker.link.write(encode(Beat(1)), encode(Beat(2)))
            await worker.until_lost()
            await server.link.closed()
            assert server.items == [Beat(1)]
            assert server.lost == [None]
            server.link.close()
            server.link.abort()
            server.link.pause()
            server.link.resume()

    run(main())


def test_the_last_words_arrive(run: Run, tls: Tls) -> None:
    async def main() -> None:
        async with served(tls=tls[0]) as found:
            worker, server = await joined(found, tls[1])
            values = numpy.ones(MAX_CHUNK // 4, "<f4")
            for part in range(8):
                server.link.write(*chunk_parts(values, part))
            server.link.write(encode(Leave("that was all")))
            server.link.close()
            await worker.until_lost()
            assert worker.items[-1] == Leave("that was all")
            assert len(worker.data) == 8 << 20

    run(main())


@pytest.mark.parametrize("hang_up", ["close", "a half-closed connection"])
def test_who_does_not_read_the_last_words_is_cut_off(run: Run, hang_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CLOSE_SECONDS", 0.1)

    async def main() -> None:
        async with served() as found:
            with socket.create_connection(("127.0.0.1", found.port)) as client:
                server = await found.end()
                server.link.write(bytes(64 << 20))
                if hang_up == "close":
                    server.link.close()
                else:
                    client.shutdown(socket.SHUT_WR)
                await server.link.closed()
                assert server.link.bytes_waiting == 0
                with pytest.raises(LinkLost):
                    await server.link.drain()

    run(main())


def test_version_1_in_one_stream(run: Run) -> None:
    """A frame larger than the buffer, from a plain socket."""

    async def main() -> None:
        async with served(versions=(1,), buffer=ReceiveBuffer(1 << 16)) as found:
            _, writer = await asyncio.open_connection("127.0.0.1", found.port)
            payload = GradientPayload(1, 0, numpy.arange(1_000_003, dtype="<f4"), 0.5, 1, 2)
            writer.write(encode(JoinRequest("old", 1, "cpu")) + encode(payload) + encode(Shutdown()))
            server = await found.end()
            await server.until(lambda: Shutdown() in server.items)
            join, begins, ends, _ = server.items
            assert join == JoinRequest("old", 1, "cpu")
            assert isinstance(begins, VectorBegins)
            assert isinstance(ends, VectorEnds)
            assert isinstance(ends.message, GradientPayload)
            assert (begins.count, ends.message.loss) == (1_000_003, 0.5)
            assert bytes(server.data) == payload.vector.tobytes()
            writer.close()
            await writer.wait_closed()

    run(main())


def test_nobody_is_there(run: Run) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(LinkLost, match=rf"^{address} did not answer within 0\.1 s\.$"):
                await connect(address, timeout=0.1, tls=ssl.create_default_context())
        with pytest.raises(LinkLost, match=f"^{address} cannot be reached: "):
            await connect(address, timeout=10)

    run(main())


def test_a_server_that_is_not_trusted(run: Run, authority: trustme.CA) -> None:
    async def main() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        async with served(tls=context) as found:
            with pytest.raises(LinkLost, match="certificate verify failed"):
                await connect(found.address, timeout=10, tls=ssl.create_default_context())
            trusting = ssl.create_default_context()
            authority.configure_trust(trusting)
            await joined(found, trusting)
            assert len(found.ends) == 1, "one without a handshake is never told of"

    run(main())


def test_who_speaks_plainly_to_tls_is_turned_away(run: Run, authority: trustme.CA) -> None:
    async def main() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        async with served(tls=context) as found:
            worker = End(await connect(found.address, timeout=10))
            found.workers.append(worker.link)
            worker.link.write(encode(HELLO))
            assert isinstance(await worker.until_lost(), WireError | LinkLost)
            assert found.ends == []

    run(main())


def test_addresses() -> None:
    assert split_address("host:9001") == ("host", 9001)
    assert split_address("10.0.0.1") == ("10.0.0.1", 9000)
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address("[::1]") == ("::1", 9000)
    for wrong in ("", ":80", "host:", "host:0", "host:65536", "host:x", "::1", "a b:80", "[::1", "http://host:80"):
        with pytest.raises(InvalidCall, match=r"is no address: write HOST:PORT"):
            split_address(wrong)


def test_the_error() -> None:
    error = LinkLost("why", is_mid_frame=True)
    assert isinstance(error, Parallel3DError)
    assert isinstance(error, ConnectionError)
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), arrived.is_mid_frame) == (LinkLost, "why", True)
