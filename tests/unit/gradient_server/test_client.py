"""The worker's client beside a server that a test plays: joins, shares, averages, states, broken connections."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy
import pytest

from runtime.errors import InvalidCall, Mismatch, PeerLost
from runtime.gradient_server.client.protocol import Average, ServerRefused, Share, ShareChanged
from runtime.gradient_server.client.raw_parts import RawPart, room_for
from runtime.gradient_server.client.worker import GradientClient
from runtime.gradient_server.wire.messages import (
    Again,
    Assignment,
    AverageDone,
    Beat,
    Codec,
    Dtype,
    Kind,
    Leave,
    Part,
    Reason,
    Refused,
    StateDone,
    StateWanted,
    Table,
)
from tests.support.scripted_server import ScriptedLink, ScriptedServer

TOKEN = b"a token of the run"
TOTAL = 10


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with asyncio.timeout(30), ScriptedServer(TOKEN) as server:
        yield server


@asynccontextmanager
async def joined(server: ScriptedServer, **options) -> AsyncIterator[tuple[GradientClient, ScriptedLink]]:
    async with GradientClient(server.address, token=TOKEN, **options) as client:
        yield client, await server.next_join()


def part(values) -> RawPart:
    return RawPart(Dtype.FLOAT32, memoryview(numpy.array(values, numpy.float32)).cast("B"))


def values(part: RawPart) -> list[float]:
    return numpy.frombuffer(part.data, numpy.float32).tolist()


def assign(link: ScriptedLink, step: int = 0, attempt: int = 0, start: int = 0, end: int = 4) -> None:
    link.send(Assignment(step, attempt, start, end, TOTAL))


def average(link: ScriptedLink, step: int, attempt: int, *parts) -> None:
    link.send_parts(Kind.AVERAGE, step, attempt, [numpy.array(each, numpy.float32) for each in parts])
    link.send(AverageDone(step, attempt, 0.5, 3, TOTAL, 0.25))


async def until_heard(client: GradientClient, link: ScriptedLink, step: int) -> None:
    """All that was said so far."""
    link.send(StateWanted(step, 99))
    while client._protocol.wanted_state is None:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def waiting_for_average(
    client: GradientClient, link: ScriptedLink, home: RawPart | None = None
) -> asyncio.Task[Average]:
    """The first step's share is given, and its gradient of ones has come: what the worker does then."""
    home = part([0]) if home is None else home
    assign(link)
    await client.next_share()
    averaging = asyncio.create_task(client.average([part([1] * len(values(home)))], [home]))
    await link.gradient()
    return averaging


async def sent(link: ScriptedLink) -> list[list[float]]:
    return [each.tolist() for each in (await link.gradient()).parts]


# Joining.


async def test_a_worker_says_who_it_is_and_what_it_has(server):
    async with joined(server, node_id="me", step=7, has_state=True) as (client, link):
        assert (link.hello.node_id, link.hello.step, link.hello.has_state) == ("me", 7, True)
        assert client.worker_id == 0
        async with joined(server) as (other, link):
            assert (other.worker_id, link.hello.step, link.hello.has_state) == (1, 0, False)
            assert other.node_id != client.node_id
        assert (await link.expect(Leave)).reason == "it has done its part"


async def test_a_wrong_token_is_told_at_once(server):
    with pytest.raises(ServerRefused, match="bad_token: the token is another one"):
        await GradientClient(server.address, token="another one of them").__aenter__()


async def test_a_server_that_does_not_know_the_token_is_not_trusted(server, monkeypatch):
    monkeypatch.setattr(
        "runtime.gradient_server.wire.auth.hmac.compare_digest", lambda given, expected: given == expected
    )
    monkeypatch.setattr(
        "tests.support.scripted_server.ServerHandshake.check", lambda self, proof: (self._hello, b"?" * 32)
    )
    with pytest.raises(PeerLost, match="is not the right one: bad_token"):
        await GradientClient(server.address, token=TOKEN).__aenter__()


async def test_nobody_is_waited_for_longer_than_asked(unused_address):
    with pytest.raises(PeerLost, match=f"the gradient server at {unused_address} was not there for 0.2 s: .*reached"):
        await GradientClient(unused_address, give_up_seconds=0.2).__aenter__()


@pytest.fixture
def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


async def test_a_worker_may_come_before_its_server(unused_address, monkeypatch):
    client = GradientClient(unused_address, token=TOKEN)
    entering = asyncio.create_task(client.__aenter__())
    await asyncio.sleep(0)
    async with asyncio.timeout(30), ScriptedServer(TOKEN, port=int(unused_address.split(":")[1])) as server:
        await server.next_join()
        await entering
        await client.__aexit__(None, None, None)


@pytest.mark.parametrize(("reason", "is_final"), [(Reason.VERSION_REFUSED, True), (Reason.ALREADY_JOINED, False)])
async def test_what_may_pass_is_tried_again(server, reason, is_final):
    server.refusal = Refused(reason, "so it is")
    expected, words = (ServerRefused, f"{reason}: .*: so it is") if is_final else (PeerLost, "so it is")
    with pytest.raises(expected, match=words):
        await GradientClient(server.address, token=TOKEN, give_up_seconds=0.2).__aenter__()
    assert len(server._links) == 1 if is_final else len(server._links) > 1


@pytest.mark.parametrize("address", ["", ":9000", "host:port", "host:70000"])
def test_an_address_that_is_none(address):
    with pytest.raises(InvalidCall, match="is no address"):
        GradientClient(address)


# Steps.


async def test_a_step(server):
    async with joined(server) as (client, link):
        assign(link, step=0, attempt=3)
        share = await client.next_share()
        assert (share, len(share)) == (Share(0, 3, 0, 4, TOTAL), 4)
        mine, home = [part([1, 2]), part(range(100))], [part([0, 0]), part([0] * 100)]
        averaging = asyncio.create_task(client.average(mine, home, loss=0.25, correct=2))
        gradient = await link.gradient()
        assert [(each.dtype, each.count) for each in gradient.table.parts] == [(0, 2), (0, 100)]
        assert [each.tolist() for each in gradient.parts] == [[1, 2], list(range(100))]
        assert (gradient.done.step, gradient.done.attempt, gradient.done.loss) == (0, 3, 0.25)
        assert (gradient.done.correct, gradient.done.total) == (2, 4)
        average(link, 0, 3, [5, 6], range(100, 200))
        assert await averaging == Average(0, 0.5, 3, TOTAL, 0.25)
        assert [values(each) for each in home] == [[5, 6], list(range(100, 200))]
        assert client.step == 1


async def test_an_average_is_whole_or_nothing(server):
    """What has come of one that was never finished does not mix with the next."""
    async with joined(server) as (client, link):
        averaging = await waiting_for_average(client, link, home := part([0] * 40))
        link.send_parts(Kind.AVERAGE, 0, 0, [numpy.full(40, 9, numpy.float32)], num_chunks=2)
        link.send(Again(0, 1, "somebody was lost"))
        assert (await link.gradient()).done.attempt == 1
        assert not averaging.done()
        average(link, 0, 1, [2] * 40)
        await averaging
        assert values(home) == [2] * 40


async def test_parts_of_an_attempt_that_is_over_are_passed_over(server):
    async with joined(server) as (client, link):
        averaging = await waiting_for_average(client, link, home := part([0]))
        link.send(Again(0, 1, "somebody was lost"))
        average(link, 0, 0, [9])
        await link.gradient()
        average(link, 0, 1, [3])
        assert (await averaging).step == 0
        assert values(home) == [3]


async def test_compressed_chunks():
    async with asyncio.timeout(30), ScriptedServer(TOKEN, codec=Codec.ZLIB) as server, joined(server) as (client, link):
        assign(link)
        await client.next_share()
        averaging = asyncio.create_task(client.average([part([7] * 500)], [part([0] * 500)]))
        assert await sent(link) == [[7] * 500]
        average(link, 0, 0, [7] * 500)
        await averaging


async def test_a_gradient_is_sent_part_by_part_while_it_is_made(server):
    async with joined(server) as (client, link):
        assign(link)
        await client.next_share()
        parts, homes = [part([1]), part([2])], [part([0]), part([0])]
        outgoing = client.begin(parts, homes)
        assert (await link.expect(Table)).parts[1].count == 1
        outgoing.advance(1)
        assert numpy.frombuffer(await link.expect(bytes), numpy.float32).tolist() == [1]
        averaging = asyncio.create_task(client.average(parts, homes))
        assert numpy.frombuffer(await link.expect(bytes), numpy.float32).tolist() == [2]
        average(link, 0, 0, [5], [6])
        await averaging


async def test_other_shares_of_the_same_step(server):
    async with joined(server) as (client, link):
        assign(link, end=4)
        shares = client.shares()
        assert (await anext(shares)).end == 4
        averaging = asyncio.create_task(client.average([part([1])], [part([0])]))
        await link.gradient()
        assign(link, attempt=1, end=TOTAL)
        with pytest.raises(ShareChanged, match="ask for the next share"):
            await averaging
        assert await anext(shares) == Share(0, 1, 0, TOTAL, TOTAL)
        averaging = asyncio.create_task(client.average([part([2])], [part([0])]))
        assert await sent(link) == [[2]]
        average(link, 0, 1, [2])
        await averaging


async def test_a_share_that_changes_while_it_is_computed(server):
    async with joined(server) as (client, link):
        assign(link, end=4)
        await client.next_share()
        assign(link, attempt=1, end=5)
        await until_heard(client, link, 0)
        with pytest.raises(ShareChanged):
            await client.average([part([1])], [part([0])])


async def test_the_server_ends(server):
    async with joined(server) as (client, link):
        assign(link)
        shares = client.shares()
        await anext(shares)
        averaging = asyncio.create_task(client.average([part([1])], [part([0])]))
        await link.gradient()
        link.send(Leave("all steps are made"))
        with pytest.raises(ShareChanged):
            await averaging
        assert [share async for share in shares] == []
        assert client.ended_because == "all steps are made"


async def test_a_share_and_the_end_at_once(server):
    async with joined(server) as (client, link):
        link.send(Assignment(0, 0, 0, 4, TOTAL), Leave("it was told to"))
        assert await client.next_share() is None


async def test_what_the_server_refuses_is_raised_wherever_the_worker_is(server):
    async with joined(server) as (client, link):
        link.send(Refused("not_finite", "worker 1, step 0, part 3"))
        with pytest.raises(ServerRefused, match="not_finite: NaN or infinite values: worker 1") as error:
            await client.next_share()
        assert error.value.reason == "not_finite"


async def test_a_step_that_the_worker_is_not_at(server):
    async with joined(server) as (client, link):
        assign(link, step=3)
        with pytest.raises(Mismatch, match="of step 3, but this worker is at step 0"):
            await client.next_share()


async def test_an_average_of_other_sizes_breaks_the_connection(server):
    async with joined(server) as (client, link):
        averaging = await waiting_for_average(client, link)
        average(link, 0, 0, [1, 2])
        link = await server.next_join()
        assign(link, attempt=1)
        assert await sent(link) == [[1]]
        average(link, 0, 1, [4])
        await averaging


async def test_calls_in_the_wrong_place(server):
    client = GradientClient(server.address, token=TOKEN)
    with pytest.raises(InvalidCall, match="inside of `async with`"):
        await client.next_share()
    async with client:
        link = await server.next_join()
        with pytest.raises(InvalidCall, match="ask for the next one first"):
            await client.average([part([1])], [part([0])])
        assign(link)
        await client.next_share()
        with pytest.raises(InvalidCall, match="the share of step 0 has no average yet"):
            await client.next_share()
        client.begin([part([1])], [part([0])])
        with pytest.raises(InvalidCall, match="being sent already"):
            client.begin([part([1])], [part([0])])
        with pytest.raises(InvalidCall, match="entered once"):
            await client.__aenter__()


# Connections that break.


async def test_a_gradient_is_kept_and_sent_again_on_the_next_connection(server):
    async with joined(server) as (client, link):
        averaging = await waiting_for_average(client, link, home := part([0]))
        link.cut()
        link = await server.next_join()
        assert (link.hello.step, link.hello.has_state, link.hello.node_id) == (0, True, client.node_id)
        assign(link, attempt=1)
        assert await sent(link) == [[1]]
        average(link, 0, 1, [3])
        await averaging
        assert (values(home), client.num_joins) == ([3], 2)


async def test_a_server_that_tells_all_at_once(server):
    async with joined(server) as (client, link):
        averaging = await waiting_for_average(client, link)
        server.with_welcome = [Assignment(0, 1, 0, 4, TOTAL)]
        link.cut()
        link = await server.next_join()
        assert await sent(link) == [[1]]
        average(link, 0, 1, [3])
        await averaging


async def test_an_average_that_has_come_counts_as_applied(server):
    """Also when the connection breaks before the caller asks for the next share."""
    async with joined(server) as (client, link):
        averaging = await waiting_for_average(client, link)
        average(link, 0, 0, [3])
        await averaging
        link.cut()
        link = await server.next_join()
        assert link.hello.step == 1
        assign(link, step=1)
        assert (await client.next_share()).step == 1


async def test_half_an_average_does_not_count(server):
    async with joined(server) as (client, link):
        averaging = await waiting_for_average(client, link, home := part([0] * 40))
        link.send_parts(Kind.AVERAGE, 0, 0, [numpy.full(40, 9, numpy.float32)], num_chunks=1)
        await until_heard(client, link, 0)
        link.cut()
        link = await server.next_join()
        assert link.hello.step == 0
        assign(link, attempt=1)
        await link.gradient()
        average(link, 0, 1, [2] * 40)
        await averaging
        assert values(home) == [2] * 40


async def test_other_shares_after_a_restart(server):
    async with joined(server) as (client, link):
        averaging = await waiting_for_average(client, link)
        link.cut()
        link = await server.next_join()
        assign(link, start=4, end=8)
        with pytest.raises(ShareChanged):
            await averaging
        assert (await client.next_share()).start == 4


async def test_a_server_that_is_silent_is_lost():
    silent = ScriptedServer(TOKEN, beat_ms=20, timeout_ms=100)
    async with asyncio.timeout(30), silent as server, joined(server) as (_, link):
        await link.expect(Beat)
        await link.is_lost.wait()
        await server.next_join()


async def test_a_caller_that_keeps_the_loop_busy_does_not_lose_its_server():
    impatient = ScriptedServer(TOKEN, beat_ms=100, timeout_ms=200)
    async with asyncio.timeout(30), impatient as server, joined(server) as (client, link):
        time.sleep(0.5)  # noqa: ASYNC251 - the caller computes
        link.send(Beat(0))
        for _ in range(3):
            await link.expect(Beat)
            link.send(Beat(0))
        assert client.num_joins == 1


async def test_a_server_that_never_comes_back(server):
    async with joined(server, give_up_seconds=0.2) as (client, link):
        server._server.close()
        link.cut()
        with pytest.raises(PeerLost, match=r"was not there for 0\.2 s"):
            await client.next_share()


async def test_a_server_that_is_lost_right_after_each_join(server):
    async def cut_all() -> None:
        while True:
            (await server.next_join()).cut()

    async with joined(server, give_up_seconds=0.5) as (client, link):
        link.cut()
        cutting = asyncio.create_task(cut_all())
        with pytest.raises(PeerLost, match=r"was not there for 0\.5 s"):
            async with asyncio.timeout(10):
                await client.next_share()
        cutting.cancel()
        assert len(server.joined) < 10


async def test_after_an_average_nobody_waits(server, monkeypatch):
    waits = []
    monkeypatch.setattr(
        "runtime.gradient_server.client.worker.random.uniform", lambda least, most: waits.append(most) or 0.0
    )
    async with joined(server) as (client, link):
        averaging = await waiting_for_average(client, link)
        average(link, 0, 0, [3])
        await averaging
        link.cut()
        link = await server.next_join()
        assert waits == []
        link.cut()
        await server.next_join()
        assert len(waits) == 1


# States.


class Kept:
    def __init__(self, *numbers: float) -> None:
        self.numbers, self.loaded_for = list(numbers), None

    def save(self):
        return [part(self.numbers)]

    def load(self, step, parts):
        self.numbers, self.loaded_for = values(parts[0]), step


async def test_a_state_is_given_between_two_steps(server):
    keeper = Kept(1, 2)
    async with joined(server, keeper=keeper) as (client, link):
        link.send(StateWanted(0, 5))
        assign(link)
        assert (await client.next_share()).step == 0
        table, parts, done = await link.state()
        assert (table.step, table.attempt, done) == (0, 5, StateDone(0, 5))
        assert [each.tolist() for each in parts] == [[1, 2]]
        averaging = asyncio.create_task(client.average([part([1])], [part([0])]))
        await link.gradient()
        average(link, 0, 0, [1])
        link.send(StateWanted(1, 6))
        await averaging
        keeper.numbers = [3, 4]  # the step is applied
        assign(link, step=1)
        await client.next_share()
        assert [each.tolist() for each in (await link.state())[1]] == [[3, 4]]


async def test_a_state_is_given_while_an_average_is_waited_for(server):
    """After a restart of the server, one that is behind may need it before anybody goes on."""
    async with joined(server, keeper=Kept(1, 2)) as (client, link):
        averaging = await waiting_for_average(client, link)
        link.cut()
        link = await server.next_join()
        link.send(StateWanted(0, 1))
        assert [each.tolist() for each in (await link.state())[1]] == [[1, 2]]
        assign(link, attempt=1)
        assert await sent(link) == [[1]]
        average(link, 0, 1, [3])
        await averaging


async def test_a_state_is_taken_before_the_next_share(server):
    keeper = Kept(1, 2)
    async with joined(server, keeper=keeper) as (client, link):
        link.send_parts(Kind.STATE, 12, 1, [numpy.array([8, 9], numpy.float32)])
        link.send(StateDone(12, 1))
        assign(link, step=12)
        assert (await client.next_share()).step == 12
        assert (keeper.numbers, keeper.loaded_for, client.step) == ([8, 9], 12, 12)


async def test_half_a_state_changes_nothing(server):
    keeper = Kept(1, 2)
    async with joined(server, keeper=keeper, step=3, has_state=True) as (client, link):
        link.send_parts(Kind.STATE, 12, 1, [numpy.zeros(40, numpy.float32)], num_chunks=2)
        await until_heard(client, link, 3)
        link.cut()
        link = await server.next_join()
        assert (link.hello.step, link.hello.has_state) == (3, True)
        assign(link, step=3)
        await client.next_share()
        assert keeper.numbers == [1, 2]


async def test_a_worker_that_was_left_behind_takes_a_state_instead_of_its_average(server):
    keeper = Kept(1, 2)
    async with joined(server, keeper=keeper) as (client, link):
        averaging = await waiting_for_average(client, link)
        link.cut()
        link = await server.next_join()
        link.send_parts(Kind.STATE, 1, 1, [numpy.array([8, 9], numpy.float32)])
        link.send(StateDone(1, 1))
        with pytest.raises(ShareChanged):
            await averaging
        assign(link, step=1)
        assert (await client.next_share()).step == 1
        assert keeper.numbers == [8, 9]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_room_for_a_state_takes_no_memory_before_it_comes():
    before = resident_bytes()
    rooms = room_for(Table(Kind.STATE, 0, 1, (Part(Dtype.FLOAT64, 2**25), Part(Dtype.FLOAT32, 0))))
    assert [room.data.nbytes for room in rooms] == [2**28, 0]
    assert resident_bytes() - before < 2**26


@pytest.mark.parametrize("count", [2**60, 2**64 - 1])
async def test_a_state_that_there_is_no_room_for(server, count):
    async with joined(server, keeper=Kept(1)) as (client, link):
        link.send(Table(Kind.STATE, 0, 1, (Part(Dtype.FLOAT64, count),)))
        await server.next_join()
        assert client.keeper.numbers == [1]


async def test_a_state_without_a_place_for_it(server):
    async with joined(server) as (client, link):
        link.send_parts(Kind.STATE, 1, 1, [numpy.array([8, 9], numpy.float32)])
        link.send(StateDone(1, 1))
        with pytest.raises(Mismatch, match="attach the model first"):
            await client.next_share()
