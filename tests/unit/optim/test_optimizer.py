"""Training over replicas gives what a plain loop gives, and sharding its optimizer changes no bit."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from torch import nn

import parallel3d
from parallel3d.config.sections import Optimizer as OptimizerConfig
from parallel3d.gradients.reducer import GradientSync
from parallel3d.optim.fused import update_of
from parallel3d.optim.optimizer import Optimizer
from runtime.errors import GroupClosed, NonFiniteGradient
from tests.support.replicas import (
    EVERY_OPTIMIZER,
    Replica,
    Trained,
    assert_close,
    assert_same,
    make_stages,
    parameters_of,
    plain_loop,
    samples,
)


async def train(dp: int, stages: int, config: OptimizerConfig, dtype: torch.dtype, steps: int = 4, **options):
    """By every rank."""

    async def main() -> Trained:
        async with parallel3d.mesh(dp=dp) as mesh:
            return await Replica(mesh, make_stages(stages, dtype), config, **options).train(steps, dtype)

    return await parallel3d.in_process(main, ranks=dp)


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(("dp", "stages"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)])
async def test_a_plain_loop_gives_the_same(dp, stages, shard, name):
    config = EVERY_OPTIMIZER[name]
    expected = plain_loop(make_stages(stages), config, 4, torch.float64)
    for trained in await train(dp, stages, config, torch.float64, shard=shard):
        assert_close(trained, expected, 1e-12)
    assert max(expected.norms) > config.clip_norm, "nothing was clipped"


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dp", [2, 3])
async def test_sharding_changes_no_bit(dp, dtype, name):
    whole = await train(dp, 2, EVERY_OPTIMIZER[name], dtype, steps=6)
    sharded = await train(dp, 2, EVERY_OPTIMIZER[name], dtype, steps=6, shard=True)
    assert_same([*whole, *sharded])


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_slices_are_updated_as_the_whole(dtype, threads, name):
    """With large ones too, which several threads share."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(3)
        weights, gradients = torch.randn(2, 3 * 64 * 701, dtype=dtype)
        whole, cut = weights.clone(), weights.clone()
        updates = []
        for flat, num in ((whole, 1), (cut, 3)):
            update = update_of(EVERY_OPTIMIZER[name])
            update.add(flat.chunk(num))
            updates.append((update, list(gradients.clone().chunk(num))))
        for number in range(1, 4):
            for update, cut_gradients in updates:
                update(cut_gradients, number, 0.01, 0.5 if number == 2 else 1.0)
        assert torch.equal(whole, cut)
        assert not torch.equal(whole, weights)
    finally:
        torch.set_num_threads(before)


async def test_types_may_be_mixed_and_frozen_parameters_stay():
    def stages() -> dict[int, nn.Module]:
        torch.manual_seed(2)
        made = make_stages(2)
        made[1][0].twice.weight.requires_grad_(False)

        class Narrow(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(7, 7)

            def forward(self, values):
                return self.linear(values.float()).double()

        made[1].append(Narrow())
        return made

    config = EVERY_OPTIMIZER["adamw"]
    expected = plain_loop(stages(), config, 3, torch.float64)

    async def main() -> Trained:
        async with parallel3d.mesh(dp=2) as mesh:
            made = stages()
            frozen = made[1][0].twice.weight
            where = frozen.data_ptr()
            trained = await Replica(mesh, made, config, shard=True).train(3)
            assert (frozen.data_ptr(), frozen.grad, hasattr(frozen, "main_grad")) == (where, None, False)
            return trained

    for trained in await parallel3d.in_process(main, ranks=2):
        assert_close(trained, expected, 1e-6)


async def test_a_parameter_that_several_ranks_have_counts_once():
    """Over tp: both ranks have the vector, each its own part of the matrix. Over pp: everything is another's."""

    async def main() -> tuple[float, float]:
        async with parallel3d.mesh(dp=2, tp=2, pp=2) as mesh:
            coords = mesh.coords
            vectors = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(70))]
            matrices = [nn.Parameter(torch.zeros(9, 1000)), nn.Parameter(torch.zeros(3, 2))]
            both = [matrices[0], vectors[0], matrices[1], vectors[1]]
            sync = GradientSync(mesh, {coords.pp: both}, [coords.pp], bucket_bytes=1 << 20)
            replicated = set(map(id, vectors))
            optimizer = Optimizer(
                OptimizerConfig(name="sgd"), sync, mesh, lambda each: id(each) not in replicated or coords.tp == 0
            )
            sync.begin()
            for number, each in enumerate(both):
                generator = torch.Generator().manual_seed(number + 10 * coords.pp)
                if id(each) not in replicated:
                    generator.manual_seed(number + 10 * coords.pp + 100 * (coords.tp + 1))
                each.grad = torch.randn(each.shape, generator=generator)
            squares = [float(each.grad.double().square().sum()) * 4 for each in both]  # the replicas have the same
            sync.stage_done(coords.pp)
            await sync.finish()
            own = squares[0] + squares[2] + (squares[1] + squares[3] if coords.tp == 0 else 0)
            return await optimizer.step(0.1), own if coords.dp == 0 else 0.0

    norms, squares = zip(*await parallel3d.in_process(main, ranks=8), strict=True)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(math.sqrt(sum(squares)), rel=1e-6)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("dp", [1, 2])
async def test_gradients_that_are_not_finite(dp, shard):
    async def main() -> None:
        async with parallel3d.mesh(dp=dp) as mesh:
            stages = make_stages(2)
            replica = Replica(mesh, stages, EVERY_OPTIMIZER["adamw"], shard=shard)
            await replica.step(samples(0))
            before, state = [each.clone() for each in parameters_of(stages)], replica.optimizer.state()
            remembered = [each.clone() for part in state for each in part.values.values()]
            bad = samples(1)
            bad[-1, 3] = math.nan
            with pytest.raises(NonFiniteGradient) as caught:
                await replica.step(bad)
            assert caught.value.ranks == (dp - 1,)
            assert str(caught.value) == (
                f"the norm of the gradients is nan: those of rank {dp - 1} (dp={dp - 1} tp=0 pp=0) are not all finite. "
                "The weights are as they were before this step. Look at its samples, or lower optimizer.lr."
            )
            assert all(torch.equal(a, b) for a, b in zip(parameters_of(stages), before, strict=True))
            now = [each for part in replica.optimizer.state() for each in part.values.values()]
            assert all(torch.equal(a, b) for a, b in zip(now, remembered, strict=True))
            assert replica.optimizer.num_steps == 1
            assert math.isfinite(await replica.step(samples(2)))

    await parallel3d.in_process(main, ranks=dp)


async def test_where_only_sums_are_left_those_are_named_in_which_it_shows():
    async def main() -> tuple[int, ...]:
        async with parallel3d.mesh(dp=2) as mesh:
            linear = nn.Linear(64, 64, bias=False)
            replica = Replica(mesh, {0: linear}, EVERY_OPTIMIZER["sgd"], bucket_bytes=1 << 20)
            batch = torch.ones(2, 64)
            batch[1, 0] = math.inf
            with pytest.raises(NonFiniteGradient, match=r"rank 0 .* rank 1 ") as caught:
                await replica.step(batch)
            return caught.value.ranks

    assert await parallel3d.in_process(main, ranks=2) == [(0, 1)] * 2


async def test_a_cancelled_step_closes_the_mesh():
    """One replica has new weights, the other has not."""

    async def main() -> None:
        async with parallel3d.mesh(dp=2) as mesh:
            replica = Replica(mesh, make_stages(1), EVERY_OPTIMIZER["adamw"])
            await mesh.compute(replica.backward_of, samples(0))
            await replica.sync.finish()
            stepping = asyncio.ensure_future(replica.optimizer.step(0.1))
            if mesh.rank == 1:
                await asyncio.sleep(0)
                stepping.cancel()
            with pytest.raises(asyncio.CancelledError if mesh.rank == 1 else GroupClosed):
                await stepping
            assert mesh.dp.has_failed
            assert mesh.world.has_failed

    await parallel3d.in_process(main, ranks=2)


async def test_a_rank_without_parameters():
    async def main() -> float:
        async with parallel3d.mesh(pp=2) as mesh:
            parameters = [nn.Parameter(torch.ones(4))] if mesh.rank else []
            sync = GradientSync(mesh, {mesh.rank: parameters}, [mesh.rank], bucket_bytes=1 << 20)
            optimizer = Optimizer(EVERY_OPTIMIZER["adamw"], sync, mesh)
            sync.begin()
            for each in parameters:
                each.grad = torch.ones(4)
            sync.stage_done(mesh.rank)
            await sync.finish()
            assert (sync.reduced, sync.bus_bandwidth) == ((0, 0.0), None)
            return await optimizer.step(0.1)

    assert await parallel3d.in_process(main, ranks=2) == [2.0, 2.0]


@pytest.mark.parametrize("shard", [False, True])
async def test_the_state_by_parameter(shard):
    async def main() -> None:
        async with parallel3d.mesh(dp=2) as mesh:
            stages = make_stages(2)
            replica = Replica(mesh, stages, EVERY_OPTIMIZER["adamw"], shard=shard)
            await replica.train(2)
            num = {id(each): 0 for each in parameters_of(stages)}
            for part in replica.optimizer.state():
                gradient = part.parameter.grad.flatten()[part.start : part.stop]
                assert list(part.values) == ["exp_avg", "exp_avg_sq"]
                assert all(each.shape == gradient.shape for each in part.values.values())
                assert bool(part.values["exp_avg_sq"].any()) == bool(gradient.any()) or gradient.numel() < 3
                num[id(part.parameter)] += part.stop - part.start
            total = torch.tensor(list(num.values()))
            if shard:
                await mesh.dp.all_reduce(total)
            assert total.tolist() == [each.numel() for each in parameters_of(stages)]
            assert replica.optimizer.num_steps == 2

    await parallel3d.in_process(main, ranks=2)


async def test_the_state_can_be_put_back():
    """Training that goes on from it is as if it had never stopped."""

    async def main() -> None:
        async with parallel3d.mesh(dp=2) as mesh:
            config = EVERY_OPTIMIZER["adamw"]
            straight = Replica(mesh, make_stages(1), config, shard=True)
            await straight.train(2)
            resumed = Replica(mesh, make_stages(1), config, shard=True)
            with torch.no_grad():
                for mine, theirs in zip(parameters_of(resumed.stages), parameters_of(straight.stages), strict=True):
                    mine.copy_(theirs)
                for mine, theirs in zip(resumed.optimizer.state(), straight.optimizer.state(), strict=True):
                    for name, values in mine.values.items():
                        values.copy_(theirs.values[name])
            resumed.optimizer.num_steps = straight.optimizer.num_steps
            assert_same([await resumed.train(2), await straight.train(2)])

    await parallel3d.in_process(main, ranks=2)


async def test_autocast_trains_float32_weights():
    """A weight's copy in bfloat16 is made once a step, and is not kept when the weight changes."""

    async def main() -> Trained:
        async with parallel3d.mesh(dp=2) as mesh:
            stages = make_stages(1, torch.float32)
            replica = Replica(mesh, stages, EVERY_OPTIMIZER["sgd"])
            kept, weight = [], stages[0][0].up.weight

            def under_autocast(batch: torch.Tensor) -> None:
                with torch.autocast("cpu", torch.bfloat16):
                    original(batch)
                kept.append(weight.cast_in_step)

            original, replica.backward_of = replica.backward_of, under_autocast
            weights = [weight.detach().bfloat16()]
            for step in range(3):
                await replica.step(samples(step, torch.float32))
                assert not hasattr(weight, "cast_in_step")
                weights.append(weight.detach().bfloat16())
            assert all(torch.equal(a, b) for a, b in zip(kept, weights[:-1], strict=True))
            return Trained([], [each.detach().clone() for each in parameters_of(stages)])

    trained = await parallel3d.in_process(main, ranks=2)
    expected = plain_loop(make_stages(1, torch.float32), EVERY_OPTIMIZER["sgd"], 3, torch.float32)
    assert_same(trained)
    assert_close(trained[0], Trained([], expected.weights), 2e-3)
