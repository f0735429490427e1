"""Deferred weight gradients have the same values, come later, and are computed once."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.gradients.deferred import (
    add_at_rows,
    add_product,
    add_rows,
    add_to_gradient,
    cast_weight,
    collecting,
    defer_weight_grad,
    on_autograd_grad,
    split_weight_gradients,
)
from runtime.errors import InvalidCall


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in module.parameters()]


class Tied(nn.Module):
    """An embedding whose weight is the head's too, and a Linear that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.twice = nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        values = torch.tanh(self.twice(self.embedding(tokens)))
        return self.head(self.twice(values))


class Frozen(nn.Module):
    """Of one Linear only the bias learns, of the other only the weight; BatchNorm knows nothing of a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.norm = nn.Linear(7, 5), nn.Linear(5, 3), nn.BatchNorm1d(5)
        self.one.weight.requires_grad_(False)
        self.other.bias.requires_grad_(False)

    def forward(self, tokens):
        values = nn.functional.one_hot(tokens, 7).double().flatten(0, 1)
        return self.other(self.norm(self.one(values)))


@pytest.mark.parametrize("make", [Tied, Frozen])
def test_the_same_gradients_later(make):
    torch.manual_seed(1)
    plain = make().double()
    split = make().double()
    split.load_state_dict(plain.state_dict())
    split_weight_gradients(split)
    for number in range(3):
        tokens = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(number))
        plain(tokens).square().sum().backward()
        before, queue = gradients(split), deque()
        with collecting(queue):
            split(tokens).square().sum().backward()
        linears = [each for each in split.modules() if isinstance(each, nn.Linear | nn.Embedding)]
        for each in linears:
            for parameter in each.parameters():
                at = [id(p) for p in split.parameters()].index(id(parameter))
                same = before[at] is parameter.grad or torch.equal(before[at], parameter.grad)
                assert same, "nothing was added yet"
        assert queue
        while queue:
            queue.popleft()()
        for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


def test_without_a_queue_nothing_waits():
    torch.manual_seed(1)
    plain, split = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    split.load_state_dict(plain.state_dict())
    split_weight_gradients(split)
    values = torch.randn(4, 3, dtype=torch.float64)
    for module in (plain, split):
        module(values).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(split), strict=True))


def test_a_function_of_the_users_own_runs_once():
    runs = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values, factor):
            ctx.save_for_backward(values, factor)
            return values * factor

        @staticmethod
        def backward(ctx, gradient):
            values, factor = ctx.saved_tensors
            runs.append("input")

            def weight() -> None:
                runs.append("weight")
                factor.grad = (gradient * values).sum()

            defer_weight_grad(weight)
            return gradient * factor, None

    values, factor = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    queue = deque()
    with collecting(queue):
        Scale.apply(values, factor).sum().backward()
    assert runs == ["input"]
    assert values.grad.tolist() == [2.0] * 3
    queue.popleft()()
    assert (runs, factor.grad.item(), len(queue)) == (["input", "weight"], 3.0, 0)


class Nested(torch.autograd.Function):
    """Its backward runs another one in itself, so often that autograd takes another thread for the innermost."""

    @staticmethod
    def forward(ctx, values, num, innermost):
        ctx.num, ctx.innermost = num, innermost
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.num == 0:
            ctx.innermost()
        else:
            values = torch.ones(1, requires_grad=True)
            with torch.enable_grad():
                Nested.apply(values, ctx.num - 1, ctx.innermost).sum().backward()
        return gradient, None, None


def test_a_backward_in_another_thread_is_split_too():
    """As autograd has one for each GPU."""
    linear, embedding, threads, queue = nn.Linear(3, 2, device="meta"), nn.Embedding(5, 3), [], deque()
    for module in (linear, embedding):
        split_weight_gradients(module)

    def innermost() -> None:
        threads.append(threading.get_ident())
        with torch.enable_grad():
            linear(torch.ones(4, 3, device="meta")).sum().backward()
            embedding(torch.tensor([1, 2])).sum().backward()

    outermost = Nested.apply(torch.ones(1, requires_grad=True), 100, innermost)
    with collecting(queue):
        outermost.backward(retain_graph=True)
    assert len(queue) == 2
    assert linear.weight.grad is embedding.weight.grad is None
    outermost.backward()
    assert len(queue) == 2, "no longer collected"
    assert embedding.weight.grad.sum() == 6
    assert threading.get_ident() not in threads


class Doubled(nn.Linear):
    def forward(self, values):
        return super().forward(values) * 2


@pytest.mark.parametrize("mode", ["derived", "no gradient", "not a leaf", "sparse", "hook", "functorch"])
def test_what_cannot_wait_is_finished_at_once(mode):
    module = (
        nn.Embedding(5, 3, sparse=True) if mode == "sparse" else (Doubled if mode == "derived" else nn.Linear)(3, 3)
    )
    if mode == "not a leaf":
        nn.utils.parametrizations.weight_norm(module)
    if mode == "hook":
        module.weight.register_post_accumulate_grad_hook(lambda _: None)
    split_weight_gradients(module)
    queue = deque()
    values = torch.tensor([1, 2]) if mode == "sparse" else torch.ones(2, 3)
    with collecting(queue), torch.set_grad_enabled(mode != "no gradient"):
        output = torch.func.vmap(module)(values) if mode == "functorch" else module(values)
        if mode != "no gradient":
            output.sum().backward()
    assert not queue
    assert (next(module.parameters()).grad is None) == (mode == "no gradient")


def give_homes(module: nn.Module) -> list[torch.Tensor]:
    """Full of what is not to be added to."""
    for each in module.parameters():
        each.main_grad = torch.full_like(each, torch.nan)
        each.register_post_accumulate_grad_hook(on_autograd_grad)
    return [each.main_grad for each in module.parameters()]


@pytest.mark.parametrize("is_split", [False, True])
def test_gradients_have_homes(is_split):
    torch.manual_seed(1)
    plain, own = Tied().double(), Tied().double()
    own.load_state_dict(plain.state_dict())
    split_weight_gradients(own)
    homes = give_homes(own)
    told = {each: [] for each in own.parameters()}
    for each in own.parameters():
        each.on_gradient = told[each].append
    tokens = torch.randint(0, 7, (2, 5))
    for _ in range(2):
        plain(tokens).square().sum().backward()
        queue = deque()
        with collecting(queue) if is_split else torch.enable_grad():
            own(tokens).square().sum().backward()
        assert bool(queue) == is_split
        with torch.no_grad():
            while queue:
                queue.popleft()()
    for mine, theirs, home in zip(own.parameters(), plain.parameters(), homes, strict=True):
        assert mine.grad is home
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)
    # Two backwards, and each is used twice: the tied weight by embedding and head, the others by both calls.
    assert list(told.values()) == [[True] * 4] * 3


def test_what_autograd_adds_is_told_too():
    norm, told = nn.LayerNorm(3), []
    give_homes(norm)
    norm.weight.on_gradient = told.append
    norm(torch.ones(2, 3)).sum().backward()
    assert told == [False]


def test_a_frozen_anchor_and_values_without_gradient():
    linear = nn.Linear(3, 2).double()
    linear.weight.requires_grad_(False)
    split_weight_gradients(linear)
    linear(torch.ones(2, 4, 3, dtype=torch.float64)).sum().backward()
    assert linear.weight.grad is None
    assert linear.bias.grad.tolist() == [8, 8]


@torch.no_grad()
def test_every_way_to_add():
    rows, inputs = torch.arange(6.0).view(3, 2), torch.arange(12.0).view(3, 4) + 1
    ways = [
        ((2, 4), lambda parameter: add_product(parameter, rows, inputs), rows.t() @ inputs),
        ((2, 4), lambda parameter: add_product(parameter, rows.bfloat16(), inputs.bfloat16()), rows.t() @ inputs),
        ((2,), lambda parameter: add_rows(parameter, rows), rows.sum(0)),
        ((2,), lambda parameter: add_rows(parameter, rows.bfloat16()), rows.sum(0)),
        ((3, 2), lambda parameter: add_to_gradient(parameter, rows.clone()), rows),
        ((3, 2), lambda parameter: add_to_gradient(parameter, rows.bfloat16()), rows),
        ((1, 2), lambda parameter: add_at_rows(parameter, torch.zeros(3, dtype=torch.int64), rows), rows.sum(0)[None]),
    ]
    for shape, add, expected in ways:
        for home in (None, torch.full(shape, torch.nan)):
            parameter, told = nn.Parameter(torch.zeros(shape)), []
            if home is not None:
                parameter.main_grad, parameter.on_gradient = home, told.append
            for number in (1, 2):
                add(parameter)
                assert (parameter.grad.dtype, parameter.grad is home) == (torch.float32, home is not None)
                torch.testing.assert_close(parameter.grad, number * expected, rtol=1e-2, atol=0)
            assert told == ([] if home is None else [True] * 2)


class Called(TorchDispatchMode):
    """The operations that torch carries out in here."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every other"])
@pytest.mark.parametrize(("num_rows", "way"), [(1, "addmv_"), (128, "addmv_"), (129, "sum"), (4000, "sum")])
def test_few_rows_are_added_by_a_product_and_many_by_a_sum(num_rows, way, layout, dtype):
    """Up to 128 rows one call does; the sum of more is more exact."""
    torch.manual_seed(1)
    rows = {
        "contiguous": torch.randn(num_rows, 5, dtype=dtype),
        "transposed": torch.randn(5, num_rows, dtype=dtype).t(),
        "every other": torch.randn(num_rows, 10, dtype=dtype)[:, ::2],
    }[layout]
    bias = nn.Parameter(torch.zeros(5, dtype=dtype))
    bias.grad = before = torch.full((5,), 2.0, dtype=dtype)
    with Called() as called:
        add_rows(bias, rows)
    assert (way in called.names, "addmv_" in called.names) == (True, way == "addmv_")
    assert bias.grad is before
    exact = 2 + rows.double().sum(0)
    torch.testing.assert_close(bias.grad.double(), exact, rtol=0, atol=1e-4 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (6,), (0, 6)])
def test_autocast_gives_what_it_would(dtype, shape):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6, bias=False), nn.Linear(6, 3)).to(dtype)
    own = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6, bias=False), nn.Linear(6, 3)).to(dtype)
    own.load_state_dict(plain.state_dict())
    split_weight_gradients(own)
    values = torch.randn(shape, dtype=dtype)
    inputs = [values.clone().requires_grad_() for _ in range(2)]
    give_homes(own)
    for model, given in zip((plain, own), inputs, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(given)
        assert output.dtype is (torch.bfloat16 if dtype is torch.float32 else dtype)
        output.float().square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for mine, theirs in zip(own.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype is dtype
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-2, atol=2e-2)


def test_autocast_still_knows_how_its_own_copies_were_made():
    linear = nn.Linear(3, 3, bias=False)
    split_weight_gradients(linear)
    values = torch.ones(1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        linear(values)
        nn.functional.linear(values, linear.weight).sum().backward()
    assert linear.weight.grad.tolist() == [[1.0] * 3] * 3


def test_a_cast_weight_is_kept_where_that_is_asked_for():
    weight = nn.Parameter(torch.ones(2, 2))
    assert cast_weight(weight, torch.bfloat16) is not cast_weight(weight, torch.bfloat16)
    weight.cast_in_step = None
    kept = cast_weight(weight, torch.bfloat16)
    assert cast_weight(weight, torch.bfloat16) is kept
    assert cast_weight(weight, torch.float16).dtype is torch.float16
    assert not kept.requires_grad


def test_a_weight_that_was_changed_meanwhile():
    linear = nn.Linear(2, 3)
    split_weight_gradients(linear)
    output = linear(torch.ones(1, 2, requires_grad=True))
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(InvalidCall, match=r"^a Linear's weight \(3, 2\) was changed between forward and backward\.$"):
        output.sum().backward()
