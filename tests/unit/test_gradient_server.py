"""The gradient server over real loopback sockets: joins, steps of both versions, refusals, losses and returns."""

from __future__ import annotations

import asyncio
import math
import struct
from contextlib import AsyncExitStack, asynccontextmanager
from functools import wraps

import numpy
import pytest
import uvloop
from prometheus_client import CollectorRegistry, generate_latest

from monitoring.gradient_server_metrics import GradientServerMetrics
from runtime.chunks import make_chunk
from runtime.errors import ConfigError, DeadlineExceeded, LaunchError, Mismatch, NonFiniteGradient, PeerLost
from runtime.gradient_server import GradientServer, GradientServerSettings
from runtime.link import LinkLost
from runtime.wire import (
    Again,
    Assignment,
    Beat,
    Dtype,
    GradientDone,
    Kind,
    Leave,
    Part,
    Refused,
    StateDone,
    StateWanted,
    Table,
    encode,
)
from tests.gradient_clients import (
    SECONDS,
    ClientV1,
    ClientV2,
    block_v1,
    component_v1,
    floats,
    frame,
    gradient_v1,
    hang_up,
    text,
)

TOKEN = b"a token of sixteen bytes"


def on_uvloop(test):
    """As in earnest: every test, to its end, or broken off."""

    @wraps(test)
    def run(*args, **keywords):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(*args, **keywords), 3 * SECONDS))

    return run


async def until(is_so):
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110 - what the server has noticed it tells nobody
            await asyncio.sleep(0.001)


class Run:
    """A server and what it has told."""

    def __init__(self, server: GradientServer, records: list) -> None:
        self.server, self.records, self.address = server, records, server.address

    async def failure(self, kind: type[Exception]) -> str:
        with pytest.raises(kind) as caught:
            await self.end()
        return str(caught.value)

    async def end(self):
        async with asyncio.timeout(SECONDS):
            return await self.server.finished()

    def refused(self) -> dict[str, int]:
        return dict(self.server.totals.rejected)


@asynccontextmanager
async def serving(workers=2, samples=8, **options):
    records = []
    settings = GradientServerSettings(**{"workers": workers, "samples": samples, "port": 0, **options})
    async with GradientServer(settings, records.append) as server:
        try:
            yield Run(server, records)
        finally:
            hang_up()  # else the server waits until they have


async def joined_v1(run, count=2):
    return [await ClientV1.join(run.address, f"old-{number}") for number in range(count)]


async def joined_v2(run, count=2, state=None, **options):
    """All have joined, and the first one's state."""
    clients = [await ClientV2.join(run.address, f"node-{number}", **options) for number in range(count)]
    if count > 1 and not options.get("has_state"):
        state = state or [floats(1, 2, 3)]
        clients[0].send_state(await clients[0].expect(StateWanted), state)
        for client in clients[1:]:
            await client.tensors()
    return clients


async def assignments(clients):
    return [await client.expect(Assignment) for client in clients]


async def one_step(clients, value=1.0):
    """All send the same, and get it back."""
    given = await assignments(clients)
    for client, assignment in zip(clients, given, strict=True):
        client.send_gradient(assignment, [floats(value)])
    for client in clients:
        average = await client.tensors()
        assert average.arrays[0].tolist() == [value]
    return given[0].step


# Joins.


@on_uvloop
async def test_workers_are_numbered_in_order_of_joining():
    async with serving(workers=3) as run:
        clients = await joined_v1(run, 3)
        assert [(client.worker, client.total_workers) for client in clients] == [(0, 3), (1, 3), (2, 3)]
        assert [await client.read() for client in clients] == [
            ("assignment", 0, 0, 2),
            ("assignment", 0, 2, 4),
            ("assignment", 0, 4, 8),
        ]


@on_uvloop
async def test_a_welcome_tells_what_a_worker_needs_to_know():
    async with serving(heartbeat_seconds=2.5, compression=True, token=TOKEN) as run:
        client = await ClientV2.join(run.address, token=TOKEN)
        welcome = client.welcome
        assert (welcome.worker_id, welcome.total_workers) == (0, 2)
        assert (welcome.heartbeat_ms, welcome.timeout_ms, welcome.chunk_bytes, welcome.codec) == (
            2500,
            30000,
            1 << 20,
            1,
        )


@on_uvloop
async def test_workers_that_do_not_come():
    async with serving(workers=2, join_seconds=0.2) as run:
        await ClientV2.join(run.address)
        assert await run.failure(DeadlineExceeded) == (
            "1 of 2 workers joined within 0.2 s. Start the others, or set --workers to as many as there are."
        )


@on_uvloop
async def test_one_that_goes_before_the_start_is_not_counted():
    async with serving(workers=2) as run:
        first = await ClientV1.join(run.address)
        first.send(frame(7))
        assert await first.is_over()
        clients = await joined_v1(run)
        assert [client.worker for client in clients] == [0, 1]
        assert (await clients[1].read())[0] == "assignment"


@on_uvloop
async def test_a_wrong_token():
    async with serving(token=TOKEN) as run:
        client = await ClientV2.join(run.address, token=b"another token of some bytes")
        refused = await client.expect(Refused)
        assert refused.reason == "bad_token"
        await client.gone()
        assert run.refused() == {"bad_token": 1}


@on_uvloop
async def test_a_join_that_was_seen_before():
    async with serving(token=TOKEN) as run:
        client = await ClientV2.join(run.address, "node", token=TOKEN)
        thief = ClientV2("node", b"", 0, False)
        await thief.connect(run.address)
        thief.send(client.application.hello)
        assert (await thief.expect(Refused)).reason == "replayed"
        assert run.refused() == {"replayed": 1}


@on_uvloop
async def test_a_version_that_is_not_spoken():
    async with serving() as run:
        client = ClientV2("node", b"", 0, False)
        await client.connect(run.address)
        hello = client.application.hello
        client.send(type(hello)(3, hello.node_id, hello.nonce, 0, False))
        assert (await client.expect(Refused)).reason == "version_refused"


@on_uvloop
async def test_version_1_is_taken_from_this_host_only(monkeypatch):
    monkeypatch.setattr("runtime.gradient_connection.is_loopback", lambda host: False)
    join = frame(1, text("old"), struct.pack("<I", 1), text("cpu"))
    async with serving(token=TOKEN) as run:
        client = await ClientV1.connect(run.address)
        client.send(join)
        assert await client.read() == ("shutdown",)
        assert await client.is_over()
        assert run.refused() == {"version_refused": 1}
    async with serving(protocol="v1") as run:
        assert (await ClientV1.join(run.address)).worker == 0
        newer = await ClientV2.join(run.address)
        assert (await newer.expect(Refused)).reason == "bad_token"


@on_uvloop
async def test_a_run_has_workers_of_one_version():
    async with serving() as run:
        await ClientV2.join(run.address)
        client = await ClientV1.connect(run.address)
        client.send(frame(1, text("old"), struct.pack("<I", 1), text("cpu")))
        assert await client.read() == ("shutdown",)
        assert run.refused() == {"version_refused": 1}


@on_uvloop
async def test_who_says_nothing_is_hung_up_on():
    async with serving(workers=1, join_seconds=0.2) as run:
        await ClientV1.join(run.address)
        client = await ClientV1.connect(run.address)
        client.send(b"\0\0")  # half a header
        assert await client.is_over()
        assert run.refused() == {"too_slow": 1}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not_a_frame"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "not_a_frame"),
        (b"\xff\xff\xff\xff", "not_a_frame"),
        (b"\0\0\0\0", "empty"),
        (b"\0\0\0\x01\x99", "unknown_tag"),
        (frame(7), "not_joined"),
    ],
)
@on_uvloop
async def test_what_is_no_join(data, reason):
    async with serving() as run:
        client = await ClientV1.connect(run.address)
        client.send(data)
        assert await client.is_over()
        assert run.refused() == {reason: 1}


@on_uvloop
async def test_joining_twice():
    async with serving() as run:
        client = await ClientV1.join(run.address)
        client.send(frame(1, text("old"), struct.pack("<I", 1), text("cpu")))
        assert await client.read() == ("shutdown",)
        assert run.refused() == {"already_joined": 1}


@on_uvloop
async def test_settings_that_cannot_be():
    for options, message in [
        ({"workers": 0}, "workers = 0: at least 1."),
        ({"samples": 1}, "samples = 1: at least 2."),
        ({"min_workers": 3}, "min_workers = 3: at most workers = 2."),
        ({"timeout_seconds": 1.0}, "timeout_seconds = 1: more than heartbeat_seconds = 5."),
        ({"rejoin_seconds": -1.0}, "rejoin_seconds = -1: more than 0 seconds."),
        ({"host": "0.0.0.0"}, "0.0.0.0: others than this host can reach it, so it takes a token. Give --token-file."),
    ]:
        with pytest.raises(ConfigError) as caught:
            GradientServerSettings(**{"workers": 2, "samples": 8, **options})
        assert str(caught.value) == message


@on_uvloop
async def test_an_address_that_is_taken():
    async with serving() as run:
        with pytest.raises(LaunchError, match=r"^127\.0\.0\.1:\d+ cannot be listened on: "):
            async with serving(port=int(run.address.rpartition(":")[2])):
                pass


# Steps of version 1.


@on_uvloop
async def test_a_whole_gradient_of_uneven_shares_gives_the_true_mean():
    async with serving(samples=5, steps=1) as run:
        clients = await joined_v1(run)
        assert [await client.read() for client in clients] == [("assignment", 0, 0, 2), ("assignment", 0, 2, 5)]
        clients[0].send(gradient_v1(0, 0, [1, 10], loss=1.0, correct=1, total=2))
        clients[1].send(gradient_v1(0, 1, [6, 0], loss=2.0, correct=3, total=3))
        for client in clients:
            kind, step, values, loss = await client.read()
            assert (kind, step, values) == ("average", 0, [4, 4])
            assert loss == pytest.approx(1.6)
            assert await client.read() == ("shutdown",)
        summary = await run.end()
        assert (summary.steps, summary.reason) == (1, "1 steps were made")
        (record,) = run.records
        assert (record.step, record.attempt, record.shares) == (0, 0, {0: (0, 2), 1: (2, 5)})
        assert (record.loss, record.correct, record.total) == (pytest.approx(1.6), 4, 5)
        assert record.seconds > 0


@on_uvloop
async def test_blocks_and_components_in_reverse_order():
    async with serving(samples=8) as run:
        clients = await joined_v1(run)
        for step in range(2):
            for client in clients:
                assert await client.read() == ("assignment", step, client.worker * 4, client.worker * 4 + 4)
            for number in (1, 0):
                for client in clients:
                    client.send(block_v1(step, client.worker, number, 2, [number, client.worker, 4], [1, 2]))
                for client in clients:
                    assert await client.read() == ("block", step, number, [1, 2], [number, 0.5, 4])
            for number in (0, 1, 2):
                for client in clients:
                    client.send(component_v1(step, client.worker, number, [number + client.worker]))
                for client in clients:
                    assert await client.read() == ("component", step, number, [number + 0.5])
        assert [record.step for record in run.records] == [0, 1]
        assert math.isnan(run.records[0].loss)


@on_uvloop
async def test_workers_that_send_blocks_may_tell_their_loss():
    async with serving(samples=8) as run:
        clients = await joined_v1(run)
        for client in clients:
            await client.read()
            client.send(block_v1(0, client.worker, 0, 1, [1.0]))
            client.send(gradient_v1(0, client.worker, [], loss=client.worker, correct=1, total=4))
        for client in clients:
            answers = [await client.read(), await client.read()]
            assert sorted(answers) == [("average", 0, [], 0.5), ("block", 0, 0, [1], [1.0])]
            for number in range(3):
                client.send(component_v1(0, client.worker, number, []))
        for client in clients:
            assert [(await client.read())[0] for _ in range(4)] == [*["component"] * 3, "assignment"]
        assert (run.records[0].loss, run.records[0].correct) == (0.5, 2)


@on_uvloop
async def test_workers_that_are_not_told_their_samples():
    async with serving(assigns_v1=False, steps=1) as run:
        clients = await joined_v1(run)
        for client in clients:
            client.send(gradient_v1(0, client.worker, [client.worker], total=4))
        for client in clients:
            assert (await client.read())[:3] == ("average", 0, [0.5])


@on_uvloop
async def test_a_large_gradient_of_version_1_is_the_same_element_by_element():
    async with serving(steps=1) as run:
        clients = await joined_v1(run)
        values = numpy.random.default_rng(1).standard_normal((2, 700_001)).astype(numpy.float32)
        for client in clients:
            await client.read()
            client.send(gradient_v1(0, client.worker, values[client.worker], total=4))
        expected = values.mean(0, dtype=numpy.float64).astype(numpy.float32).tolist()
        for client in clients:
            assert (await client.read())[2] == expected


# Refusals of version 1: the run halts, and names who and why.

GOOD = {
    "whole": lambda worker: gradient_v1(0, worker, [1, 2], total=4),
    "block": lambda worker: block_v1(0, worker, 0, 2, [1, 2], [1, 1]),
    "component": lambda worker: component_v1(0, worker, 0, [1, 2]),
}


@pytest.mark.parametrize(
    ("good", "bad", "reason", "detail"),
    [
        ("whole", gradient_v1(1, 1, [1, 2], total=4), "future_step", "1, in step 0."),
        ("whole", gradient_v1(0, 0, [1, 2], total=4), "wrong_worker", "0, from worker 1."),
        (
            "whole",
            gradient_v1(0, 1, [1, 2, 3], total=4),
            "wrong_length",
            "the gradient: 3 elements where worker 0 had 2.",
        ),
        ("whole", gradient_v1(0, 1, [1, 2], total=3), "wrong_total", "3 samples where [4, 8) are 4."),
        ("whole", gradient_v1(0, 1, [1, math.nan], total=4), "not_finite", "the gradient from element 0 on."),
        ("whole", gradient_v1(0, 1, [math.inf, 1], total=4), "not_finite", "the gradient from element 0 on."),
        ("whole", gradient_v1(0, 1, [], total=4), "wrong_length", "the gradient: 0 elements where worker 0 had 2."),
        ("whole", block_v1(0, 1, 0, 2, [1, 2]), "unexpected", "blocks in a step that others send as whole."),
        ("whole", component_v1(0, 1, 0, [1]), "unexpected", "lm_head in a step that others send as whole."),
        ("block", block_v1(0, 1, 2, 2, [1, 2], [1, 1]), "wrong_block", "block 2 of 2."),
        ("block", block_v1(0, 1, 0, 3, [1, 2], [1, 1]), "wrong_block", "3 blocks where other workers have 2."),
        ("block", block_v1(0, 1, 0, 2, [1, 2], [2]), "wrong_sizes", "block 0: sizes (2,) where worker 0 had (1, 1)."),
        ("block", block_v1(0, 1, 0, 2, [1, 2], [1]), "wrong_sizes", "block 0: sizes add up to 1, not 2."),
        ("component", component_v1(0, 1, 3, [1, 2]), "wrong_component", ""),
        ("component", component_v1(0, 1, 0, [1]), "wrong_length", "lm_head: 1 elements where worker 0 had 2."),
        ("component", component_v1(0, 1, 0, [1, math.nan]), "not_finite", "lm_head from element 0 on."),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
@on_uvloop
async def test_what_halts_a_run_of_version_1(good, bad, reason, detail):
    async with serving() as run:
        clients = await joined_v1(run)
        for client in clients:
            await client.read()
        before = run.server.figures().bytes_in
        clients[0].send(GOOD[good](0))
        await until(lambda: run.server.figures().bytes_in == before + len(GOOD[good](0)))
        clients[1].send(bad)
        for client in clients:
            assert await client.read() == ("shutdown",)
            assert await client.is_over()
        kind = NonFiniteGradient if reason == "not_finite" else PeerLost if reason == "wrong_component" else Mismatch
        message = await run.failure(kind)
        assert "worker 1 (old-1)" in message
        assert "step 0" in message
        assert f"{reason}: " in message
        assert message.endswith(detail)
        assert run.refused() == {reason: 1}


@on_uvloop
async def test_an_old_step_of_version_1():
    async with serving() as run:
        clients = await joined_v1(run)
        for step in range(2):
            for client in clients:
                await client.read()
                client.send(gradient_v1(step if client.worker else 0, client.worker, [1.0], total=4))
            if step == 0:
                for client in clients:
                    assert (await client.read())[0] == "average"
        assert await run.failure(Mismatch) == "worker 0 (old-0) at step 1: old_step: a step that is over: 0, in step 1."


@on_uvloop
async def test_a_refused_gradient_and_the_others_go_on():
    async with serving(workers=3, samples=12, policy="go on", steps=2) as run:
        clients = await joined_v1(run, 3)
        for client in clients:
            await client.read()
        clients[0].send(gradient_v1(0, 0, [1.0], loss=1.0, total=4))
        clients[1].send(gradient_v1(0, 1, [math.nan], loss=9.0, total=4))
        assert await clients[1].read() == ("shutdown",)
        clients[2].send(gradient_v1(0, 2, [3.0], loss=2.0, total=4))
        others = [clients[0], clients[2]]
        for client in others:
            assert await client.read() == ("average", 0, [2.0], 1.5)
        assert [await client.read() for client in others] == [("assignment", 1, 0, 6), ("assignment", 1, 6, 12)]
        for client in others:
            client.send(gradient_v1(1, client.worker, [1.0], total=6))
        for client in others:
            assert (await client.read())[0] == "average"
            assert await client.read() == ("shutdown",)
        await run.end()
        assert run.refused() == {"not_finite": 1}


# Version 1: who goes.


@on_uvloop
async def test_a_worker_of_version_1_that_is_lost_in_a_frame_halts_the_run():
    async with serving() as run:
        clients = await joined_v1(run)
        for client in clients:
            await client.read()
        clients[0].send(gradient_v1(0, 0, [1, 2], total=4))
        clients[1].send(gradient_v1(0, 1, [1, 2], total=4)[:-10])
        await clients[1].writer.drain()
        await clients[1].close()
        assert await clients[0].read() == ("shutdown",)
        message = await run.failure(PeerLost)
        assert message.startswith("worker 1 (old-1) was lost at step 0: 127.0.0.1:")
        assert message.endswith("it hung up in the midst of a message.")


@on_uvloop
async def test_a_worker_of_version_1_that_leaves_in_order():
    async with serving(samples=9, workers=3) as run:
        clients = await joined_v1(run, 3)
        for client in clients:
            await client.read()
        clients[0].send(gradient_v1(0, 0, [3.0], total=3))
        clients[2].leave()  # its data has ended
        assert await clients[2].is_over()
        clients[1].send(gradient_v1(0, 1, [5.0], total=3))
        for client in clients[:2]:
            assert (await client.read())[:3] == ("average", 0, [4.0])
        assert [await client.read() for client in clients[:2]] == [("assignment", 1, 0, 4), ("assignment", 1, 4, 9)]
        for client in clients[:2]:
            client.leave()
        assert (await run.end()).reason == "all workers have left"


@on_uvloop
async def test_one_that_leaves_in_the_midst_of_its_blocks():
    async with serving() as run:
        clients = await joined_v1(run)
        for client in clients:
            await client.read()
        clients[1].send(block_v1(0, 1, 1, 2, [1.0]))
        clients[1].leave()
        assert await clients[0].read() == ("shutdown",)
        assert await run.failure(PeerLost) == "worker 1 (old-1) left at step 0, in the midst of its gradient"


@on_uvloop
async def test_nobody_of_version_1_joins_late():
    async with serving(workers=1) as run:
        await ClientV1.join(run.address)
        late = await ClientV1.connect(run.address)
        late.send(frame(1, text("late"), struct.pack("<I", 1), text("cpu")))
        assert await late.read() == ("shutdown",)
        assert run.refused() == {"version_refused": 1}


# Steps of version 2.


@on_uvloop
async def test_the_first_workers_state_is_everybodys():
    async with serving(workers=3) as run:
        clients = [await ClientV2.join(run.address, f"node-{number}") for number in range(3)]
        wanted = await clients[0].expect(StateWanted)
        assert wanted.step == 0
        state = [numpy.arange(700_000, dtype=numpy.float32), floats(), floats(4)]
        clients[0].send_state(wanted, state)
        for client in clients[1:]:
            got = await client.tensors()
            assert (got.table.kind, got.table.step) == (Kind.STATE, 0)
            for array, expected in zip(got.arrays, state, strict=True):
                numpy.testing.assert_array_equal(array, expected)
            assert got.end == StateDone(0, wanted.request)
        shares = [(given.start, given.end, given.total) for given in await assignments(clients)]
        assert shares == [(0, 2, 8), (2, 4, 8), (4, 8, 8)]


@on_uvloop
async def test_a_step_of_version_2():
    async with serving(samples=5, steps=1) as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        assert given == [Assignment(0, 0, 0, 2, 5), Assignment(0, 0, 2, 5, 5)]
        values = numpy.random.default_rng(3).standard_normal((2, 600_000)).astype(numpy.float32)
        clients[0].send_gradient(given[0], [values[0], floats(1), floats()], loss=1.0, correct=1)
        clients[1].send_gradient(given[1], [values[1], floats(6), floats()], loss=2.0, correct=3)
        expected = numpy.average(values.astype(numpy.float64), axis=0, weights=[2, 3]).astype(numpy.float32)
        for client in clients:
            average = await client.tensors()
            assert average.table == Table(
                Kind.AVERAGE, 0, 0, tuple(Part(Dtype.FLOAT32, count) for count in (600_000, 1, 0))
            )
            numpy.testing.assert_array_equal(average.arrays[0], expected)
            assert average.arrays[1].tolist() == [4]
            assert (average.end.loss, average.end.correct, average.end.total) == (pytest.approx(1.6), 4, 5)
            assert average.end.seconds > 0
            assert (await client.expect(Leave)).reason == "1 steps were made"
        assert (await run.end()).steps == 1


@on_uvloop
async def test_parts_are_sent_back_as_soon_as_all_have_sent_them():
    async with serving() as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        for client, assignment in zip(clients, given, strict=True):
            client.send_table(0, 0, [floats(1, 2), floats(3)])
            client.send_chunk(0, 0, 1, 0, floats(assignment.start))
        for client in clients:
            await client.expect(Table)
            chunk, data = await client.read()
            assert (chunk.part, numpy.frombuffer(data, "<f4").tolist()) == (1, [2.0])
            client.send_chunk(0, 0, 0, 0, floats(1, 2))
            client.send(GradientDone(0, 0, 0.0, 0, 4))
        for client in clients:
            chunk, _ = await client.read()
            assert chunk.part == 0


@pytest.mark.parametrize("dtype", [Dtype.FLOAT64, Dtype.FLOAT16])
@on_uvloop
async def test_other_dtypes_and_compression(dtype):
    async with serving(compression=True, steps=1) as run:
        clients = await joined_v2(run)
        values = numpy.tile(numpy.arange(8), 50_000).astype(dtype.numpy)
        for client, assignment in zip(clients, await assignments(clients), strict=True):
            client.send_gradient(assignment, [values], dtype=dtype)
        for client in clients:
            numpy.testing.assert_array_equal((await client.tensors()).arrays[0], values)
            assert client.link.bytes_in < values.nbytes / 4


@on_uvloop
async def test_shares_by_measured_speed():
    async with serving(samples=100, shares="by speed") as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(1)])
        await until(lambda: run.server.figures().bytes_in == sum(client.link.bytes_out for client in clients))
        await asyncio.sleep(0.2)  # the other one is that much slower
        clients[1].send_gradient(given[1], [floats(1)])
        for client in clients:
            await client.tensors()
        given = await assignments(clients)
        assert given[0].end > 60
        assert given[0].end == given[1].start


# Refusals of version 2.


async def misbehave(client, given, how):
    step, attempt = given.step, given.attempt
    match how:
        case "old_step":
            client.send_table(step - 1, 0, [floats(1, 2)])
        case "future_step":
            client.send_table(step + 1, 0, [floats(1, 2)])
        case "wrong_attempt":
            client.send_table(step, attempt + 1, [floats(1, 2)])
        case "wrong_sizes":
            client.send_table(step, attempt, [floats(1), floats(2)])
        case "bad_dtype":
            client.send_table(step, attempt, [floats(1, 2)], dtype=Dtype.FLOAT16)
        case "wrong_length":
            client.send_table(step, attempt, [floats(1, 2, 3)])
        case "not_finite":
            client.send_tensors(step, attempt, [floats(1, math.nan)])
        case "wrong_total":
            client.send_tensors(step, attempt, [floats(1, 2)])
            client.send(GradientDone(step, attempt, 0.0, 0, 1))
        case "too early an end":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send(GradientDone(step, attempt, 0.0, 0, 4))
        case "a gap":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send_chunk(step, attempt, 0, 1, floats(2))
        case "another element size":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send_chunk(step, attempt, 0, 0, numpy.zeros(2))
        case "no such part":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send_chunk(step, attempt, 7, 0, floats(2))
        case "twice":
            client.send_table(step, attempt, [floats(1, 2)])
            client.send_table(step, attempt, [floats(1, 2)])
        case "a state unasked for":
            client.send_table(step, 1, [floats(1, 2)], Kind.STATE)
        case "over_budget":
            client.send(Table(Kind.GRADIENT, step, attempt, (Part(Dtype.FLOAT32, 1 << 60),)))


BAD = [
    ("old_step", "old_step"),
    ("future_step", "future_step"),
    ("wrong_attempt", "wrong_attempt"),
    ("wrong_sizes", "wrong_sizes"),
    ("bad_dtype", "bad_dtype"),
    ("wrong_length", "wrong_length"),
    ("not_finite", "not_finite"),
    ("wrong_total", "wrong_total"),
    ("too early an end", "wrong_length"),
    ("a gap", "wrong_length"),
    ("another element size", "wrong_length"),
    ("no such part", "unexpected"),
    ("twice", "unexpected"),
    ("a state unasked for", "unexpected"),
    ("over_budget", "wrong_length"),
]


@pytest.mark.parametrize(("how", "reason"), BAD)
@on_uvloop
async def test_what_halts_a_run_of_version_2(how, reason):
    async with serving() as run:
        clients = await joined_v2(run)
        for client, given in zip(clients, await assignments(clients), strict=True):
            client.send_gradient(given, [floats(1, 2)])
        for client in clients:
            await client.tensors()
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(1, 2)])
        await misbehave(clients[1], given[1], how)
        for client in clients:
            assert (await client.skip_to(Refused)).reason == reason
            await client.gone()
        message = await run.failure(NonFiniteGradient if reason == "not_finite" else Mismatch)
        assert message.startswith("worker 1 (node-1) at step 1: ")
        assert run.refused() == {reason: 1}


@pytest.mark.parametrize("how", ["not_finite", "wrong_total", "wrong_length"])
@on_uvloop
async def test_a_worker_of_version_2_is_dropped_and_the_others_go_on(how):
    async with serving(workers=3, samples=12, policy="go on") as run:
        clients = await joined_v2(run, 3)
        for client, given in zip(clients, await assignments(clients), strict=True):
            client.send_gradient(given, [floats(1, 2)])
        for client in clients:
            await client.tensors()
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(1, 2)])
        await misbehave(clients[1], given[1], how)
        assert (await clients[1].skip_to(Refused)).reason == how
        others = [clients[0], clients[2]]
        given = await assignments(others)
        assert given == [Assignment(1, 1, 0, 6, 12), Assignment(1, 1, 6, 12, 12)]
        others[0].send_gradient(given[0], [floats(2, 2)])
        others[1].send_gradient(given[1], [floats(4, 6)])
        for client in others:
            assert (await client.tensors()).arrays[0].tolist() == [3, 4]
        again = await ClientV2.join(run.address, "node-1", step=2, has_state=True)
        assert (await again.expect(Refused)).detail.startswith(f"node-1 was dropped: {how}: ")


@on_uvloop
async def test_the_last_worker_that_is_refused_ends_the_run():
    async with serving(workers=1, policy="go on") as run:
        (client,) = await joined_v2(run, 1)
        await misbehave(client, await client.expect(Assignment), "not_finite")
        assert (await client.expect(Refused)).reason == "not_finite"
        await run.failure(NonFiniteGradient)


@on_uvloop
async def test_one_that_was_not_asked_is_refused_and_disturbs_nobody():
    async with serving(workers=1) as run:
        (client,) = await joined_v2(run, 1)
        given = await client.expect(Assignment)
        late = await ClientV2.join(run.address, "late")
        late.send_table(0, 0, [floats(1)])
        assert (await late.expect(Refused)).reason == "future_step"
        client.send_gradient(given, [floats(1)])
        assert (await client.tensors()).arrays[0].tolist() == [1]


@on_uvloop
async def test_a_gradient_that_takes_too_long():
    async with serving(step_seconds=0.3, policy="go on") as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(1)])
        assert (await clients[1].expect(Refused)).reason == "too_slow"
        assert await clients[0].expect(Assignment) == Assignment(0, 1, 0, 8, 8)


# Version 2: who is lost, comes back, and comes late.


@pytest.mark.parametrize("when", ["before", "mid-frame", "after"])
@on_uvloop
async def test_a_worker_that_comes_back_sends_again_and_so_do_the_others(when):
    async with serving(samples=8) as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(1, 1)])
        if when == "mid-frame":
            clients[1].send_table(0, 0, [floats(1, 1)])
            clients[1].half_a_chunk(0, 0, 0, 0, floats(100, 100))
        elif when == "after":
            clients[1].send_tensors(0, 0, [floats(100, 100)])
        await clients[1].link.drain()
        clients[1].link.close()
        await clients[1].gone()
        clients[1] = await ClientV2.join(run.address, "node-1", has_state=True)
        assert clients[1].worker == 1
        again = await clients[0].read()
        if isinstance(again, Table):  # the only part was complete, but not the step
            await clients[0].read()
            again = await clients[0].read()
        assert again == Again(0, 1, "worker 1 (node-1) is back")
        assert await clients[1].expect(Assignment) == Assignment(0, 1, 4, 8, 8)
        clients[0].send_gradient(Assignment(0, 1, 0, 4, 8), [floats(1, 1)])
        clients[1].send_gradient(Assignment(0, 1, 4, 8, 8), [floats(3, 3)])
        for client in clients:
            assert (await client.tensors()).arrays[0].tolist() == [2, 2]
        assert [(record.step, record.attempt) for record in run.records] == [(0, 1)]


@on_uvloop
async def test_what_is_left_of_the_old_attempt_is_passed_over():
    async with serving() as run:
        clients = await joined_v2(run)
        await assignments(clients)
        clients[0].send_table(0, 0, [floats(1, 1)])
        clients[0].half_a_chunk(0, 0, 0, 0, floats(50, 50))
        clients[1].link.abort()
        clients[1] = await ClientV2.join(run.address, "node-1", has_state=True)
        await clients[0].expect(Again)
        await clients[1].expect(Assignment)
        clients[0].rest_of_chunk()
        clients[0].send_chunk(0, 0, 0, 0, floats(50, 50))
        clients[0].send(GradientDone(0, 0, 0.0, 0, 4))
        for client in clients:
            client.send_gradient(Assignment(0, 1, 0, 4, 8), [floats(2, 2)])
        for client in clients:
            assert [array.tolist() for array in (await client.tensors()).arrays] == [[2, 2]]


@on_uvloop
async def test_a_damaged_chunk_is_sent_again():
    async with serving() as run:
        clients = await joined_v2(run)
        await assignments(clients)
        clients[1].send_table(0, 0, [floats(1, 1)])
        clients[1].link.write(_damaged(floats(1, 1)))
        assert isinstance(await clients[1].read(), LinkLost)
        clients[1] = await ClientV2.join(run.address, "node-1", has_state=True)
        await clients[0].expect(Again)
        await clients[1].expect(Assignment)
        for client in clients:
            client.send_gradient(Assignment(0, 1, 0, 4, 8), [floats(2, 2)])
        for client in clients:
            assert (await client.tensors()).arrays[0].tolist() == [2, 2]
        assert run.refused() == {"bad_checksum": 1}


def _damaged(values) -> bytes:
    data = memoryview(values).cast("B")
    chunk = make_chunk(data, count=len(values), kind=Kind.GRADIENT, step=0, attempt=0, part=0, offset=0)
    return encode(chunk)[:-8] + struct.pack("<ff", math.nan, 1)


@on_uvloop
async def test_a_worker_that_joins_again_before_its_old_connection_is_found_broken():
    async with serving() as run:
        clients = await joined_v2(run)
        await assignments(clients)
        old, clients[1] = clients[1], await ClientV2.join(run.address, "node-1", has_state=True)
        await old.gone()
        assert clients[1].worker == 1
        await clients[0].expect(Again)
        assert await clients[1].expect(Assignment) == Assignment(0, 1, 4, 8, 8)


@on_uvloop
async def test_a_worker_that_is_lost_for_good():
    async with serving(workers=3, samples=12, rejoin_seconds=0.2) as run:
        clients = await joined_v2(run, 3)
        given = await assignments(clients)
        clients[0].send_gradient(given[0], [floats(9)])
        clients[2].link.abort()
        others = clients[:2]
        given = await assignments(others)
        assert given == [Assignment(0, 1, 0, 6, 12), Assignment(0, 1, 6, 12, 12)]
        for client, assignment in zip(others, given, strict=True):
            client.send_gradient(assignment, [floats(1)])
        for client in others:
            assert (await client.tensors()).arrays[0].tolist() == [1]
        assert run.records[0].shares == {0: (0, 6), 1: (6, 12)}


@on_uvloop
async def test_all_workers_are_lost_for_good():
    async with serving(rejoin_seconds=0.1, join_seconds=0.3) as run:
        clients = await joined_v2(run)
        for client in clients:
            client.link.abort()
        assert (await run.failure(DeadlineExceeded)).startswith("0 of 1 workers joined within 0.3 s.")


@on_uvloop
async def test_fewer_workers_than_there_must_be_are_waited_for():
    async with serving(min_workers=2, rejoin_seconds=0.1) as run:
        clients = await joined_v2(run)
        await one_step(clients)
        await assignments(clients)
        clients[1].link.abort()
        await until(lambda: run.server.figures().workers == 1)
        await asyncio.sleep(0.2)
        clients[1] = await ClientV2.join(run.address, "another")
        clients[0].send_state(await clients[0].expect(StateWanted), [floats(5)])
        assert (await clients[1].tensors()).arrays[0].tolist() == [5]
        assert [given.step for given in await assignments(clients)] == [1, 1]


@on_uvloop
async def test_one_that_never_stays_is_not_waited_for_for_ever():
    async with serving(rejoin_seconds=30.0) as run:
        clients = await joined_v2(run)
        await assignments(clients)
        for _ in range(3):
            clients[1].link.abort()
            clients[1] = await ClientV2.join(run.address, "node-1", has_state=True)
            await clients[1].expect(Assignment)
            await clients[0].expect(Again)
        clients[1].link.abort()
        assert await clients[0].expect(Assignment) == Assignment(0, 4, 0, 8, 8)


@on_uvloop
async def test_a_late_worker_gets_the_state_and_joins_at_the_next_step():
    async with serving() as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        late = await ClientV2.join(run.address, "late")
        assert late.worker == 2
        for client, assignment in zip(clients, given, strict=True):
            client.send_gradient(assignment, [floats(1)])
        for client in clients:
            await client.tensors()
        wanted = await clients[0].expect(StateWanted)
        assert wanted.step == 1
        clients[0].send_state(wanted, [floats(7, 8)])
        state = await late.tensors()
        assert (state.table.step, state.arrays[0].tolist()) == (1, [7, 8])
        clients.append(late)
        assert await one_step(clients) == 1
        assert run.records[1].shares == {0: (0, 2), 1: (2, 4), 2: (4, 8)}


@on_uvloop
async def test_one_that_missed_the_average_gets_the_state():
    async with serving() as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        for client, assignment in zip(clients, given, strict=True):
            client.send_gradient(assignment, [floats(1)])
        await clients[0].tensors()
        await clients[0].expect(Assignment)
        clients[1].link.abort()
        clients[1] = await ClientV2.join(run.address, "node-1", step=0, has_state=True)
        assert await clients[0].expect(Assignment) == Assignment(1, 1, 0, 8, 8)
        clients[0].send_gradient(Assignment(1, 1, 0, 8, 8), [floats(1)])
        await clients[0].tensors()
        clients[0].send_state(await clients[0].expect(StateWanted), [floats(2)])
        assert (await clients[1].tensors()).table.step == 2
        assert await one_step(clients) == 2
        assert [record.step for record in run.records] == [0, 1, 2]


@on_uvloop
async def test_an_average_that_reached_nobody_is_made_anew():
    async with serving() as run:
        clients = await joined_v2(run)
        for client, assignment in zip(clients, await assignments(clients), strict=True):
            client.send_gradient(assignment, [floats(1)])
        await clients[0].tensors()
        for client in clients:
            client.link.abort()
        await until(lambda: not run.server.figures().workers)
        clients = [await ClientV2.join(run.address, f"node-{n}", step=0, has_state=True) for n in range(2)]
        given = await assignments(clients)
        assert given == [Assignment(0, 1, 0, 4, 8), Assignment(0, 1, 4, 8, 8)]
        for client, assignment in zip(clients, given, strict=True):
            client.send_gradient(assignment, [floats(1)])
        for client in clients:
            assert (await client.tensors()).arrays[0].tolist() == [1]
        assert await one_step(clients) == 1


@on_uvloop
async def test_the_source_of_a_state_is_lost():
    async with serving(workers=3) as run:
        clients = [await ClientV2.join(run.address, f"node-{number}") for number in range(3)]
        wanted = await clients[0].expect(StateWanted)
        clients[0].send_table(0, wanted.request, [floats(1, 2)], Kind.STATE)
        clients[0].send_chunk(0, wanted.request, 0, 0, floats(1), Kind.STATE)
        for client in clients[1:]:
            await client.expect(Table)
            await client.read()
        clients[0].link.abort()
        wanted = await clients[1].expect(StateWanted)
        clients[1].send_state(wanted, [floats(3, 4)])
        assert (await clients[2].tensors()).arrays[0].tolist() == [3, 4]
        assert await assignments(clients[1:]) == [Assignment(0, 0, 0, 4, 8), Assignment(0, 0, 4, 8, 8)]


@on_uvloop
async def test_the_only_one_who_needs_a_state_is_lost():
    async with serving() as run:
        clients = [await ClientV2.join(run.address, f"node-{number}") for number in range(2)]
        wanted = await clients[0].expect(StateWanted)
        clients[1].link.abort()
        assert await clients[0].expect(Assignment) == Assignment(0, 0, 0, 8, 8)
        clients[0].send_state(wanted, [floats(1)])  # which nobody needs any more
        clients[0].send_gradient(Assignment(0, 0, 0, 8, 8), [floats(2)])
        assert (await clients[0].tensors()).arrays[0].tolist() == [2]


@on_uvloop
async def test_a_slow_receiver_of_a_state_holds_the_sender_back():
    async with serving() as run:
        clients = [await ClientV2.join(run.address, f"node-{number}") for number in range(2)]
        clients[1].link.pause()
        state = [numpy.arange(5 << 20, dtype=numpy.float32)]
        clients[0].send_state(await clients[0].expect(StateWanted), state)
        before = -1
        while run.server.figures().bytes_in != before:  # until the server reads no more
            before = run.server.figures().bytes_in
            await asyncio.sleep(0.2)
        assert run.server.figures().bytes_waiting < 4 << 20
        assert before < 18 << 20
        clients[1].link.resume()
        numpy.testing.assert_array_equal((await clients[1].tensors()).arrays[0], state[0])


@on_uvloop
async def test_a_worker_that_leaves_in_order_hands_its_samples_to_the_others():
    async with serving() as run:
        clients = await joined_v2(run)
        await assignments(clients)
        clients[1].send(Leave("no more batches"))
        await clients[1].gone()
        given = await clients[0].expect(Assignment)
        assert given == Assignment(0, 1, 0, 8, 8)
        clients[0].send_gradient(given, [floats(1)])
        await clients[0].tensors()
        clients[0].send(Leave("no more batches"))
        assert (await run.end()).reason == "all workers have left"
        await clients[0].gone()


@on_uvloop
async def test_a_gradient_of_one_that_left_after_sending_it_counts():
    async with serving() as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        clients[1].send_gradient(given[1], [floats(3)])
        clients[1].send(Leave("done"))
        await clients[1].gone()
        newer = await ClientV2.join(run.address, "newer")
        assert newer.worker == 2  # the other's number is part of the sum
        clients[0].send_gradient(given[0], [floats(1)])
        assert (await clients[0].tensors()).arrays[0].tolist() == [2]
        clients[0].send_state(await clients[0].expect(StateWanted), [floats(1)])
        await newer.tensors()
        assert (await newer.expect(Assignment)).step == 1


# The server is started anew.


@on_uvloop
async def test_after_a_restart_workers_that_are_ahead_give_the_others_their_state():
    async with serving(workers=3, samples=9) as run:
        steps = [4, 5, 5]
        clients = [
            await ClientV2.join(run.address, f"node-{number}", step=step, has_state=True)
            for number, step in enumerate(steps)
        ]
        wanted = await clients[1].expect(StateWanted)
        assert wanted.step == 5
        clients[1].send_state(wanted, [floats(5)])
        assert (await clients[0].tensors()).table.step == 5
        assert await one_step(clients) == 5
        assert [record.step for record in run.records] == [5]


@on_uvloop
async def test_after_a_restart_a_step_that_nobody_has_applied_is_replayed():
    async with serving(steps=8) as run:
        clients = await joined_v2(run, 2, step=7, has_state=True)
        assert await one_step(clients) == 7
        for client in clients:
            await client.expect(Leave)
        assert (await run.end()).next_step == 8


@on_uvloop
async def test_a_restart_when_all_steps_were_made():
    async with serving(steps=7) as run:
        clients = await joined_v2(run, 2, step=7, has_state=True)
        for client in clients:
            assert (await client.expect(Leave)).reason == "7 steps were made"
        assert (await run.end()).steps == 0


# Heartbeats, and who is silent.


@on_uvloop
async def test_heartbeats_both_versions():
    async with serving(workers=1, heartbeat_seconds=0.05) as run:
        client = await ClientV1.join(run.address)
        assert (await client.read())[0] == "assignment"
        for _ in range(3):
            assert (await client.read(beats=True))[0] == "beat"
    async with serving(workers=1, heartbeat_seconds=0.05) as run:
        client = await ClientV2.join(run.address)
        await client.expect(Assignment)
        await until(lambda: client.num_beats >= 3)


@on_uvloop
async def test_a_worker_that_freezes_is_noticed():
    async with serving(heartbeat_seconds=0.1, timeout_seconds=0.5, rejoin_seconds=0.1) as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        async with asyncio.timeout(SECONDS):
            while clients[0].incoming.empty():
                clients[0].send(Beat(1))
                await asyncio.sleep(0.05)
        assert await clients[0].expect(Assignment) == Assignment(0, 1, 0, 8, 8)
        assert given[0].end == 4


@on_uvloop
async def test_a_worker_of_version_1_that_freezes_halts_the_run():
    async with serving(workers=1, heartbeat_seconds=0.1, timeout_seconds=0.4) as run:
        await ClientV1.join(run.address)
        assert (await run.failure(PeerLost)).endswith("it was not heard for 0.4 s.")


# Orderly ends, and what is kept.


@on_uvloop
async def test_a_server_that_is_stopped_tells_everybody():
    async with serving() as run:
        clients = await joined_v2(run)
        await assignments(clients)
        stranger = await ClientV1.connect(run.address)
        run.server.stop("enough")
        for client in clients:
            assert (await client.expect(Leave)).reason == "enough"
            await client.gone()
        assert await stranger.is_over()
        summary = await run.end()
        assert (summary.reason, summary.steps) == ("enough", 0)
    with pytest.raises(ConnectionRefusedError):
        await ClientV1.connect(run.address)


@on_uvloop
async def test_leaving_the_server_ends_it():
    async with AsyncExitStack() as stack:
        settings = GradientServerSettings(workers=1, samples=1, port=0)
        server = await stack.enter_async_context(GradientServer(settings))
        client = await ClientV1.join(server.address)
        await client.read()
        ending = asyncio.create_task(stack.aclose())
        assert await client.read() == ("shutdown",)
        hang_up()
        await ending


@on_uvloop
async def test_what_was_averaged_is_still_sent_when_the_server_stops():
    async with serving(workers=1, steps=1) as run:
        client = await ClientV2.join(run.address)
        given = await client.expect(Assignment)
        client.link.pause()
        values = numpy.arange(4 << 20, dtype=numpy.float32)
        client.send_gradient(given, [values])
        await until(lambda: run.records)
        client.link.resume()
        numpy.testing.assert_array_equal((await client.tensors()).arrays[0], values)
        await client.expect(Leave)
        await run.end()


@on_uvloop
async def test_what_waits_for_one_client_is_bounded():
    async with serving(workers=2) as run:
        clients = await joined_v2(run)
        given = await assignments(clients)
        clients[1].link.pause()
        values = numpy.arange(6 << 20, dtype=numpy.float32)
        for client, assignment in zip(clients, given, strict=True):
            client.send_gradient(assignment, [values])
        await clients[0].tensors()
        assert run.server.figures().bytes_waiting <= 2 << 20
        clients[1].link.resume()
        await clients[1].tensors()


@on_uvloop
async def test_sums_larger_than_their_memory_are_refused():
    async with serving(workers=1, memory_bytes=12 * 1000) as run:
        client = await ClientV2.join(run.address)
        client.send_gradient(await client.expect(Assignment), [numpy.zeros(1001, numpy.float32)])
        refused = await client.expect(Refused)
        assert refused.reason == "over_budget"
        assert refused.detail == "part 0 of 1001 elements: 12012 bytes of at most 12000."


@on_uvloop
async def test_metrics():
    async with serving(workers=2) as run:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(GradientServerMetrics(run.server.figures))
        clients = await joined_v2(run)
        await one_step(clients)
        stranger = await ClientV1.connect(run.address)
        stranger.send(b"GET / HTTP/1.1\r\n\r\n")
        await stranger.is_over()
        found = generate_latest(registry).decode()
    figures = dict(line.rsplit(" ", 1) for line in found.splitlines() if not line.startswith("#"))
    name = "parallel3d_gradient_server"
    assert figures[f'{name}_connections{{version="2"}}'] == "2.0"
    assert figures[f"{name}_workers"] == "2.0"
    assert figures[f"{name}_steps_total"] == "1.0"
    assert figures[f'{name}_frames_rejected_total{{reason="not_a_frame"}}'] == "1.0"
    assert figures[f"{name}_reduction_seconds_count"] == "1.0"
    assert float(figures[f'{name}_bytes_total{{direction="in"}}']) > 300
    assert float(figures[f'{name}_bytes_total{{direction="out"}}']) > 300
    assert f"{name}_in_flight_bytes" in figures
