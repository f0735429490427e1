"""A rank's column is carried out as the table says, with ranks that are tasks of this process."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import threading
import time
from functools import partial, partialmethod

import pytest
import torch
from torch import nn

import parallel3d
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.schedules.actions import Action, Kind, parse_actions
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.schedules.gpipe import gpipe_of_stages
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation import ScheduleDeadlock
from parallel3d.pipeline.stage import Stage
from process_groups.pipes import CallPipe, Idle
from runtime.errors import CommunicationError, DeadlineExceeded, GroupClosed, InvalidCall, PeerLost
from tests.support.pipelines import (
    check_every_schedule,
    loss,
    make_executor,
    microbatch,
    one_process,
    run_step,
    stage_module,
)
from tests.support.processes import SECONDS

RECEIVE = CallPipe.receive


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_every_schedule_gives_what_one_process_does(size):
    await parallel3d.in_process(partial(check_every_schedule, size), ranks=size)


class Recorded:
    """Gradients that write down what they are told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.executor: Executor | None = None

    def begin(self) -> None:
        self.told.append("begin")

    @contextlib.contextmanager
    def last_backward(self, stage, *, split=False):
        self.told.append(("last weight part" if split else "last backward", stage))
        yield

    def stage_done(self, stage):
        assert all(each.grad is not None for each in self.executor.stages[stage].module.parameters())
        self.told.append(("done", stage))

    async def finish(self):
        self.told.append("finish")

    def cancel(self):
        self.told.append("cancel")


async def told_by(schedule: str, *, fails: bool = False) -> list[list[object]]:
    async def main() -> list[object]:
        async with parallel3d.mesh(pp=2) as mesh:
            gradients = Recorded()
            executor = gradients.executor = make_executor(mesh, schedule, 4, gradients=gradients)
            if fails and mesh.rank == 0:
                executor.stages[0].module.forward = None
            with contextlib.suppress(*([TypeError, CommunicationError] if fails else [])):
                await run_step(executor)
            return gradients.told

    return await parallel3d.in_process(main, ranks=2)


async def test_gradients_are_told_of_each_stages_last_backward():
    def done(stage):
        return [("last backward", stage), ("done", stage)]

    assert await told_by("interleaved") == [
        ["begin", *done(2), *done(0), "finish"],
        ["begin", *done(3), *done(1), "finish"],
    ]


async def test_gradients_are_told_of_the_last_weight_part():
    assert await told_by("zero-bubble") == [
        ["begin", ("last weight part", rank), ("done", rank), "finish"] for rank in (0, 1)
    ]


async def test_gradients_are_told_of_a_failed_step():
    assert await told_by("1f1b", fails=True) == [["begin", "cancel"], ["begin", "cancel"]]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
async def test_forward_and_backward_apart(schedule):
    async def main() -> None:
        async with parallel3d.mesh(pp=2) as mesh:
            whole = make_executor(mesh, schedule, 4)
            table = gpipe_of_stages(whole.table.rank_of_stage, 4)
            executor = Executor(mesh, table, whole.stages, loss)
            expected, model = one_process(table.stages, 4)
            begun = executor.begin(*zip(*map(microbatch, range(4)), strict=True))
            await executor.forward(begun)
            assert {each.action.kind for each in begun.timed} <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
            losses = torch.tensor([begun.loss], dtype=torch.float64)
            assert abs((await mesh.pp.all_reduce(losses)).item() - expected) < 1e-12
            await executor.finish(begun)
            for index, stage in executor.stages.items():
                for mine, theirs in zip(stage.module.parameters(), model[index].parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-13)

    await parallel3d.in_process(main, ranks=2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
async def test_forward_only(schedule):
    async def main() -> None:
        async with parallel3d.mesh(pp=2) as mesh:
            whole = make_executor(mesh, schedule, 4)
            executor = Executor(mesh, whole.table.forward_only(), whole.stages, loss)
            step = await run_step(executor)
            expected, _ = one_process(whole.table.stages, 4)
            assert abs(step.loss - expected) < 1e-12
            assert all(stage.peak_activations <= 1 for stage in executor.stages.values())
            assert all(each.grad is None for stage in executor.stages.values() for each in stage.module.parameters())

    await parallel3d.in_process(main, ranks=2)


async def test_a_stage_that_never_sends_is_named():
    is_named = asyncio.Event()

    async def main() -> None:
        async with parallel3d.mesh(pp=2, timeout=0.3) as mesh:
            executor = make_executor(mesh, "1f1b", 2)
            if mesh.rank == 0:
                await is_named.wait()
                return
            with pytest.raises(DeadlineExceeded) as caught:
                await run_step(executor)
            assert str(caught.value) == (
                "1RECV_F0 did not end within 0.3 s: rank 0 (dp=0 tp=0 pp=0) has not come to 0SEND_F0."
            )
            assert (caught.value.rank, caught.value.action) == (0, "1RECV_F0")
            is_named.set()

    await parallel3d.in_process(main, ranks=2)


def one(text: str) -> Action:
    return parse_actions(text)[0]


async def test_calls_that_cannot_be_right():
    async def main() -> None:
        async with parallel3d.mesh(pp=2) as mesh:
            table = build("1f1b", 4, 8)
            with pytest.raises(InvalidCall, match=r"^the table is for 4 ranks, but the mesh has pp = 2\.$"):
                Executor(mesh, table, {}, loss)
            table, me = build("1f1b", 2, 2), mesh.pp.rank
            with pytest.raises(
                InvalidCall, match=rf"^pipeline rank {me} has the stages \[{me}\], but modules for \[\] "
            ):
                Executor(mesh, table, {}, loss)
            columns = tuple(tuple(map(one, column.split())) for column in ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
            with pytest.raises(ScheduleDeadlock, match="rank 0: 0RECV_B0 waits for 1SEND_B0"):
                Executor(mesh, Table("mine", 2, 2, columns), {}, loss)
            executor = make_executor(mesh, "1f1b", 2)
            with pytest.raises(InvalidCall, match=r"^step: 1 inputs for 2 microbatches\.$"):
                await executor.step([torch.ones(1)], [torch.ones(1)] * 2)

    await parallel3d.in_process(main, ranks=2)


async def test_weights_of_microbatches():
    weights = [0.5, 0.125, 0.375]

    async def main() -> float:
        async with parallel3d.mesh(pp=2) as mesh:
            executor = make_executor(mesh, "gpipe", 3)
            inputs, targets = zip(*map(microbatch, range(3)), strict=True)
            return (await executor.step(inputs, targets, weights)).loss

    losses = await parallel3d.in_process(main, ranks=2)
    model = [stage_module(index, 2) for index in range(2)]
    parts = [loss(model[1](*model[0](tokens)), targets).item() for tokens, targets in map(microbatch, range(3))]
    expected = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    assert losses == [pytest.approx(expected, abs=1e-12)] * 2


def test_a_stage_gives_tensors():
    class Wrong(nn.Module):
        def forward(self, values):
            return {"values": values}

    stage = Stage(1, 3, Wrong())
    with pytest.raises(InvalidCall, match=r"^stage 1 gives dict; a stage gives a tensor or a tuple of tensors\.$"):
        stage.forward(0, [torch.ones(1)])


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_stage_may_begin_with_a_layer_that_writes_over_its_input(ranks):
    """Also where the stage before is on the same rank, which still needs what it gave."""
    inputs, targets = torch.randn(2, 4, 3).unbind(), torch.randn(2, 4, 2).unbind()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)))

    async def main() -> list[torch.Tensor]:
        async with parallel3d.mesh(pp=ranks) as mesh:
            table = gpipe_of_stages((0, ranks - 1), 2)
            copied = copy.deepcopy(model)
            stages = {index: Stage(index, 2, copied[index]) for index in table.stages_of_rank(mesh.rank)}
            await Executor(mesh, table, stages, nn.functional.mse_loss).step(inputs, targets)
            return [each.grad for stage in stages.values() for each in stage.module.parameters()]

    found = [each for rank in await parallel3d.in_process(main, ranks=ranks) for each in rank]
    for values, target in zip(inputs, targets, strict=True):
        (nn.functional.mse_loss(model(values), target) / 2).backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def receive(pipe: CallPipe, deadline: float, idle: Idle, *, has_time: bool) -> list[torch.Tensor | None]:
    """Nothing comes before there is nothing left to do, or all comes at once."""
    while has_time and not idle():
        pass
    return RECEIVE(pipe, deadline, lambda: math.inf)


@pytest.mark.parametrize("has_time", [True, False])
async def test_gradients_are_told_of_the_last_weight_part_where_all_of_it_is_to_come(monkeypatch, has_time):
    """They learn how much is added in it: it has to be the same in every step."""
    monkeypatch.setattr("parallel3d.pipeline.stage._SHORT", 1e9)
    monkeypatch.setattr(CallPipe, "receive", partialmethod(receive, has_time=has_time))

    async def main() -> list[object]:
        async with parallel3d.mesh(pp=4) as mesh:
            gradients = Recorded()
            executor = gradients.executor = make_executor(mesh, "zbv", 8, gradients=gradients)
            await run_step(executor)
            return [stage for told, stage in gradients.told[1:-1] if told == "last weight part"]

    # On rank 1 receives come between 6I7 and 6W7, on rank 2 between 5I7 and 5W7.
    expected = [[0, 7], [1], [2], [3, 4]] if has_time else [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [sorted(stages) for stages in await parallel3d.in_process(main, ranks=4)] == expected


@pytest.mark.parametrize("has_time", [True, False])
async def test_weight_parts_are_worked_off_while_nothing_comes(monkeypatch, has_time):
    """What a W finds to do is what there was no time for."""
    found: list[list[int]] = [[], []]

    async def main() -> None:
        async with parallel3d.mesh(pp=2) as mesh:
            executor = make_executor(mesh, "zero-bubble", 4)
            (stage,) = executor.stages.values()
            whole = stage.weight_backward

            def weight_backward(number: int) -> None:
                found[mesh.rank].append(len(stage._kept[number].jobs))
                whole(number)

            monkeypatch.setattr(stage, "weight_backward", weight_backward)
            monkeypatch.setattr("parallel3d.pipeline.stage._SHORT", 1e9)
            await run_step(executor)
            measured = await executor.measured((await run_step(executor)).timed)
            assert [sum(column) > 0 for column in measured.worked_off] == [False, has_time]

    monkeypatch.setattr(CallPipe, "receive", partialmethod(receive, has_time=has_time))
    await parallel3d.in_process(main, ranks=2)
    first, second = ([each[:4], each[4:]] for each in found)
    assert first == [[3, 3, 3, 3]] * 2, "on rank 0 every W follows its I; three weights a microbatch"
    # Rank 1 receives between I0 and W0, I1 and W1, I2 and W2, and then no more; at first it knows of no time.
    assert second[0][0] == 3
    assert second[1] == ([0, 0, 0, 3] if has_time else [3, 3, 3, 3])


@pytest.mark.parametrize("has_room", [True, False])
async def test_what_found_no_room_is_soon_tried_again(monkeypatch, has_room):
    """Its peer makes room without a word to whoever waits for something else."""
    monkeypatch.setattr(CallPipe, "push", lambda _: has_room)

    async def main() -> float:
        async with parallel3d.mesh(pp=2) as mesh:
            executor = make_executor(mesh, "gpipe", 2)
            return executor.begin(*zip(*map(microbatch, range(2)), strict=True))._meanwhile()

    assert await parallel3d.in_process(main, ranks=2) == [math.inf if has_room else 0.001] * 2


def test_what_takes_long_waits_for_its_turn():
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(2, 2), nn.Parameter(torch.ones(1))

        def forward(self, values):
            return self.linear(values)

    stage = Stage(0, 1, Slow(), splits_backward=True)
    for number in range(3):
        stage.forward(number, [torch.ones(1, 2)])
        stage.set_loss(number, stage._kept[number].outputs[0].sum())
        stage.input_backward(number, stage.loss_gradients(number, 1.0))
        if number:
            stage._forward_seconds, stage._job_seconds = 1.0, {0: 0.3 if number == 1 else 0.2}
        assert stage.work_off_one(number) == (number == 2)
        assert not stage.work_off_one(number)
        stage.weight_backward(number)
    assert stage.module.linear.weight.grad.tolist() == [[3.0, 3.0]] * 2


async def test_a_stage_that_fails_is_named_to_the_others():
    async def main() -> str:
        async with parallel3d.mesh(pp=2) as mesh:
            executor = make_executor(mesh, "1f1b", 4)
            if mesh.rank == 1:
                (stage,) = executor.stages.values()
                stage.module.forward = lambda *_: 1 / 0
            with pytest.raises(ZeroDivisionError if mesh.rank else PeerLost) as caught:
                await run_step(executor)
            with pytest.raises(GroupClosed, match=r"^step: an earlier step failed"):
                await run_step(executor)
            return str(caught.value)

    told = await parallel3d.in_process(main, ranks=2)
    assert told[0] == "rank 1 (dp=0 tp=0 pp=1) failed in the step with ZeroDivisionError: division by zero"


@pytest.mark.parametrize("is_cancelled_twice", [False, True])
async def test_a_cancelled_step_does_not_wait_for_ever_for_what_computes(is_cancelled_twice):
    async def main() -> None:
        async with parallel3d.mesh(pp=1, timeout=SECONDS if is_cancelled_twice else 0.05) as mesh:
            gradients, loop = Recorded(), asyncio.get_running_loop()
            executor = make_executor(mesh, "gpipe", 1, gradients=gradients)
            is_in_it, may_end = asyncio.Event(), threading.Event()

            def endless(_: torch.Tensor) -> None:
                loop.call_soon_threadsafe(is_in_it.set)
                may_end.wait(SECONDS)

            executor.stages[0].module.forward = endless
            step = asyncio.create_task(run_step(executor))
            await is_in_it.wait()
            step.cancel()
            if is_cancelled_twice:
                while not mesh.pp.has_failed:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                step.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await step
            assert gradients.told == ["begin", "cancel"]
            may_end.set()
            await mesh.compute(int)  # the engine comes to that when it has ended the step
            if not is_cancelled_twice:
                (note,) = caught.value.__notes__
                assert note.startswith("The engine thread still computes, 0.05 s after the step was given up: ")

    await parallel3d.in_process(main, ranks=1)


async def test_a_deadline_is_one_waits_not_the_steps():
    async def main() -> float:
        async with parallel3d.mesh(pp=2, timeout=0.5) as mesh:
            executor = make_executor(mesh, "gpipe", 6)
            (stage,) = executor.stages.values()
            forward = stage.module.forward

            def slow(*values):
                time.sleep(0.15)
                return forward(*values)

            stage.module.forward = slow
            return (await run_step(executor)).loss

    assert len(await parallel3d.in_process(main, ranks=2)) == 2


async def test_gradients_do_not_know_how_they_were_made():
    async def main() -> None:
        async with parallel3d.mesh(pp=2) as mesh:
            executor = make_executor(mesh, "zero-bubble", 4)
            await run_step(executor)
            for stage in executor.stages.values():
                assert not any(each.grad.requires_grad for each in stage.module.parameters())

    await parallel3d.in_process(main, ranks=2)
