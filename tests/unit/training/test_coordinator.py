"""The coordinator on ranks that are tasks of this process."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
import torch

import parallel3d
from parallel3d.config import load_config
from parallel3d.models.build import build_model
from parallel3d.models.losses import make_loss
from parallel3d.pipeline.schedules.actions import Kind
from parallel3d.training import dropout
from parallel3d.training.coordinator import Coordinator
from runtime.errors import CommunicationError, InvalidCall, NonFiniteGradient, culprit_of
from tests.support.training import (
    HUGGING_FACE_TOLERANCE,
    check,
    of_a_hugging_face_model,
    of_a_users_model,
    settings,
    whole_batch,
)

NUMBERS = {
    "model": {"factory": "tests.support.user_models:regression", "loss": "mse"},
    "train": {"steps": 4, "batch_size": 8, "precision": "float64"},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "data.factory": "tests.support.user_models:Numbers",
    "runtime.threads": 1,
}


def numbers(**more):
    return {**NUMBERS, **{key.replace("__", "."): value for key, value in more.items()}}


async def on_mesh(given, main):
    """What `main(coordinator)` gives on each rank."""
    config = load_config(None, overrides=given)

    async def rank():
        async with Coordinator.from_config(config) as coordinator:
            return await main(coordinator)

    return await parallel3d.in_process(rank, ranks=config.world_size)


def mine(coordinator, batch):
    dp = coordinator.mesh.dp
    return tuple(each.chunk(dp.size)[dp.rank] for each in batch)


def some_numbers(step=0, samples=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 4, generator=generator).double(), torch.randn(samples, 2, generator=generator).double()


async def trained(coordinator, steps=3):
    for step in range(steps):
        result = await coordinator.train_step(mine(coordinator, some_numbers(step)))
    return result, await coordinator.whole_weights()


def plain(given, loss, steps=3):
    config = load_config(None, overrides=given)
    model = build_model(config).whole.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        inputs, targets = some_numbers(step)
        optimizer.zero_grad()
        found = loss(model(inputs), targets)
        found.backward()
        optimizer.step()
    return found.item(), dict(model.named_parameters())


def counted_mean(output, target):
    kept = target > 0
    return (output - target)[kept].square().mean()


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("mse", torch.nn.functional.mse_loss),
        ("tests.support.user_models:absolute_loss", torch.nn.functional.l1_loss),
        ("tests.support.user_models:counted_loss", counted_mean),
        ("tests.support.user_models:weighted_loss", counted_mean),
    ],
)
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2, "pp": 2}])
async def test_a_users_model_with_any_loss(name, loss, mesh):
    given = numbers(parallel=mesh, pipeline__microbatches=2)
    given["model"] = {**given["model"], "loss": name}
    (step, weights), *_ = await on_mesh(given, trained)
    expected, parameters = plain(given, loss)
    assert step.loss == pytest.approx(expected, abs=1e-12)
    for path, values in parameters.items():
        torch.testing.assert_close(weights[path], values.detach(), rtol=0, atol=1e-12)


async def test_a_users_own_plan():
    await parallel3d.in_process(partial(check, of_a_users_model(1, 2, 2)), ranks=4)


@pytest.mark.parametrize(
    ("factory", "mesh", "options"),
    [
        ("half_frozen", (1, 2, 1), {"parallel__sequence_parallel": True}),
        ("TwiceTied", (1, 1, 2), {}),
    ],
)
async def test_late_gradients_of_a_users_model(factory, mesh, options):
    given = of_a_users_model(*mesh, factory, **options)
    await parallel3d.in_process(partial(check, given), ranks=2)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"model_type": "qwen3", "head_dim": 4}],
    ids=["llama", "tied", "qwen3"],
)
async def test_a_hugging_face_model(changes):
    given = of_a_hugging_face_model(1, 2, 2, **changes)
    build_model(load_config(None, overrides=given))  # transformers can't be imported by several threads at once
    await parallel3d.in_process(partial(check, given, tolerance=HUGGING_FACE_TOLERANCE), ranks=4)


async def test_batches_of_the_configured_data():
    async def main(coordinator):
        return [await coordinator.train_step(batch) async for batch in coordinator.batches()]

    given = numbers(train={"steps": 4, "batch_size": 8})
    (alone,), pair = await on_mesh(given, main), await on_mesh({**given, "parallel.dp": 2}, main)
    assert [step.step for step in alone] == [0, 1, 2, 3]
    for mine, theirs in zip(*pair, strict=True):
        assert mine.loss == theirs.loss
    for step, other in zip(alone, pair[0], strict=True):
        assert step.loss == pytest.approx(other.loss, abs=1e-6)
        assert step.tokens == other.tokens == 16
        assert step.seconds > 0
        assert step.data_seconds >= 0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
async def test_forward_and_backward_apart_are_a_step(schedule):
    given = settings(1, 1, 2, schedule)

    async def apart(coordinator):
        losses = []
        for step in range(2):
            batch = whole_batch(coordinator.config, step)
            losses.append(await coordinator.forward_pass(batch))
            await coordinator.backward_pass()
            await coordinator.optimizer_step()
        return losses, await coordinator.whole_weights()

    async def together(coordinator):
        batches = [whole_batch(coordinator.config, step) for step in range(2)]
        return [(await coordinator.train_step(batch)).loss for batch in batches], await coordinator.whole_weights()

    (losses, weights), _ = await on_mesh(given, apart)
    (expected, whole), _ = await on_mesh(given, together)
    assert losses == pytest.approx(expected, abs=1e-12)
    for name, values in whole.items():
        torch.testing.assert_close(weights[name], values, rtol=0, atol=1e-12)


async def test_passes_in_the_wrong_order():
    async def main(coordinator):
        with pytest.raises(InvalidCall, match=r"^backward_pass: call forward_pass before it\."):
            await coordinator.backward_pass()
        with pytest.raises(InvalidCall, match=r"^optimizer_step: call forward_pass and backward_pass"):
            await coordinator.optimizer_step()
        await coordinator.forward_pass(some_numbers())
        with pytest.raises(InvalidCall, match=r"^forward_pass: a forward_pass waits for its backward_pass"):
            await coordinator.forward_pass(some_numbers())
        with pytest.raises(InvalidCall, match=r"^train_step: a forward_pass waits for its backward_pass"):
            await coordinator.train_step(some_numbers())
        with pytest.raises(InvalidCall, match=r"^eval_step: a forward_pass waits for its backward_pass"):
            await coordinator.eval_step(some_numbers())
        await coordinator.backward_pass()
        with pytest.raises(InvalidCall, match=r"^forward_pass: gradients wait for their optimizer_step"):
            await coordinator.forward_pass(some_numbers())
        with pytest.raises(InvalidCall, match=r"^train_step: gradients wait for their optimizer_step"):
            await coordinator.train_step(some_numbers())
        await coordinator.eval_step(some_numbers())  # which leaves gradients alone
        await coordinator.optimizer_step()
        return await coordinator.whole_weights(), await coordinator.train_step(some_numbers(1))

    async def in_order(coordinator):
        await coordinator.train_step(some_numbers())
        return await coordinator.whole_weights(), await coordinator.train_step(some_numbers(1))

    ((weights, step),), ((expected, other),) = await on_mesh(numbers(), main), await on_mesh(numbers(), in_order)
    assert step.loss == other.loss
    for name, values in expected.items():
        torch.testing.assert_close(weights[name], values, rtol=0, atol=1e-12)


async def test_what_one_replica_refuses_all_refuse():
    async def main(coordinator):
        batch = mine(coordinator, some_numbers())
        bad = batch[0].clone()
        bad[2, 1] = torch.inf
        with pytest.raises(InvalidCall) as caught:
            await coordinator.train_step((bad, batch[1]) if coordinator.mesh.rank == 1 else batch)
        return str(caught.value), culprit_of(caught.value), (await coordinator.train_step(batch)).loss

    (first, culprit, loss), (second, _, other) = await on_mesh(numbers(parallel={"dp": 2}), main)
    assert first == "rank 1 (dp=1 tp=0 pp=0) rejected its part of this step's batch."
    assert second.startswith("the batch's inputs on rank 1 (dp=1 tp=0 pp=0) have NaN or infinity, first in sample 2.")
    assert (culprit, loss) == (1, other)


async def test_an_evaluation_changes_nothing_and_drops_nothing():
    given = settings(2, 2, 2)
    given["model.args"]["dropout"] = 0.5

    async def main(coordinator):
        batch = mine(coordinator, whole_batch(coordinator.config, 0))
        first, again = await coordinator.eval_step(batch), await coordinator.eval_step(batch)
        trained = (await coordinator.train_step(batch)).loss
        return first, again, trained, await coordinator.eval_step(batch)

    for first, again, trained, after in await on_mesh(given, main):
        assert first == again
        assert first != after
        assert abs(first - trained) > 1e-9  # dropped


async def test_replicas_and_stages_drop_different_values(monkeypatch):
    seeds = []
    monkeypatch.setattr(dropout, "seed_from_now_on", seeds.append)

    async def main(coordinator):
        pass

    await on_mesh(settings(2, 2, 2, model__args__dropout=0.5), main)
    assert sorted(Counter(seeds).values()) == [2] * 4, "tensor-parallel ranks have the same, and no others"


async def test_an_evaluation_leaves_each_modules_mode():
    async def main(coordinator):
        (stage,) = coordinator._model.stages.values()
        frozen, *others = stage.module.children()
        frozen.eval()
        await coordinator.eval_step(some_numbers())
        return frozen.training, [each.training for each in others]

    ((frozen, others),) = await on_mesh(numbers(), main)
    assert not frozen
    assert all(others)


async def test_a_configuration_made_by_hand_has_a_batch_size():
    config = load_config(None, overrides=numbers(pipeline__microbatches=2))
    by_hand = config.model_copy(update={"train": config.train.model_copy(update={"batch_size": None})})
    async with Coordinator.from_config(by_hand) as coordinator:
        await coordinator.train_step(some_numbers(samples=2))
        with pytest.raises(InvalidCall, match=r"a replica's part is train\.batch_size\(2\) / dp\(1\) = 2\."):
            await coordinator.train_step(some_numbers(samples=4))


async def test_bfloat16_keeps_weights_in_float32():
    given = settings(2, 2, 2, train__precision="bfloat16")

    async def main(coordinator):
        batches = [mine(coordinator, whole_batch(coordinator.config, 0))] * 8
        losses = [(await coordinator.train_step(batch)).loss for batch in batches]
        return losses, await coordinator.whole_weights()

    exact, *_ = await on_mesh({**given, "train": {**given["train"], "precision": "float32"}}, main)
    rounded, *_ = await on_mesh(given, main)
    assert rounded[0] != exact[0]
    assert rounded[0] == pytest.approx(exact[0], rel=0.03)
    assert rounded[0][-1] < rounded[0][0]
    assert all(values.dtype is torch.float32 for values in rounded[1].values())


async def test_a_step_tells_what_it_did():
    async def main(coordinator):
        for step in range(4):
            found = await coordinator.train_step(mine(coordinator, whole_batch(coordinator.config, step)))
        return found, coordinator.performance(), coordinator.shards, coordinator.step

    for step, performance, shards, number in await on_mesh(settings(1, 2, 2, optimizer__warmup_steps=8), main):
        assert number == 4
        assert step.step == 3
        assert step.learning_rate == pytest.approx(0.01 * 4 / 8)
        assert step.tokens == 8 * 8
        assert {Kind.F, Kind.B, Kind.REDUCE_GRAD} <= {each.action.kind for each in step.actions}
        assert 0 < step.compute_seconds < step.seconds
        assert 0 <= step.bubble < 1
        assert min(performance.parts().values()) >= 0  # they are times of their own, and leave something for the rest
        assert performance.report().startswith("4 steps, ")
        assert {shard.strategy for shard in shards} == {"column", "row", "vocab", "replicated"}


async def test_the_learning_rate_can_be_overridden():
    async def main(coordinator):
        assert coordinator.learning_rate == 0.1
        coordinator.learning_rate = 0.0
        before = await coordinator.whole_weights()
        step = await coordinator.train_step(some_numbers())
        after = await coordinator.whole_weights()
        assert step.learning_rate == 0
        assert all(torch.equal(before[name], after[name]) for name in before)
        with pytest.raises(InvalidCall, match=r"^learning_rate = -1: give a number"):
            coordinator.learning_rate = -1
        coordinator.learning_rate = None
        assert coordinator.learning_rate == 0.1

    await on_mesh(numbers(), main)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(8, 4), r"^a batch is \(inputs, targets\), not Tensor"),
        (
            (torch.zeros(6, 4), torch.zeros(6, 2)),
            r"^the batch's inputs are 6 samples of shape \(4,\); a replica's part",
        ),
        ((torch.zeros(8, 4), torch.zeros(4, 2)), r"^the batch's targets are 4 samples"),
        ((torch.zeros(8, 4), 3), r"^the batch's targets: a tensor with a row a sample is needed, not int"),
        (
            (torch.tensor([[0.0] * 4] * 5 + [[torch.nan] * 4] + [[0.0] * 4] * 2), torch.zeros(8, 2)),
            r"^the batch's inputs on rank 0 \(dp=0 tp=0 pp=0\) have NaN or infinity, first in sample 5\.",
        ),
    ],
)
async def test_a_wrong_batch_is_refused_and_the_mesh_goes_on(batch, message):
    async def main(coordinator):
        with pytest.raises(InvalidCall, match=message):
            await coordinator.train_step(batch)
        await coordinator.train_step(some_numbers())

    await on_mesh(numbers(), main)


async def test_gradients_that_are_not_finite_name_their_rank():
    async def main(coordinator):
        inputs, targets = mine(coordinator, some_numbers())
        if coordinator.mesh.dp.rank == 1:
            inputs = inputs * 1e300
        before = await coordinator.whole_weights()
        with pytest.raises(NonFiniteGradient) as caught:
            await coordinator.train_step((inputs, targets * 1e300))
        after = await coordinator.whole_weights()
        if before is not None:
            assert all(torch.equal(before[name], after[name]) for name in before)
        return str(caught.value)

    found = await on_mesh(numbers(parallel={"dp": 2}), main)
    assert found[0] == found[1]
    assert "rank 1 (dp=1 tp=0 pp=0)" in found[0]


async def test_cancelling_a_step_closes_the_mesh():
    cancelled = asyncio.Event()

    async def main(coordinator):
        batch = mine(coordinator, whole_batch(coordinator.config, 0))
        if coordinator.mesh.rank == 0:
            step = asyncio.ensure_future(coordinator.train_step(batch))
            await asyncio.sleep(0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            cancelled.set()
        else:
            with pytest.raises(CommunicationError):
                await coordinator.train_step(batch)
            await cancelled.wait()
        with pytest.raises(CommunicationError):
            await coordinator.train_step(batch)

    await on_mesh(settings(1, 2, 2, comm__timeout=5), main)


def cancel_within(part, method):
    """Cancels the step that calls it, while it waits for the other replica there."""
    call, loop, step = getattr(part, method), asyncio.get_running_loop(), asyncio.current_task()

    def cancelled(*args):
        loop.call_soon_threadsafe(step.cancel)
        return call(*args)

    setattr(part, method, cancelled)


def hold_before(part, method, is_over):
    """In the engine thread, where it may wait."""
    call = getattr(part, method)

    def held(*args):
        assert is_over.wait(20)
        return call(*args)

    setattr(part, method, held)


@pytest.mark.parametrize(
    ("waits", "held"),
    [
        (("reducer", "_all_reduced"), ("reducer", "begin")),
        (("optimizer", "_from_all"), ("optimizer", "_from_all")),
        (("optimizer", "_gather"), ("optimizer", "_update")),
    ],
    ids=["reducing gradients", "adding up norms", "gathering weights"],
)
async def test_a_step_can_be_cancelled_wherever_it_waits_for_a_replica(waits, held):
    cancelled, is_over = asyncio.Event(), threading.Event()

    async def cancel(coordinator, batch):
        cancel_within(getattr(coordinator._model, waits[0]), waits[1])
        await coordinator.train_step(batch)

    async def main(coordinator):
        batch = mine(coordinator, whole_batch(coordinator.config, 0))
        await coordinator.train_step(batch)
        if coordinator.mesh.rank == 0:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(cancel(coordinator, batch))
            is_over.set()
            cancelled.set()
        else:
            hold_before(getattr(coordinator._model, held[0]), held[1], is_over)
            with suppress(CommunicationError):  # not where all that it needs has come before
                await coordinator.train_step(batch)
            await cancelled.wait()
        with pytest.raises(CommunicationError):
            await coordinator.train_step(batch)

    async with asyncio.timeout(30):
        await on_mesh(settings(2, 1, 1, optimizer__shard=True, comm__timeout=20), main)


async def test_layers_are_cut_by_the_time_they_take():
    given = settings(1, 1, 2, pipeline__layers_per_stage="profile", model__args__vocabulary=256)

    async def main(coordinator):
        await coordinator.train_step(whole_batch(coordinator.config, 0))
        return {shard.path.split(".")[1]: shard.stage for shard in coordinator.shards if "blocks" in shard.path}

    first, second = await on_mesh(given, main)
    assert first == second
    assert set(first.values()) == {0, 1}


def test_a_loss_that_does_not_exist_is_named():
    with pytest.raises(parallel3d.ConfigError, match=r"model\.loss"):
        make_loss("tests.support.user_models:nothing")
