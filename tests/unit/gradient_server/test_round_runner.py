"""What is decided is carried out: also where a later decision from the same event has ended the run."""

from __future__ import annotations

from monitoring.prometheus.gradient_server_metrics import GradientServerTotals
from runtime.errors import Mismatch
from runtime.gradient_server.events import Average, Finish, StopAsked
from runtime.gradient_server.round_runner import RoundRunner
from runtime.gradient_server.settings import GradientServerSettings
from runtime.gradient_server.step_sum import block
from tests.support.gradient_clients import block_v1
from tests.support.gradient_runs import assigned_v1, on_uvloop, serving


def test_an_average_of_a_run_that_has_ended_is_sent_to_nobody():
    told: list[Finish] = []
    settings = GradientServerSettings(workers=2, samples=8)
    runner = RoundRunner(settings, GradientServerTotals(), lambda record: None, told.append)
    decided = [Finish("over"), Average((block(0),), has_losses=True)]
    runner.rounds.handle = lambda event, now: decided
    runner.handle(StopAsked("over"))
    assert told == [decided[0]], "one end, and no bug"


@on_uvloop
async def test_one_that_is_too_slow_completes_a_block_and_another_ends_the_run():
    """Without worker 0, who has sent nothing, the first block is complete; but worker 1 is late with its second."""
    async with serving(workers=3, samples=9, policy="go on", step_seconds=0.2) as run:
        clients = await assigned_v1(run, 3)
        for client in clients[1:]:
            client.send(block_v1(0, client.worker, 0, 2, [1.0]))
        for client in clients:
            assert await client.read() == ("shutdown",), "and no average before it"
        assert (await run.failure(Mismatch)).startswith("worker 1 (old-1) at step 0: too_slow")
        assert run.refused() == {"too_slow": 2}
