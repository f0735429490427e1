"""Whatever is sent to a gradient server, it neither falls nor grows, counts why it refuses, and its run goes on."""

from __future__ import annotations

import itertools
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import numpy
import pytest

from parallel3d import CommunicationError
from runtime.gradient_server.wire.chunks import checksum
from runtime.gradient_server.wire.messages import (
    MAX_CHUNK,
    Assignment,
    Chunk,
    Codec,
    Dtype,
    GradientDone,
    Hello,
    JoinRequest,
    Kind,
    Message,
    Part,
    Proof,
    Reason,
    Refused,
    Shutdown,
    StateDone,
    Table,
    Welcome,
    encode,
)
from tests.support.bad_frames import HTTP, client_hello, frames, why_refused
from tests.support.gradient_problem import Size
from tests.support.gradient_run import PLAIN, TOKEN, Applied, Process, Run, Stepped
from tests.support.processes import SECONDS
from tests.support.raw_client import RawClient

pytestmark = pytest.mark.slow

MIB = 1 << 20
GROWTH = 64 * MIB
SIZE = Size(400, 200)
PARTS = (Part(Dtype.FLOAT64, 400), Part(Dtype.FLOAT32, 200))
NOBODY = b"a token that nobody else knows"
AT_ONCE = 32  # connections


@contextmanager
def run_beside(**settings: object) -> Iterator[Run]:
    """Two workers that go on with their steps meanwhile, and must have got somewhere, and be right."""
    with Run(2, size=SIZE, rejoin_seconds=0.2, **settings) as run:
        server, workers = run.start(dict.fromkeys("ab", PLAIN))
        workers["a"].until_step(Applied, 0)
        begun, memory = server.last_step(), memory_of(server)
        yield run
        server.until_step(Stepped, max(begun + 10, server.last_step() + 2))
        assert most_memory_of(server) - memory < GROWTH
        server.go_on()
        found = run.finish()
        assert len(found.steps[-1].shares) == 2


def memory_of(server: Process) -> int:
    """Bytes that it has now."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # from here on the most is counted
    return _status(server, "VmRSS")


def most_memory_of(server: Process) -> int:
    return _status(server, "VmHWM")


def _status(server: Process, name: str) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) * 1024


def framed(body: bytes, length: int | None = None) -> bytes:
    return (len(body) if length is None else length).to_bytes(4, "big") + body


# Before the join.

HELLO = encode(Hello(2, "nobody", bytes(16), 0, False))
BEFORE_JOIN = {
    "HTTP": (HTTP, Reason.NOT_A_FRAME),
    "TLS": (client_hello(random.Random(1)), Reason.NOT_A_FRAME),
    "length 0": (framed(b""), Reason.EMPTY),
    "length 2^32 - 1": (framed(b"", 2**32 - 1), Reason.NOT_A_FRAME),
    "one byte more than any frame": (framed(b"", 100_000_001), Reason.NOT_A_FRAME),
    "one byte more than a join": (framed(b"\x20", 65_537), Reason.TOO_LONG),
    "length 2^32 - 1, later": (HELLO + framed(b"", 2**32 - 1), Reason.TOO_LONG),
    "an unknown tag": (framed(b"\xff"), Reason.UNKNOWN_TAG),
    "text that is longer than its frame": (framed(b"\x01" + (2**32 - 1).to_bytes(4, "little")), Reason.TRUNCATED),
    "text that is none": (framed(b"\x01\x01\0\0\0\xff"), Reason.BAD_TEXT),
    "a gradient": (encode(GradientDone(0, 0, 0.0, 0, 1)), Reason.NOT_JOINED),
    "a proof first": (encode(Proof(bytes(32))), Reason.NOT_JOINED),
    "a proof of nothing": (HELLO + encode(Proof(bytes(32))), Reason.BAD_TOKEN),
    "two hellos": (HELLO + HELLO, Reason.ALREADY_JOINED),
    "version 3": (encode(Hello(3, "nobody", bytes(16), 0, False)), Reason.VERSION_REFUSED),
    "version 1 in a run of version 2": (encode(JoinRequest("nobody", 1, "cpu")), Reason.VERSION_REFUSED),
}


def test_bytes_that_are_no_frames_are_refused_and_counted():
    with run_beside() as run:
        for name, (data, _) in BEFORE_JOIN.items():
            with RawClient(run.settings.port) as client:
                client.send(data)
                client.hear_all()  # it hangs up by itself
                assert run.servers[0].figures().connections["none"] == 0, name
        expected = Counter(str(reason) for _, reason in BEFORE_JOIN.values())
        assert run.servers[0].figures().rejected == expected


@pytest.mark.parametrize(
    "number", [3_000, pytest.param(100_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])]
)
def test_generated_frames_are_refused_and_counted(number):
    sent: Counter[str] = Counter()
    with run_beside() as run:
        generated = itertools.islice(frames(seed=number), number)
        while some := list(itertools.islice(generated, AT_ONCE)):
            sent.update(str(reason) for data in some if (reason := why_refused(data)) is not None)
            with ExitStack() as stack:
                clients = [stack.enter_context(RawClient(run.settings.port)) for _ in some]
                for client, data in zip(clients, some, strict=True):
                    client.send(data)
                for client in clients:
                    client.end()
        assert sum(sent.values()) > number // 2
        assert run.servers[0].figures().rejected == sent


def test_half_a_header_and_silence_is_dropped_at_the_deadline():
    with run_beside(join_seconds=2.0) as run:
        begun = time.monotonic()
        with (
            RawClient(run.settings.port) as silent,
            RawClient(run.settings.port) as half,
            RawClient(run.settings.port) as hello,
        ):
            half.send(b"\0\0")
            hello.send(HELLO)
            assert [silent.hear_all(), half.hear_all()] == [b"", b""]
            assert hello.hear_all()  # its challenge, and why it is refused
        assert 1.5 < time.monotonic() - begun < SECONDS
        assert run.servers[0].figures().rejected == {"too_slow": 3}


def test_who_says_a_byte_now_and_then_is_dropped_at_the_deadline_too():
    with run_beside(join_seconds=2.0) as run, RawClient(run.settings.port) as client:
        client.socket.settimeout(0.2)
        for byte in itertools.cycle(framed(b"\x20" + bytes(1000))):
            try:
                if not client.socket.send(bytes([byte])) or not client.socket.recv(100):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert run.servers[0].figures().rejected == {"too_slow": 1}


# Joins.


def test_a_wrong_token_opens_nothing_and_takes_nobodys_place():
    with run_beside() as run:
        for name in ("a", "nobody"):  # one that is there, and one that is not
            with RawClient(run.settings.port) as client:
                answer = client.ask_to_join(name, NOBODY)
                assert isinstance(answer, Refused)
                assert answer.reason == "bad_token"
        found = run.servers[0].figures()
        assert found.rejected == {"bad_token": 2}
        assert found.workers == 2


def test_a_join_that_was_recorded_opens_nothing():
    with run_beside() as run:
        with RawClient(run.settings.port) as good:
            assert isinstance(good.ask_to_join("c", TOKEN), Welcome)
            recorded = good.said
        run.servers[0].until(lambda _: run.servers[0].figures().workers == 2)
        with RawClient(run.settings.port) as replayed:
            replayed.send(recorded)
            answer = replayed.hear()
            assert isinstance(answer, Refused)
            assert answer.reason == "replayed"
        assert run.servers[0].figures().rejected == {"replayed": 1}


# After the join: what a worker with the token may not say. The run goes on without it.


def table(share: Assignment, *, step: int = 0, attempt: int = 0, parts: Sequence[Part] = PARTS) -> Table:
    """Of a gradient; step and attempt: so many later than asked for."""
    return Table(Kind.GRADIENT, share.step + step, share.attempt + attempt, tuple(parts))


def chunk(share: Assignment, data: bytes, count: int, *, kind: Kind = Kind.GRADIENT, **changes: object) -> Chunk:
    """From the first part's beginning."""
    fields = {"part": 0, "offset": 0, "codec": Codec.NONE, "checksum": checksum(data), "payload": data, **changes}
    order = (fields[name] for name in ("part", "offset", "codec"))
    return Chunk(kind, share.step, share.attempt, *order, count, fields["checksum"], fields["payload"])  # type: ignore


def whole(share: Assignment, total: int = 0) -> list[Message]:
    """A gradient of zeros, with so many samples too many."""
    parts = [
        chunk(share, bytes(part.count * part.dtype.num_bytes), part.count, part=number)
        for number, part in enumerate(PARTS)
    ]
    return [table(share), *parts, GradientDone(share.step, share.attempt, 0.0, 0, share.end - share.start + total)]


@cache
def packed_zeros() -> bytes:
    """A hundred times what may ever be held."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(100)) + packer.flush()


def bomb(share: Assignment, count: int) -> Chunk:
    return chunk(share, b"", count, codec=Codec.ZLIB, payload=packed_zeros())


NOT_NUMBERS = numpy.full(400, numpy.nan).tobytes()
AFTER_JOIN: dict[str, tuple[Callable[[Assignment], list[Message]], Reason]] = {
    "an old step": (lambda share: [table(share, step=-1)], Reason.OLD_STEP),
    "a step to come": (lambda share: [table(share, step=1)], Reason.FUTURE_STEP),
    "an attempt to come": (lambda share: [table(share, attempt=1)], Reason.WRONG_ATTEMPT),
    "too many parts": (lambda share: [table(share, parts=[*PARTS, PARTS[0]])], Reason.WRONG_SIZES),
    "as many parts as there can be": (lambda share: [table(share, parts=[PARTS[0]] * 65_536)], Reason.WRONG_SIZES),
    "no parts": (lambda share: [table(share, parts=[])], Reason.WRONG_SIZES),
    "an endless part": (
        lambda share: [table(share, parts=[PARTS[0], Part(Dtype.FLOAT32, 2**63)])],
        Reason.WRONG_LENGTH,
    ),
    "another precision": (lambda share: [table(share, parts=[PARTS[0], Part(Dtype.FLOAT64, 200)])], Reason.BAD_DTYPE),
    "numbers that are whole": (lambda share: [table(share, parts=[Part(Dtype.INT64, 400)])], Reason.BAD_DTYPE),
    "two tables": (lambda share: [table(share), table(share)], Reason.UNEXPECTED),
    "a part that is none": (lambda share: [table(share), chunk(share, bytes(8), 1, part=2)], Reason.UNEXPECTED),
    "a chunk without a table": (lambda share: [chunk(share, bytes(8), 1)], Reason.UNEXPECTED),
    "a hole": (lambda share: [table(share), chunk(share, bytes(8), 1, offset=1)], Reason.WRONG_LENGTH),
    "an element too many": (lambda share: [table(share), chunk(share, bytes(3208), 401)], Reason.WRONG_LENGTH),
    "elements of another size": (lambda share: [table(share), chunk(share, bytes(4), 1)], Reason.WRONG_LENGTH),
    "no elements in many bytes": (lambda share: [table(share), chunk(share, bytes(8), 0)], Reason.WRONG_LENGTH),
    "a wrong checksum": (lambda share: [table(share), chunk(share, bytes(8), 1, checksum=1)], Reason.BAD_CHECKSUM),
    "no numbers": (lambda share: [table(share), chunk(share, NOT_NUMBERS, 400)], Reason.NOT_FINITE),
    "a bomb": (lambda share: [table(share), bomb(share, 400)], Reason.UNPACKS_TOO_FAR),
    "a bomb for the largest chunk": (lambda share: [table(share), bomb(share, MAX_CHUNK // 8)], Reason.UNPACKS_TOO_FAR),
    "a fuse": (
        lambda share: [table(share), chunk(share, b"", 8, codec=Codec.ZLIB, payload=b"no")],
        Reason.BAD_CHECKSUM,
    ),
    "a part that ends early": (
        lambda share: [table(share), chunk(share, bytes(8), 1), whole(share)[-1]],
        Reason.WRONG_LENGTH,
    ),
    "other samples": (lambda share: whole(share, total=1), Reason.WRONG_TOTAL),
    "a state that nobody wants": (
        lambda share: [chunk(share, bytes(8), 1, kind=Kind.STATE)],
        Reason.UNEXPECTED,
    ),
    "the end of a state": (lambda share: [StateDone(share.step, 1)], Reason.UNEXPECTED),
    "an average": (lambda share: [chunk(share, bytes(8), 1, kind=Kind.AVERAGE)], Reason.UNEXPECTED),
    "a second join": (lambda share: [Hello(2, "c", bytes(16), 0, False)], Reason.ALREADY_JOINED),
    "what servers say": (lambda share: [share], Reason.UNEXPECTED),
    "version 1": (lambda share: [Shutdown()], Reason.UNEXPECTED),
}


def test_what_workers_may_not_say_is_refused_and_counted():
    expected: Counter[str] = Counter()
    with run_beside(policy="go on") as run:
        server = run.servers[0]
        for name, (make, reason) in AFTER_JOIN.items():
            with RawClient(run.settings.port) as worker:
                share = worker.join(name, TOKEN)
                for message in make(share):
                    worker.send(message)
                worker.hear_all()
            expected[str(reason)] += 1
            assert server.figures().rejected == expected, name


@pytest.mark.parametrize(("name", "kind"), [("an old step", CommunicationError), ("no numbers", ArithmeticError)])
def test_what_workers_may_not_say_ends_the_run_where_that_is_the_policy(name, kind):
    make, reason = AFTER_JOIN[name]
    with Run(1, size=SIZE, policy="halt") as run:
        server, workers = run.start({"a": PLAIN})
        with RawClient(run.settings.port) as worker:
            for message in make(worker.join("culprit", TOKEN)):
                worker.send(message)
            worker.hear_all()
        with pytest.raises(kind, match=rf"^worker 1 \(culprit\) at step \d+: {reason}"):
            server.ends()
        with pytest.raises(Exception, match=str(reason)):
            workers["a"].ends()
