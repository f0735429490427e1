"""The events of real steps, with ranks as tasks of one loop: every action once, and all of a step's time."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
import torch

import parallel3d
from monitoring.events.events import ACTIONS, COMPUTE, OPS, RECEIVES, SENDS, Axis, Event, What, unpack
from monitoring.events.time_parts import PARTS
from parallel3d.config import load_config
from parallel3d.training.coordinator import Coordinator
from parallel3d.training.step_events import Span, StepEvents, StepMoments
from runtime.errors import NonFiniteGradient
from tests.support.training import TWO_STAGES_A_RANK, settings, whole_batch

STEPS = 4


def part_of(coordinator: Coordinator, step: int) -> tuple[torch.Tensor, ...]:
    dp = coordinator.mesh.dp
    return tuple(each.chunk(dp.size)[dp.rank] for each in whole_batch(coordinator.config, step))


async def trained(coordinator: Coordinator) -> list[Event]:
    for step in range(STEPS):
        await coordinator.train_step(part_of(coordinator, step))
    assert coordinator.recorder is not None
    return list(unpack(coordinator.recorder.take().data))


async def on_mesh(given, main=trained):
    config = load_config(None, overrides=given)

    async def rank():
        async with Coordinator.from_config(config) as coordinator:
            return await main(coordinator), coordinator

    return await parallel3d.in_process(rank, ranks=config.world_size)


def of_step(events: list[Event], step: int) -> list[Event]:
    return [event for event in events if event.step == step]


MESHES = [
    ((1, 1, 1), "1f1b"),
    ((2, 1, 1), "1f1b"),
    ((1, 2, 1), "1f1b"),
    ((1, 1, 2), "zero-bubble"),
    ((1, 2, 2), "interleaved"),
    ((2, 1, 2), "gpipe"),
]


@pytest.mark.parametrize("at_once", [1, 5, 1024])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
async def test_every_action_leaves_one_event_and_steps_adjoin(mesh, schedule, at_once, monkeypatch):
    monkeypatch.setattr("parallel3d.pipeline.pipeline_pass._RECORD_BATCH", at_once)
    assert schedule in TWO_STAGES_A_RANK or schedule in ("1f1b", "zero-bubble", "gpipe")
    for events, coordinator in await on_mesh(settings(*mesh, schedule)):
        column = coordinator._executor.table.columns[coordinator.mesh.pp.rank]
        wholes = [event for event in events if event.what == What.STEP]
        assert [event.step for event in wholes] == list(range(STEPS))
        assert all(before.end == after.start for before, after in pairwise(wholes))
        for whole in wholes:
            mine = of_step(events, whole.step)
            actions = [event for event in mine if event.what in ACTIONS]
            assert [event.action for event in actions] == [str(action) for action in column]
            assert mine[-1] is whole or all(each.what == What.COLLECTIVE for each in mine[mine.index(whole) + 1 :])
            counts = Counter(event.what for event in mine)
            assert (counts[What.MEET], counts[What.OPTIMIZER]) == (1, 2)
            assert counts[What.REDUCE] == (2 if mesh[0] > 1 else 1)


@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
async def test_events_lie_in_their_step_and_do_not_overlap(mesh, schedule):
    for events, _ in await on_mesh(settings(*mesh, schedule)):
        for whole in (event for event in events if event.what == What.STEP):
            mine = [each for each in of_step(events, whole.step) if each.what not in (What.STEP, What.COLLECTIVE)]
            mine.sort(key=lambda event: (event.start, event.end))
            edges = [whole.start, *(moment for event in mine for moment in (event.start, event.end)), whole.end]
            assert edges == sorted(edges)
            assert all(0 <= event.waited <= event.seconds + 1e-6 for event in mine)


async def test_messages_have_their_bytes_and_computing_its_processor_time():
    first, second = await on_mesh(settings(1, 1, 2))
    sent, received = Counter(), Counter()
    for events, _ in (first, second):
        for event in events:
            sent[event.what] += event.num_bytes if event.what in SENDS else 0
            received[event.what] += event.num_bytes if event.what in RECEIVES else 0
            assert event.what not in COMPUTE or event.cpu > 0
            assert event.what in SENDS | RECEIVES | {What.COLLECTIVE} or event.num_bytes == 0
    # 4 microbatches of 2 samples of 8 tokens, width 8 in float64.
    assert sent[What.SEND_F] == received[What.RECV_F] == STEPS * 4 * 2 * 8 * 8 * 8
    assert sent[What.SEND_B] == received[What.RECV_B] == sent[What.SEND_F]


async def test_a_message_that_its_group_tells_of_is_no_second_call():
    """As between hosts: without shared memory, pipes are made of the group's sends and receives."""
    for events, _ in await on_mesh(settings(1, 1, 2)):
        sends = [event for event in events if event.what in SENDS]
        told = [event for event in events if event.what == What.COLLECTIVE and OPS[event.op] == "send"]
        assert {event.axis for event in told} == {Axis.PP}
        assert sum(event.num_bytes for event in told) >= sum(event.num_bytes for event in sends) > 0
        assert {event.calls for event in sends} == {0}


async def test_messages_that_have_been_taken_are_not_kept():
    """A send that nobody awaits ends too, or a run would keep all its activations."""

    async def main(coordinator):
        await trained(coordinator)
        await coordinator.mesh.world.barrier()
        await asyncio.sleep(0)
        return len(coordinator.mesh.pp._issuer.under_way)

    assert [num_kept for num_kept, _ in await on_mesh(settings(1, 1, 2), main)] == [0, 0]


async def test_weight_gradients_that_are_computed_while_nothing_comes_are_told_with_the_receive():
    found = await on_mesh(settings(1, 1, 2, "zero-bubble"))
    for events, _ in found:
        for event in (event for event in events if event.what in RECEIVES):
            assert 0 <= event.cpu <= event.seconds


async def test_tensor_parallel_exchanges_are_one_event_a_kind():
    for sequence_parallel, kinds in ((False, {"all_reduce"}), (True, {"all_reduce", "reduce_scatter", "all_gather"})):
        given = settings(1, 2, 1, parallel__sequence_parallel=sequence_parallel)
        for events, coordinator in await on_mesh(given):
            calls = [event for event in events if event.what == What.COLLECTIVE and event.axis == Axis.TP]
            assert kinds <= {OPS[event.op] for event in calls}
            moved = coordinator._model.tp_context.exchange.moved
            assert sum(event.num_bytes for event in calls) >= sum(each.num_bytes for each in moved.values()) > 0


async def test_reductions_are_told_with_their_axis():
    for events, _ in await on_mesh(settings(2, 1, 1)):
        reduced = [event for event in events if event.what == What.COLLECTIVE and event.axis == Axis.DP]
        assert {OPS[event.op] for event in reduced} == {"all_reduce"}
        assert all(event.seconds == pytest.approx(event.waited) for event in reduced)


SHARED = [
    (settings(2, 2, 1, parallel__sequence_parallel=True), Axis.TP),
    (settings(1, 1, 2, model__args__tied=True), Axis.PP),
]


@pytest.mark.parametrize(("given", "axis"), SHARED, ids=["sequence", "tied"])
async def test_gradients_that_a_replica_shares_are_added_up_before_replicas_meet(given, axis):
    for events, coordinator in await on_mesh(given):
        for step in range(STEPS):
            mine = of_step(events, step)
            reduce = [each for each in mine if each.what == What.REDUCE]
            (shared,) = [each for each in reduce if each.axis == axis]
            replicas = [each for each in reduce if each.axis == Axis.WORLD]
            assert len(replicas) == (2 if coordinator.mesh.dp.size > 1 else 1)
            last_action = max(each.end for each in mine if each.what in ACTIONS)
            assert last_action <= shared.start <= shared.end <= replicas[-1].start


async def test_passes_apart_are_a_step_too_and_an_evaluation_is_none():
    async def main(coordinator):
        batch = part_of(coordinator, 0)
        await coordinator.eval_step(batch)
        await coordinator.forward_pass(batch)
        await coordinator.backward_pass()
        await coordinator.optimizer_step()
        await coordinator.train_step(batch)
        return list(unpack(coordinator.recorder.take().data))

    for events, coordinator in await on_mesh(settings(1, 1, 2), main):
        wholes = [event for event in events if event.what == What.STEP]
        assert [event.step for event in wholes] == [0, 1]
        for whole in wholes:
            actions = Counter(event.action for event in of_step(events, whole.step) if event.what in ACTIONS)
            column = coordinator._executor.table.columns[coordinator.mesh.pp.rank]
            assert actions == Counter(map(str, column)), "each once"
        meetings = Counter(event.step for event in events if event.what == What.MEET)
        assert meetings == {0: 2, 1: 1}, "apart, ranks tell each other the loss before backward"


async def test_a_step_that_failed_is_part_of_the_next():
    async def main(coordinator):
        inputs, targets = whole_batch(coordinator.config, 0)
        weight = next(iter(coordinator._model.shards))
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(float("inf"))
        with pytest.raises(NonFiniteGradient):
            await coordinator.train_step((inputs, targets))
        with torch.no_grad():
            weight.copy_(kept)
        await coordinator.train_step((inputs, targets))
        return list(unpack(coordinator.recorder.take().data))

    ((events, _),) = await on_mesh(settings(1, 1, 1), main)
    (whole,) = [event for event in events if event.what == What.STEP]
    assert all(event.start >= whole.start for event in events if event.what in ACTIONS)
    assert Counter(event.what for event in events)[What.REDUCE_GRAD] == 2


async def test_waiting_for_data_lies_in_the_step():
    async def main(coordinator):
        async for batch in coordinator.batches():
            await coordinator.train_step(batch)
        return list(unpack(coordinator.recorder.take().data))

    ((events, coordinator),) = await on_mesh(settings(1, 1, 1, model__args__vocabulary=256), main)
    wholes = {event.step: event for event in events if event.what == What.STEP}
    waits = [event for event in events if event.what == What.DATA]
    assert [event.step for event in waits] == list(wholes)
    assert all(wholes[each.step].start <= each.start <= each.end <= wholes[each.step].end for each in waits)
    assert 0 <= coordinator.queue.take() <= coordinator.queue.capacity == 2


async def test_memory_is_told_by_kind():
    async def main(coordinator):
        await coordinator.train_step(part_of(coordinator, 0))
        return coordinator.memory()

    for shard in (False, True):
        for kinds, coordinator in await on_mesh(settings(2, 1, 1, optimizer__shard=shard), main):
            weights = sum(each.nbytes for each in coordinator._model.shards)
            assert kinds["weights"] == weights
            assert kinds["gradients"] >= weights
            assert kinds["optimizer"] == 2 * kinds["gradients"] / (2 if shard else 1), "two moments of each"


async def test_the_parts_of_performance_have_the_names_of_metrics_and_add_up():
    async def main(coordinator):
        await trained(coordinator)
        return coordinator.performance()

    for performance, _ in await on_mesh(settings(1, 2, 2), main):
        parts = performance.parts()
        assert tuple(parts) == PARTS
        total = sum(each.seconds for each in performance._steps) / len(performance._steps)
        assert sum(parts.values()) == pytest.approx(total, rel=0.02)
        assert parts["straggler"] == parts["checkpoint"] == parts["data"] == 0
        assert min(parts["compute"], parts["tp_comm"], parts["bubble"], parts["optimizer"]) > 0
        assert all(name in performance.report() for name in ("compute", "bubble"))


async def test_without_a_recorder_nothing_is_kept():
    async def main(coordinator):
        coordinator.recorder = None  # as monitoring.enabled: false leaves it
        await coordinator._set_up()
        return await coordinator.train_step(part_of(coordinator, 0))

    ((step, coordinator),) = await on_mesh(settings(1, 1, 1), main)
    assert coordinator.mesh.collectives.events_into is None
    assert step.core_wait_seconds == 0
    assert all(each.cpu == 0 for each in step.actions)
    assert step.ended - step.began >= step.seconds > 0


def test_steps_end_where_the_next_begins_also_without_a_recorder():
    events = StepEvents(None, clock=lambda: 5.0)
    moments = StepMoments(Span(5.0, 6.0), None, 7.0, 7.5, Span(7.6, 7.8), 8.0)
    assert events.end(0, moments) == (5.0, 8.0)
    assert events.ended == 8.0
