"""Weight gradients that wait give the same values, later, and once."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from parallel3d.weight_gradients import collecting, later, split_weight_gradients


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

            later(weight)
            return gradient * factor, None

    values, factor = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    queue = deque()
    with collecting(queue):
        Scale.apply(values, factor).sum().backward()
    assert runs == ["input"]
    assert values.grad.tolist() == [2.0] * 3
    queue.popleft()()
    assert (runs, factor.grad.item(), len(queue)) == (["input", "weight"], 3.0, 0)


class Doubled(nn.Linear):
    def forward(self, values):
        return super().forward(values) * 2


@pytest.mark.parametrize("mode", ["derived", "no gradient", "not a leaf", "autocast", "sparse", "hook"])
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
    with (
        collecting(queue),
        torch.set_grad_enabled(mode != "no gradient"),
        torch.autocast("cpu", enabled=mode == "autocast"),
    ):
        output = module(values)
        if mode != "no gradient":
            output.sum().backward()
    assert not queue
    assert (next(module.parameters()).grad is None) == (mode == "no gradient")
