"""Workers of a gradient server that go, are lost, come back and come late; and a server that is started anew."""

from __future__ import annotations

import asyncio
import math
import struct

import numpy
import pytest

from runtime.errors import DeadlineExceeded, PeerLost
from runtime.gradient_server.wire.chunks import make_chunk
from runtime.gradient_server.wire.link import LinkLost
from runtime.gradient_server.wire.messages import (
    Again,
    Assignment,
    GradientDone,
    Kind,
    Leave,
    StateWanted,
    Table,
    encode,
)
from tests.support.gradient_clients import (
    ClientV1,
    ClientV2,
    block_v1,
    floats,
    frame,
    gradient_v1,
    text,
)
from tests.support.gradient_runs import (
    assigned_v1,
    assignments,
    joined_v2,
    on_uvloop,
    one_step,
    serving,
    until,
)

# Version 1: who goes.


@on_uvloop
async def test_a_worker_of_version_1_that_is_lost_in_a_frame_halts_the_run():
    async with serving() as run:
        clients = await assigned_v1(run)
        clients[0].send(gradient_v1(0, 0, [1, 2], total=4))
        clients[1].send(gradient_v1(0, 1, [1, 2], total=4)[:-10])
        await clients[1].writer.drain()
        await clients[1].close()
        assert await clients[0].read() == ("shutdown",)
        message = await run.failure(PeerLost)
        assert message.startswith("worker 1 (old-1) was lost at step 0: 127.0.0.1:")
        assert message.endswith("it hung up within a message.")


@on_uvloop
async def test_a_worker_of_version_1_that_leaves_in_order():
    async with serving(samples=9, workers=3) as run:
        clients = await assigned_v1(run, 3)
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
        clients = await assigned_v1(run)
        clients[1].send(block_v1(0, 1, 1, 2, [1.0]))
        clients[1].leave()
        assert await clients[0].read() == ("shutdown",)
        assert await run.failure(PeerLost) == "worker 1 (old-1) left at step 0, while sending its gradient"


@on_uvloop
async def test_nobody_of_version_1_joins_late():
    async with serving(workers=1) as run:
        await ClientV1.join(run.address)
        late = await ClientV1.connect(run.address)
        late.send(frame(1, text("late"), struct.pack("<I", 1), text("cpu")))
        assert await late.read() == ("shutdown",)
        assert run.refused() == {"version_refused": 1}


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
