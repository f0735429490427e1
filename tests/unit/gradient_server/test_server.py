"""The gradient server over real loopback sockets: joins, steps of both versions, heartbeats and ends."""

from __future__ import annotations

import asyncio
import math
import ssl
import struct
from contextlib import AsyncExitStack

import numpy
import pytest
import trustme
from prometheus_client import CollectorRegistry, generate_latest

from monitoring.prometheus.gradient_server_metrics import GradientServerMetrics
from runtime.errors import ConfigError, DeadlineExceeded, LaunchError, Parallel3DError, PeerLost
from runtime.gradient_server.server import GradientServer, GradientServerSettings
from runtime.gradient_server.wire.link import CLOSE_SECONDS
from runtime.gradient_server.wire.messages import (
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
)
from tests.support.gradient_clients import (
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
from tests.support.gradient_runs import (
    TOKEN,
    assigned_v1,
    assignments,
    joined_v1,
    joined_v2,
    on_uvloop,
    one_step,
    serving,
    until,
)

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
            "1 of 2 workers joined within 0.2 s. Start the others, or set --workers to the number that there is."
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
        thief.send(client.handshake.hello)
        assert (await thief.expect(Refused)).reason == "replayed"
        assert run.refused() == {"replayed": 1}


@on_uvloop
async def test_a_version_that_is_not_spoken():
    async with serving() as run:
        client = ClientV2("node", b"", 0, False)
        await client.connect(run.address)
        hello = client.handshake.hello
        client.send(type(hello)(3, hello.node_id, hello.nonce, 0, False))
        assert (await client.expect(Refused)).reason == "version_refused"


@on_uvloop
async def test_version_1_is_taken_from_this_host_only(monkeypatch):
    monkeypatch.setattr("runtime.gradient_server.connection.is_loopback", lambda host: False)
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
async def test_version_1_is_no_way_round_the_token():
    async with serving(token=TOKEN) as run:
        client = await ClientV1.connect(run.address)
        client.send(frame(1, text("old"), struct.pack("<I", 1), text("cpu")))
        assert await client.read() == ("shutdown",)
        assert run.refused() == {"version_refused": 1}
    async with serving(token=TOKEN, protocol="v1") as run:
        assert (await ClientV1.join(run.address)).worker == 0


@pytest.mark.parametrize("name", ["", "two\nlines", "x" * 256])
@on_uvloop
async def test_names_of_version_1_are_checked_too(name):
    async with serving() as run:
        client = await ClientV1.connect(run.address)
        client.send(frame(1, text(name), struct.pack("<I", 1), text("cpu")))
        assert await client.read() == ("shutdown",)
        assert run.refused() == {"bad_text": 1}


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
        ({"host": "0.0.0.0"}, "0.0.0.0: other hosts can reach it, so it needs a token. Give --token-file."),
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


def send_empty_components(client):
    for number in range(3):
        client.send(component_v1(0, client.worker, number, []))


@on_uvloop
async def test_workers_that_send_blocks_may_tell_their_loss():
    async with serving(samples=8) as run:
        clients = await assigned_v1(run)
        for client in clients:
            client.send(block_v1(0, client.worker, 0, 1, [1.0]))
            client.send(gradient_v1(0, client.worker, [], loss=client.worker, correct=1, total=4))
        for client in clients:
            answers = [await client.read(), await client.read()]
            assert sorted(answers) == [("average", 0, [], 0.5), ("block", 0, 0, [1], [1.0])]
            send_empty_components(client)
        for client in clients:
            assert [(await client.read())[0] for _ in range(4)] == [*["component"] * 3, "assignment"]
        assert (run.records[0].loss, run.records[0].correct) == (0.5, 2)


@on_uvloop
async def test_workers_that_send_blocks_may_tell_their_loss_after_them():
    async with serving(samples=8) as run:
        clients = await assigned_v1(run)
        for client in clients:
            client.send(block_v1(0, client.worker, 0, 1, [1.0]))
            send_empty_components(client)
        for client in clients:
            assert [(await client.read())[0] for _ in range(5)] == ["block", *["component"] * 3, "assignment"]
            client.send(gradient_v1(0, client.worker, [], loss=client.worker, total=4))
        for client in clients:
            assert await client.read() == ("average", 0, [], 0.5)


@on_uvloop
async def test_losses_are_told_when_the_only_one_that_told_none_has_left():
    async with serving(workers=3, samples=12) as run:
        clients = await assigned_v1(run, 3)
        before = run.server.figures().bytes_in
        losses = [gradient_v1(0, worker, [], loss=worker, total=4) for worker in range(2)]
        for client, loss in zip(clients, losses, strict=False):
            client.send(loss)
        await until(lambda: run.server.figures().bytes_in == before + len(losses[0]) + len(losses[1]))
        clients[2].leave()
        for client in clients[:2]:
            assert await client.read() == ("average", 0, [], 0.5)


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
async def test_a_server_that_hangs_up_waits_for_nobody():
    async with serving() as run:
        (client,) = await joined_v1(run, 1)  # which does not hang up itself
        run.server.stop("enough")
        run.server.hang_up()
        async with asyncio.timeout(CLOSE_SECONDS / 2):
            assert (await run.server.finished()).reason == "enough"
        client.abort()


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


@on_uvloop
async def test_a_step_over_tls():
    authority = trustme.CA()
    server_side, worker_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server_side)
    authority.configure_trust(worker_side)
    async with serving(tls=server_side, token=TOKEN, steps=1) as run:
        clients = await joined_v2(run, tls=worker_side, token=TOKEN)
        values = numpy.arange(900_000, dtype=numpy.float32)
        for client, given in zip(clients, await assignments(clients), strict=True):
            client.send_gradient(given, [values])
        for client in clients:
            numpy.testing.assert_array_equal((await client.tensors()).arrays[0], values)
            await client.expect(Leave)
        await run.end()


@on_uvloop
async def test_a_server_that_is_cancelled_ends_in_order():
    started = asyncio.Event()
    addresses = []

    async def serve():
        async with GradientServer(GradientServerSettings(workers=1, samples=1, port=0)) as server:
            addresses.append(server.address)
            started.set()
            await server.finished()

    task = asyncio.create_task(serve())
    await started.wait()
    client = await ClientV2.join(addresses[0])
    await client.expect(Assignment)
    task.cancel()
    assert (await client.expect(Leave)).reason == "it was stopped"
    with pytest.raises(asyncio.CancelledError):
        await task


@on_uvloop
async def test_a_bug_in_who_is_told_of_steps_ends_the_run_and_says_so():
    def fail(record):
        raise ZeroDivisionError("ours")

    async with GradientServer(GradientServerSettings(workers=1, samples=1, port=0), fail) as server:
        client = await ClientV2.join(server.address)
        client.send_gradient(await client.expect(Assignment), [floats(1)])
        await client.skip_to(Refused)
        with pytest.raises(Parallel3DError, match=r"has a bug: ZeroDivisionError\('ours'\)"):
            await server.finished()
