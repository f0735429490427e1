"""A state on its way from one worker to others, and what waits to be sent to each: no sink holds up others for ever."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from runtime.gradient_server.senders import Outbox
from runtime.gradient_server.state_relay import StateRelay
from runtime.gradient_server.wire.frames import VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.link import LinkLost
from runtime.gradient_server.wire.messages import Kind, StateDone, make_chunk
from tests.support.gradient_clients import SECONDS
from tests.support.gradient_runs import on_uvloop

DATA = memoryview(bytes(16))
CHUNK = make_chunk(DATA, count=4, kind=Kind.STATE, step=0, attempt=1, part=0, offset=0)


class Sink:
    """A link that takes nothing more until it is told to, or is lost."""

    def __init__(self) -> None:
        self.has_room, self.is_lost = asyncio.Event(), False
        self.num_written = 0

    def write(self, *parts: object) -> None:
        self.num_written += 1

    async def drain(self) -> None:
        await self.has_room.wait()
        if self.is_lost:
            raise LinkLost("it hung up")

    def lose(self) -> None:
        self.is_lost = True
        self.has_room.set()


class Source:
    def __init__(self) -> None:
        self.is_read = asyncio.Event()
        self.is_read.set()

    def pause(self) -> None:
        self.is_read.clear()

    def resume(self) -> None:
        self.is_read.set()


class Run:
    def __init__(self) -> None:
        self.links, self.source = [Sink(), Sink()], Source()
        self.outboxes = [Outbox(link) for link in self.links]
        self.tasks = [asyncio.create_task(outbox.run()) for outbox in self.outboxes]
        self.relay = StateRelay(0, 1, self.source, dict(enumerate(self.outboxes)))

    def send_chunk(self) -> None:
        for item in (VectorBegins(CHUNK, 4, 16, 4), VectorPiece(0, DATA), VectorEnds(CHUNK)):
            self.relay.take(item, lambda request: None)


@asynccontextmanager
async def relaying():
    async with asyncio.timeout(SECONDS):
        run = Run()
        yield run
        for task in run.tasks:
            task.cancel()
        await asyncio.gather(*run.tasks, return_exceptions=True)


@on_uvloop
async def test_the_source_is_read_again_when_all_have_taken_the_chunk():
    async with relaying() as run:
        run.send_chunk()
        assert not run.source.is_read.is_set()
        for link in run.links:
            link.has_room.set()
        await run.source.is_read.wait()
        assert [link.num_written for link in run.links] == [1, 1]


@on_uvloop
async def test_a_sink_that_is_lost_while_bytes_for_it_wait_holds_up_nobody():
    async with relaying() as run:
        run.links[1].has_room.set()
        run.send_chunk()
        run.links[0].lose()  # the server is not told of it before what was written has gone, or could not
        await run.source.is_read.wait()
        run.send_chunk()
        await run.source.is_read.wait()
        assert run.links[1].num_written == 2


@on_uvloop
async def test_a_sink_that_is_dismissed_is_not_waited_for():
    async with relaying() as run:
        run.links[1].has_room.set()
        run.send_chunk()
        await run.outboxes[1].emptied()
        assert run.relay.held_up_by == (0,)
        run.relay.without(0)
        await run.source.is_read.wait()


@on_uvloop
async def test_the_last_sink_goes():
    async with relaying() as run:
        run.send_chunk()
        for worker in (0, 1):
            run.relay.without(worker)
        await run.source.is_read.wait()
        run.relay.take(StateDone(0, 1), lambda request: None)
        assert run.source.is_read.is_set()
