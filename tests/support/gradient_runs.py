"""A gradient server in this process and its raw workers, for tests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import wraps

import pytest

from runtime.gradient_server.server import GradientServer, GradientServerSettings
from runtime.gradient_server.wire.messages import (
    Assignment,
    StateWanted,
)
from runtime.loop import run_on_uvloop
from tests.support.gradient_clients import (
    SECONDS,
    ClientV1,
    ClientV2,
    floats,
    hang_up,
)

TOKEN = b"a token of sixteen bytes"


def on_uvloop(test):
    """Run an async test on uvloop, as in production, with a deadline."""

    @wraps(test)
    def run(*args, **keywords):
        run_on_uvloop(asyncio.wait_for(test(*args, **keywords), 3 * SECONDS))

    return run


async def until(is_so):
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.001)


class Run:
    """A server and its step records."""

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


async def assigned_v1(run, count=2):
    """All have joined and got their shares."""
    clients = await joined_v1(run, count)
    for client in clients:
        assert (await client.read())[:2] == ("assignment", 0)
    return clients


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
