"""Buckets are laid out, start early and in order, and a step that fails leaves nobody waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import parallel3d
from parallel3d.gradients.buckets import fill, matrices_first
from parallel3d.gradients.deferred import collecting, defer_weight_grad, split_weight_gradients
from parallel3d.gradients.reducer import GradientSync
from parallel3d.torch_internals import post_accumulate_grad_hooks
from runtime.errors import GroupClosed, InvalidCall, PeerLost
from tests.support.replicas import (
    EVERY_OPTIMIZER,
    Replica,
    Trained,
    assert_close,
    make_stages,
    parameters_of,
    plain_loop,
    samples,
)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype))


async def on_ranks(main, num: int, **mesh):
    """What `main(mesh)` gives on each of them."""

    async def enter():
        async with parallel3d.mesh(**(mesh or {"dp": num})) as entered:
            return await main(entered)

    return await parallel3d.in_process(enter, ranks=num)


# Layout.


def test_buckets_end_between_parameters():
    a, b, c, d = parameter(10), parameter(10), parameter(100), parameter(2)
    assert fill([a, b, c, d], 80) == [[a, b], [c], [d]]
    assert fill([a, b, c, d], 79) == [[a], [b], [c], [d]]
    assert fill([a, b, c, d], 1 << 20) == [[a, b, c, d]]
    assert fill([], 10) == []


def test_a_bucket_has_one_dtype():
    a, b, c = parameter(10), parameter(10, dtype=torch.float64), parameter(10)
    assert fill([a, b, c], 80) == [[a, c], [b]]


def test_matrices_come_first():
    a, b, c = parameter(10), parameter(2, 2), parameter(3, 3, 3)
    assert matrices_first([a, b, c]) == [b, c, a]


def several() -> list[nn.Parameter]:
    return [parameter(3, 7), parameter(5), parameter(0), parameter(1, 9), parameter(2, dtype=torch.float64)]


@pytest.mark.parametrize("dp", [2, 3])
async def test_where_everything_lies(dp):
    async def main(mesh):
        given = several()
        values = [each.detach().clone() for each in given]
        sync = GradientSync(mesh, {4: given}, [4], bucket_bytes=1 << 20)
        assert [each.parameters for each in sync.buckets] == [[given[4]], [given[3], given[0], given[2], given[1]]]
        for bucket in sync.buckets:
            size = bucket.flat_weights.numel()
            assert size % (64 * dp) == 0
            assert [bucket.bounds(index) for index in (0, dp - 1)] == [(0, size // dp), (size - size // dp, size)]
            for each, start in zip(bucket.parameters, bucket.starts, strict=True):
                of_weight, of_gradient = bucket.flat_weights[start:], bucket.flat_gradients[start:]
                assert (start * each.element_size()) % 64 == 0
                assert each.numel() == 0 or of_weight.data_ptr() == each.data_ptr()
                assert each.numel() == 0 or of_gradient.data_ptr() == each.main_grad.data_ptr()
                assert each.main_grad.shape == each.shape
        assert all(torch.equal(a, b) for a, b in zip(given, values, strict=True))
        assert all(each.is_leaf and each.requires_grad for each in given)

    await on_ranks(main, dp)


async def test_a_single_replica_leaves_everything_where_it_is():
    """But late gradients, which others shall add to, have a home."""

    async def main(mesh):
        given = several()
        turned = nn.Parameter(torch.randn(3, 4).t())
        where = [each.data_ptr() for each in given]
        sync = GradientSync(mesh, {4: [*given, turned]}, [4], bucket_bytes=1 << 20, late=given[:1])
        assert [each.data_ptr() for each in given[1:]] == where[1:]
        assert [each.main_grad for each in given[1:]] == [None] * 4
        assert sync.flat_late(given[:1])[0].data_ptr() == given[0].main_grad.data_ptr()
        sync.begin()
        (turned.exp().sum() + given[0].sum()).backward()
        sync.stage_done(4)
        await sync.finish()
        assert given[0].grad is given[0].main_grad
        assert all(each.grad.is_contiguous() and not each.grad.any() for each in given[1:])
        assert torch.equal(turned.grad, turned.exp())
        assert turned.is_contiguous()

    await on_ranks(main, 1)


async def test_what_cannot_be_laid_out():
    async def main(mesh):
        cases = [
            (nn.Parameter(torch.zeros(2, dtype=torch.complex64)), r"^a parameter \(2,\) of torch.complex64 cannot be "),
            (nn.Parameter(torch.zeros(2, device="meta")), "is on meta, but the mesh is on cpu; move the model there"),
        ]
        for wrong, text in cases:
            with pytest.raises(InvalidCall, match=text):
                GradientSync(mesh, {0: [wrong]}, [0], bucket_bytes=1 << 20)
        one = parameter(3)
        with pytest.raises(InvalidCall, match=r"shares memory with another one; to tie them, use one parameter"):
            GradientSync(mesh, {0: [one, nn.Parameter(one.data)]}, [0], bucket_bytes=1 << 20)
        with pytest.raises(InvalidCall, match=r"^order = \[1\], but the stages are \[0, 1\]: give each once\.$"):
            GradientSync(mesh, {0: [], 1: []}, [1], bucket_bytes=1 << 20)
        sync = GradientSync(mesh, {0: [parameter(3)], 1: []}, [1, 0], bucket_bytes=1 << 20)
        with pytest.raises(InvalidCall, match=r"^finish: no step is under way\.$"):
            await sync.finish()
        sync.begin()
        sync.stage_done(1)
        with pytest.raises(InvalidCall, match=r"^begin: the last step was neither finished nor cancelled\.$"):
            sync.begin()
        with pytest.raises(InvalidCall, match=r"^finish: the stages \[0\] are not done\.$"):
            await sync.finish()
        sync.stage_done(0)
        await sync.finish()

    await on_ranks(main, 1)


# Sums.


async def test_what_got_no_gradient_counts_as_zero_and_sparse_ones_are_made_dense():
    async def main(mesh):
        embedding, linear = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)
        both = nn.Sequential(embedding, linear)
        split_weight_gradients(both)
        sync = GradientSync(mesh, {0: list(both.parameters())}, [0], bucket_bytes=1 << 20)
        for bucket in sync.buckets:
            bucket.flat_gradients.fill_(torch.nan)
        for _ in range(2):
            sync.begin()
            assert [each.grad for each in both.parameters()] == [None] * 3
            embedding(torch.tensor([mesh.rank, 3])).sum().backward()
            sync.stage_done(0)
            await sync.finish()
            assert embedding.weight.grad.tolist() == [[1, 1], [1, 1], [0, 0], [2, 2], [0, 0]]
            assert not linear.weight.grad.any()
            assert sync.reduced.num_bytes == sum(bucket.flat_gradients.nbytes for bucket in sync.buckets)
            assert sync.reduced.seconds > 0
            assert sync.bus_bandwidth == sync.reduced.num_bytes / sync.reduced.seconds / 1e9

    await on_ranks(main, 2)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("dp", [1, 2])
async def test_a_parameter_of_two_stages_belongs_to_the_one_that_is_done_last(dp, order):
    async def main(mesh):
        torch.manual_seed(1)
        shared, own = nn.Linear(3, 3, bias=False), [nn.Linear(3, 3, bias=False) for _ in range(2)]
        stages = {index: [own[index].weight, shared.weight] for index in range(2)}
        sync = GradientSync(mesh, stages, order, bucket_bytes=1)
        assert [(each.stage, each.parameters) for each in sync.buckets] == [
            (order[0], [own[order[0]].weight]),
            (order[1], [shared.weight]),
            (order[1], [own[order[1]].weight]),
        ]
        values = torch.ones(1, 3)
        for _ in range(3):
            sync.begin()
            for stage in order:
                with sync.last_backward(stage):
                    shared(own[stage](values).detach()).sum().backward()
                sync.stage_done(stage)
            await sync.finish()
            expected = dp * sum(each(values).detach() for each in own)
            torch.testing.assert_close(shared.weight.grad, expected.expand(3, 3))

    await on_ranks(main, dp)


@pytest.mark.parametrize("shared", [False, True])
async def test_stages_and_microbatches(shared):
    """The last block is the first stage's too: a plain loop has to give the same."""

    def stages():
        made = make_stages(3)
        if shared:
            made[2][1] = made[0][0]
        return made

    config = EVERY_OPTIMIZER["sgd"]
    expected = plain_loop(stages(), config, 4, torch.float64)
    for microbatches in (1, 3):
        replica = partial(Replica, stages=stages(), config=config, microbatches=microbatches)
        trained = await on_ranks(lambda mesh, replica=replica: replica(mesh).train(4), 1)
        assert_close(trained[0], expected, 1e-12)

    async def main(mesh):
        return await Replica(mesh, stages(), config, microbatches=2).train(4)

    for trained in await on_ranks(main, 3):
        assert_close(trained, expected, 1e-12)


async def test_late_parameters_are_settled_first():
    """Each tp rank has a part of their gradients; the sum over tp comes before that over dp."""
    events: list[str] = []

    async def main(mesh):
        early, late = [parameter(4, 4), parameter(3)], [parameter(2, 2), parameter(5), parameter(3, 3)]

        async def settle() -> None:
            flat = sync.flat_late(late[:2])
            assert len(flat) == 1
            assert sync.flat_late(late)[0].numel() > flat[0].numel()
            assert len(sync.flat_late([late[0], late[2]])) == 2
            for each in sync.flat_late(late):
                await mesh.tp.all_reduce(each)
            events.append("settled")

        sync = GradientSync(
            mesh, {0: [*early, *late], 1: []}, [1, 0], bucket_bytes=1 << 20, late=late, settle_late=settle
        )
        assert [each.stage for each in sync.buckets] == [0, None]
        for bucket in sync.buckets:
            note(bucket, events)
        for _ in range(2):
            sync.begin()
            for each in (*early, *late[:2]):
                each.grad = torch.full_like(each, 1.0 + mesh.coords.tp)
            sync.stage_done(1)
            sync.stage_done(0)
            await sync.finish()
            assert all((each.grad == 2 * (1 + mesh.coords.tp)).all() for each in early)
            assert all((each.grad == 6).all() for each in late[:2])
            assert not late[2].grad.any()

    await on_ranks(main, 4, dp=2, tp=2)
    assert events[:8] == ["home 0", "home None"] * 4
    assert events.count("settled") == 8


# Early starts.


def note(bucket, events: list, name: object = None) -> None:
    """Have it written down when a bucket is complete."""
    original = bucket.copy_into_bucket

    def copy_into_bucket() -> None:
        events.append(f"home {bucket.stage if name is None else name}")
        original()

    bucket.copy_into_bucket = copy_into_bucket


class Row(nn.Sequential):
    """Layers that write down when the backward has come to them."""

    def __init__(self, events: list, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.events = events

    def forward(self, values):
        for number, layer in enumerate(self):
            values = layer(values)
            values.register_hook(partial(self._came_back, number))
        return values

    def _came_back(self, number: int, gradient: torch.Tensor) -> None:
        self.events.append(f"back {number}")


def normed(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))


def split_backward(loss: torch.Tensor, last: GradientSync | None, events: list[str], *, does_one_before: bool) -> None:
    """The input part, then the weight part. `last`: it is the step's last one, whose events are noted."""
    queue = deque()
    with collecting(queue):
        loss.backward()
    if last is None:
        work_off(queue, [])
        return
    if does_one_before:
        work_off(deque([queue.popleft()]), events)
    events.append("W")
    with last.last_backward(0, split=True):
        work_off(queue, events)


async def events_of(
    make_layers, steps: int = 2, *, split: bool = False, microbatches: int = 1, done_before: tuple[int, ...] = ()
) -> list[list[str]]:
    """What happened in each step on rank 0, with a bucket a layer. `done_before`: in these steps, the first job is done
    while its weight part has not begun."""
    found: list[list[str]] = []

    async def main(mesh):
        torch.manual_seed(1)
        events: list[str] = []
        row = Row(events, *make_layers()).double()
        split_weight_gradients(row)
        parameters = list(row.parameters())
        sync = GradientSync(mesh, {0: parameters}, [0], bucket_bytes=sum(each.nbytes for each in row[0].parameters()))
        for bucket, number in zip(sync.buckets, reversed(range(len(row))), strict=True):
            assert set(map(id, bucket.parameters)) == set(map(id, row[number].parameters()))
            note(bucket, events, number)

        def backward(step: int) -> None:
            sync.begin()
            for microbatch in range(microbatches):
                loss = row(torch.ones(1, 4, dtype=torch.float64) * (1 + mesh.rank)).sum()
                last = sync if microbatch == microbatches - 1 else None
                if split:
                    split_backward(loss, last, events, does_one_before=step in done_before)
                else:
                    with nullcontext() if last is None else last.last_backward(0):
                        loss.backward()
            sync.stage_done(0)

        for step in range(steps):
            await mesh.compute(backward, step)
            await sync.finish()
            both = [each.grad.clone() for each in parameters]
            for each in both:
                await mesh.dp.all_reduce(each, op="max")
            assert all(torch.equal(a, b.grad) for a, b in zip(both, parameters, strict=True)), "not the same sums"
            if mesh.rank == 0:
                found.append(list(events))
            events.clear()

    await on_ranks(main, 2)
    return found


@torch.no_grad()
def work_off(queue: deque, events: list) -> None:
    while queue:
        events.append("job")
        queue.popleft()()


async def test_complete_buckets_start_while_backward_runs_from_the_second_step_on():
    first, *others = await events_of(lambda: [normed() for _ in range(4)], 3)
    assert first == ["back 3", "back 2", "back 1", "back 0", "home 3", "home 2", "home 1", "home 0"]
    # A layer's gradients are there before the backward comes to the one before it.
    assert others == [["back 3", "home 3", "back 2", "home 2", "back 1", "home 1", "back 0", "home 0"]] * 2


async def test_only_the_last_backward_counts():
    """The same with several microbatches; a module that is used twice is complete after both."""

    def layers() -> list[nn.Module]:
        twice = normed()
        return [normed(), nn.Sequential(twice, twice), normed()]

    first, second = await events_of(layers, microbatches=3)
    backs = ["back 2", "back 1", "back 0"]
    assert first == backs * 3 + ["home 2", "home 1", "home 0"]
    assert second == backs * 2 + ["back 2", "home 2", "back 1", "home 1", "back 0", "home 0"]


async def test_the_weight_part_of_a_split_backward():
    """Norms are finished before it begins."""
    first, second = await events_of(lambda: [normed() for _ in range(3)], split=True, microbatches=2)
    backs = ["back 2", "back 1", "back 0"]
    assert first == [*backs, *backs, "W", "job", "job", "job", "home 2", "home 1", "home 0"]
    assert second == [*backs, *backs, "W", "job", "home 2", "job", "home 1", "job", "home 0"]


async def test_a_weight_part_that_was_begun_while_something_else_was_waited_for():
    """It is complete when the stage is done, at the latest: how much was done before differs from step to step."""
    found = await events_of(lambda: [normed() for _ in range(2)], 5, split=True, done_before=(0, 3))
    backs, home = ["back 1", "back 0"], ["home 1", "home 0"]
    assert found == [
        [*backs, "job", "W", "job", *home],  # learned: nothing to wait for
        [*backs, "W", "job", "job", *home],  # but there was
        [*backs, "W", "job", "home 1", "job", "home 0"],
        [*backs, "job", "W", "job", *home],
        [*backs, "W", "job", "home 1", "job", "home 0"],
    ]


class Silent(nn.Module):
    """Whose gradient is added by somebody who does not tell."""

    def __init__(self, knows: bool) -> None:
        super().__init__()
        self.knows = knows
        self.weight, self.linear, self.norm = nn.Parameter(torch.ones(4)), nn.Linear(4, 4), nn.LayerNorm(4, bias=False)

    def forward(self, values):
        return _Scale.apply(self.norm(self.linear(values)), [self.weight], self.weight if self.knows else None)


class _Scale(torch.autograd.Function):
    """Autograd comes to the weight, with nothing to add, if it is among the inputs."""

    @staticmethod
    def forward(ctx, values, hidden, weight):
        ctx.save_for_backward(values)
        ctx.weight = hidden[0]
        return values * hidden[0]

    @staticmethod
    def backward(ctx, gradient):
        weight, added = ctx.weight, (gradient * ctx.saved_tensors[0]).sum(0)

        def add() -> None:
            weight.grad = added if weight.grad is None else weight.grad + added

        defer_weight_grad(add)
        return gradient * weight.detach(), None, None


@pytest.mark.parametrize(("split", "knows"), [(False, False), (True, False), (True, True)])
async def test_what_is_added_without_a_word_waits_for_the_end(split, knows):
    first, *others = await events_of(lambda: [normed(), Silent(knows), normed()], 3, split=split, microbatches=2)
    end = ["home 1", "home 0"]
    assert first[-3:] == ["home 2", *end]
    for found in others:
        assert found[-3:] == ["job" if split else "back 0", *end]
        assert found.index("home 2") < len(found) - 4


class HalfSilent(nn.Module):
    """The Linear tells of its weight's gradient; what is added to that afterwards is not told of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, values):
        weight = self.linear.weight

        def add(gradient: torch.Tensor) -> None:
            weight.grad.add_(gradient)

        values = self.norm(values) * 1
        values.register_hook(add)
        return self.linear(values)


async def test_what_is_added_behind_the_back_waits_for_the_end():
    first, second = await events_of(lambda: [normed(), HalfSilent(), normed()])
    assert first == ["back 2", "back 1", "back 0", "home 2", "home 1", "home 0"]
    assert second == ["back 2", "home 2", "back 1", "back 0", "home 1", "home 0"]


class Sometimes(nn.Module):
    """Uses its layers as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num = normed(), 1

    def forward(self, values):
        for _ in range(self.num):
            values = self.layer(values)
        return values


async def test_a_parameter_that_is_used_more_or_less_often():
    async def main(mesh):
        row = nn.Sequential(normed(), Sometimes(), normed())
        split_weight_gradients(row)
        bucket_bytes = sum(each.nbytes for each in row[0].parameters())
        sync = GradientSync(mesh, {0: list(row.parameters())}, [0], bucket_bytes=bucket_bytes)

        def backward(num: int) -> None:
            row[1].num = num
            sync.begin()
            with sync.last_backward(0):
                row(torch.ones(1, 4)).sum().backward()
            sync.stage_done(0)

        for num in (1, 1, 0, 1):
            await mesh.compute(backward, num)
            await sync.finish()
        with pytest.raises(InvalidCall) as caught:
            await mesh.compute(backward, 2)
        assert str(caught.value) == (
            "stage 0: a parameter (4, 4) is added to 2 times in the step's last backward, but 1 times in those before, "
            "and its bucket is already being reduced. Have the model use it equally often in every step."
        )
        await mesh.world.barrier()
        sync.cancel(caught.value)

    await on_ranks(main, 2)


async def test_one_bucket_a_stage_needs_no_notice():
    async def main(mesh):
        linear = nn.Linear(2, 2)
        sync = GradientSync(mesh, {0: list(linear.parameters())}, [0], bucket_bytes=1 << 20)
        assert linear.weight.on_gradient is None
        assert not post_accumulate_grad_hooks(linear.weight)
        sync.begin()

    await on_ranks(main, 2)


# Failures.


async def test_a_cancelled_step_leaves_nobody_waiting():
    async def main(mesh):
        stages = make_stages(2)
        replica = Replica(mesh, stages, EVERY_OPTIMIZER["sgd"])
        await replica.step(samples(0))
        if mesh.rank == 0:  # in the middle: of two stages, one is on its way
            replica.sync.begin()
            replica.sync.stage_done(1)
            await mesh.world.barrier()
            replica.sync.cancel()
            replica.sync.cancel()
            with pytest.raises(InvalidCall, match="no step is under way"):
                await replica.sync.finish()
        else:
            await mesh.compute(replica.backward_of, samples(1))
            await mesh.world.barrier()
            with pytest.raises(GroupClosed, match=r"rank 0 \(dp=0 tp=0 pp=0\) cancelled the step") as caught:
                await replica.sync.finish()
            assert caught.value.rank == 0
        assert mesh.dp.has_failed
        assert not hasattr(parameters_of(stages)[0], "cast_in_step")

    await on_ranks(main, 3)


async def test_a_step_is_cancelled_where_it_waits():
    """For other replicas, or for late gradients."""
    never = asyncio.Event()

    async def main(mesh):
        given = [parameter(3), parameter(2)]
        sync = GradientSync(
            mesh, {0: given}, [0], bucket_bytes=1 << 20, late=given[1:], settle_late=lambda: waiting.wait()
        )
        waiting = asyncio.Event() if mesh.rank == 0 else never
        waiting.set() if mesh.rank == 0 else None
        sync.begin()
        sync.stage_done(0)
        finishing = asyncio.ensure_future(sync.finish())
        await mesh.world.barrier()
        if mesh.rank == 1:
            finishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await finishing
        else:
            with pytest.raises(GroupClosed, match=r"rank 1 .* cancelled the step"):
                await finishing
        return mesh.dp.has_failed

    assert await on_ranks(main, 2) == [True, True]


async def test_an_engine_that_is_still_at_it_starts_nothing_more():
    async def main(mesh):
        given = [parameter(3)]
        sync = GradientSync(mesh, {0: given}, [0], bucket_bytes=1 << 20)
        sync.begin()
        sync.cancel(ValueError("too bad"))
        sync.stage_done(0)
        await asyncio.sleep(0)
        assert mesh.dp._issuer.under_way == set()
        if mesh.rank == 1:
            await mesh.world.barrier()
            return
        await mesh.world.barrier()
        sync.begin()
        sync.stage_done(0)
        with pytest.raises(GroupClosed, match=r"group dp is closed: .*rank 0 .* failed in the step with ValueError"):
            await sync.finish()

    await on_ranks(main, 2)


async def test_a_replica_that_fails_is_named_in_finish():
    async def main(mesh):
        replica = Replica(mesh, make_stages(1), EVERY_OPTIMIZER["sgd"])
        await replica.step(samples(0))
        if mesh.rank == 1:
            replica.sync.begin()
            replica.sync.cancel(ZeroDivisionError("in the loss"))
            return
        await mesh.compute(replica.backward_of, samples(1))
        with pytest.raises((PeerLost, GroupClosed), match=r"rank 1 .* failed in the step with ZeroDivisionError: in "):
            await replica.sync.finish()

    await on_ranks(main, 2)


async def test_two_syncs_on_the_same_parameters():
    """The newer one counts."""

    async def main(mesh) -> Trained:
        stages = make_stages(2)
        await Replica(mesh, stages, EVERY_OPTIMIZER["sgd"]).train(0)
        return await Replica(mesh, stages, EVERY_OPTIMIZER["sgd"], bucket_bytes=400).train(4)

    expected = plain_loop(make_stages(2), EVERY_OPTIMIZER["sgd"], 4, torch.float64)
    for trained in await on_ranks(main, 2):
        assert_close(trained, expected, 1e-12)
