"""A stage that dies in the middle of a step is named to the others, soon; a step that is cancelled ends everywhere."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

import parallel3d
from runtime.errors import CommunicationError, PeerLost
from tests.support.pipelines import make_executor, run_step
from tests.support.ranks import Ranks, Tell, torch_variables

pytestmark = pytest.mark.slow
RANKS, VICTIM, PROMISE = 4, 2, 1.0


async def lose_a_stage(tell: Tell, schedule: str, when: int) -> None:
    async with parallel3d.mesh(pp=RANKS, threads=1) as mesh:
        executor = make_executor(mesh, schedule, 2 * RANKS)
        await run_step(executor)
        (stage, *_) = executor.stages.values()
        if mesh.rank == VICTIM:
            forward, count = stage.forward, 0

            def dying(*args):
                nonlocal count
                count += 1
                if count == when:
                    tell(time.monotonic())
                    os.kill(os.getpid(), signal.SIGKILL)
                return forward(*args)

            stage.forward = dying
        try:
            await run_step(executor)
        except CommunicationError as error:
            tell((error, time.monotonic()))


@pytest.mark.parametrize(
    ("schedule", "when"),
    [
        ("1f1b", 4),
        pytest.param("gpipe", 1, marks=pytest.mark.exhaustive),
        pytest.param("zero-bubble", 8, marks=pytest.mark.exhaustive),
        pytest.param("interleaved", 6, marks=pytest.mark.exhaustive),
    ],
)
def test_a_stage_is_killed(schedule, when):
    with Ranks(lose_a_stage, torch_variables(RANKS), (schedule, when)) as ranks:
        killed = ranks[VICTIM].hear()
        assert isinstance(killed, float), killed
        for number, rank in enumerate(ranks):
            if number == VICTIM:
                continue
            error, moment = rank.hear()
            assert isinstance(error, PeerLost), error
            assert error.rank == VICTIM
            assert moment - killed < PROMISE
        assert [rank.finish() for rank in ranks] == [0, 0, -signal.SIGKILL, 0]


async def cancel_a_step(tell: Tell) -> None:
    async with parallel3d.mesh(pp=2, threads=1) as mesh:
        executor = make_executor(mesh, "1f1b", 4)
        await run_step(executor)
        if mesh.rank == 0:
            step = asyncio.ensure_future(run_step(executor))
            await asyncio.sleep(0)  # it has begun
            step.cancel()
            try:
                await step
            except asyncio.CancelledError:
                tell("cancelled")
            return
        try:
            await run_step(executor)
            await mesh.pp.barrier()
        except CommunicationError as error:
            tell(type(error).__name__)


def test_a_cancelled_step_ends_on_every_rank():
    with Ranks(cancel_a_step, torch_variables(2)) as ranks:
        assert ranks[0].hear() == "cancelled"
        assert ranks[1].hear() in ("GroupClosed", "PeerLost")
        assert [rank.finish() for rank in ranks] == [0, 0]
