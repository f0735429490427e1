"""Frames that hypothesis makes up: to a reader in any state, and to a server before and after joins."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.gradient_server.wire.frames import FrameReader, Side
from runtime.gradient_server.wire.messages import WireError
from tests.support.bad_frames import drawn
from tests.support.gradient_clients import ClientV1, ClientV2, gradient_v1
from tests.support.gradient_runs import joined_v1, joined_v2, on_uvloop, one_step, serving

AT_ONCE = 25


@pytest.mark.parametrize(
    "number", [2_000, pytest.param(100_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])]
)
def test_a_reader_raises_nothing_but_refusals(number):
    counted: Counter[str] = Counter()

    @settings(max_examples=number, deadline=None, database=None)
    @given(drawn(), st.sampled_from(Side), st.sampled_from([None, 1, 2]), st.integers(0, 400))
    def feed(data, side, version, cut):
        reader = FrameReader(side)
        if version is not None:
            reader.joined(version)
        try:
            for part in (data[:cut], data[cut:]):
                list(reader.feed(part))
        except WireError as error:
            counted[str(error.reason)] += 1

    feed()
    assert len(counted) >= 8  # the rarest kinds do not come every time


async def say_before_join(run, number, data):
    client = await ClientV1.connect(run.address)
    await say_v1(client, data)


async def say_after_join_v1(run, number, data):
    await say_v1(await ClientV1.join(run.address), data)


async def say_v1(client, data):
    with suppress(ConnectionError):
        client.send(data)
        client.writer.write_eof()
        await client.reader.read()  # until the server hangs up
    client.abort()


async def say_after_join_v2(run, number, data):
    client = await ClientV2.join(run.address, f"stranger-{number}")
    client.link.write(data)
    client.link.close()
    await client.gone()


async def step_v1(run):
    for client in await joined_v1(run):
        assert (await client.read())[0] == "assignment"
        client.send(gradient_v1(0, client.worker, [1.0], total=4))


async def step_v2(run):
    await one_step(await joined_v2(run))


@pytest.mark.parametrize(
    ("say", "step"), [(say_before_join, step_v2), (say_after_join_v1, step_v1), (say_after_join_v2, step_v2)]
)
@settings(max_examples=8, deadline=None, database=None)
@given(frames=st.lists(drawn(), min_size=AT_ONCE, max_size=AT_ONCE))
@on_uvloop
async def test_a_server_lives_on_and_its_run_begins(say, step, frames):
    async with serving(steps=1) as run:
        for number, data in enumerate(frames):
            await say(run, number, data)
        assert not run.server.is_ending
        await step(run)
