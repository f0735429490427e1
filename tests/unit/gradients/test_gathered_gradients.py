"""Weight gradients of small microbatches, added together: the same sums in fewer products, and nothing is left over."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import parallel3d
from parallel3d.gradients import deferred as weight_gradients
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.stage import Stage
from parallel3d.torch_internals import version_of
from runtime.errors import InvalidCall
from tests.support.pipelines import loss, microbatch, one_process, run_step, stage_module

WIDTH = 6


class Sometimes(nn.Module):
    """The second Linear is used with the first microbatches only, the third has another one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.three.weight = self.one.weight
        self.num_calls = 0

    def forward(self, values):
        self.num_calls += 1
        values = torch.tanh(self.one(values))
        return self.three(self.two(values) if self.num_calls <= 3 else values)


@pytest.fixture
def products(monkeypatch):
    """The rows of each product that was made."""
    found, add_product = [], weight_gradients.add_product

    def noted(weight, gradients, inputs):
        found.append(len(inputs))
        add_product(weight, gradients, inputs)

    monkeypatch.setattr(weight_gradients, "add_product", noted)
    return found


def backwards(stage: Stage, data: list[torch.Tensor], gathered, *, split: bool = False) -> None:
    stage.begin(gathered)
    for number, values in enumerate(data):
        output = stage.forward(number, [values])
        if split:
            stage.input_backward(number, [torch.ones_like(output)])
            stage.weight_backward(number)
        else:
            stage.backward(number, [torch.ones_like(output)])
            stage.release(number)


@pytest.mark.parametrize("split", [False, True])
def test_sums_are_the_same_and_products_fewer(products, split):
    torch.manual_seed(0)
    plain = Sometimes().double()
    own = copy.deepcopy(plain)
    data = [torch.randn(2, 4, WIDTH, dtype=torch.float64) for _ in range(12)]
    for values in data:
        plain(values).sum().backward()
    backwards(Stage(0, 1, own, splits_backward=True), data, range(11), split=split)
    for mine, theirs in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)
    assert sum(products) == (12 + 12 + 3) * 8
    assert len(products) <= 11
    assert max(products) == 64


def test_microbatches_that_do_not_gather_leave_nothing(products):
    own, data = Sometimes(), [torch.randn(4, WIDTH) for _ in range(6)]
    stage = Stage(0, 1, own, splits_backward=True)
    backwards(stage, data, range(4))
    assert products[-2:] == [4, 4]  # the last one's own
    assert sum(products) == (6 + 6 + 3) * 4
    backwards(stage, data, ())
    assert products[-12:] == [4] * 12


def test_linears_take_turns():
    """So that no backward is much longer than others."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    stage, data = Stage(0, 1, layers, splits_backward=True), [torch.randn(16, WIDTH) for _ in range(16)]
    stage.begin(range(16))
    added = []
    for number, values in enumerate(data):
        output = stage.forward(number, [values])
        before = [_version(each.weight.grad) for each in layers]
        stage.backward(number, [torch.ones_like(output)])
        added.append(sum(_version(each.weight.grad) != old for each, old in zip(layers, before, strict=True)))
        stage.release(number)
    assert added == [2] * 16


def _version(gradient):
    return None if gradient is None else version_of(gradient)


@pytest.mark.parametrize("case", ["many rows", "autocast"])
def test_what_gains_nothing_is_added_at_once(products, case):
    linear = nn.Linear(WIDTH, WIDTH)
    stage, rows = Stage(0, 1, linear, splits_backward=True), 33 if case == "many rows" else 4
    stage.begin(range(4))
    for number in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            output = stage.forward(number, [torch.randn(rows, WIDTH)])
        before = _version(linear.weight.grad)
        stage.backward(number, [torch.ones_like(output)])
        assert _version(linear.weight.grad) != before
        stage.release(number)
    assert products == [rows] * 4


def test_what_a_failed_step_has_left_is_forgotten(products):
    linear = nn.Linear(WIDTH, WIDTH)
    nn.init.zeros_(linear.weight)
    stage = Stage(0, 1, nn.Sequential(nn.Linear(WIDTH, WIDTH), linear), splits_backward=True)
    stage.begin(range(3))
    for number in range(2):
        output = stage.forward(number, [torch.ones(2, WIDTH)])
        stage.backward(number, [torch.ones_like(output)])
    assert products == []
    backwards(stage, [torch.ones(2, WIDTH)], ())
    assert products == [2, 2]


def test_an_input_that_is_written_over_is_refused():
    """Before, it was done with when its backward ended."""

    class Scratch(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scratch = nn.Linear(WIDTH, WIDTH), torch.zeros(4, WIDTH)

        def forward(self, values):
            return self.linear(self.scratch.copy_(values))

    stage = Stage(0, 1, Scratch(), splits_backward=True)
    with pytest.raises(InvalidCall, match="memory of its own"):
        backwards(stage, [torch.randn(4, WIDTH) for _ in range(4)], range(3))


def test_a_part_of_something_larger_does_not_keep_all_of_it():
    linear = nn.Linear(WIDTH, WIDTH)
    stage, large = Stage(0, 1, linear, splits_backward=True), torch.randn(2, 1000, WIDTH)
    stage.begin(range(3))
    output = stage.forward(0, [large[:, 0]])
    stage.backward(0, [torch.ones_like(output)])
    (rows,) = stage._gatherer._held.values()
    assert [each.untyped_storage().nbytes() for each in rows._inputs] == [2 * WIDTH * 4]
    large.zero_()  # is the caller's again
    stage.release(0)
    output = stage.forward(3, [torch.ones(2, WIDTH)])
    stage.backward(3, [torch.ones_like(output)])
    assert linear.weight.grad is not None


def test_who_wants_to_be_told_is_told_in_the_last_backward():
    linear, told = nn.Linear(WIDTH, WIDTH), []
    linear.weight.on_gradient = told.append
    stage = Stage(0, 1, linear, splits_backward=True)
    stage.begin(range(3))
    for number in range(4):
        output = stage.forward(number, [torch.randn(2, WIDTH)])
        assert told == []
        stage.backward(number, [torch.ones_like(output)])
        stage.release(number)
    assert told == [True]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
async def test_a_step_of_an_executor(schedule, products):

    async with parallel3d.mesh(pp=1, threads=1) as mesh:
        module = stage_module(0, 1)
        stage = Stage(0, 1, module, splits_backward=True)
        executor = Executor(mesh, build(schedule, 1, 8), {0: stage}, loss)
        expected, model = one_process(1, 8)
        for repetition in (1, 2):
            products.clear()
            step = await run_step(executor)
            assert abs(step.loss - expected) < 1e-12
            for mine, theirs in zip(module.parameters(), model[0].parameters(), strict=True):
                torch.testing.assert_close(mine.grad, repetition * theirs.grad, rtol=0, atol=1e-13)
            num_rows = sum(microbatch(number)[0].numel() for number in range(8))
            num_linears = sum(isinstance(each, nn.Linear) for each in module.modules())
            assert sum(products) == num_linears * num_rows
            assert len(products) < num_linears * 5
            last = microbatch(7)[0].numel()
            assert products[-num_linears:] == [last] * num_linears, "the end waits for the last one's own part only"
