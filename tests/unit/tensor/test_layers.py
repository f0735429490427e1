"""Sharded modules give the loss and the gradients of whole ones: float64, to 1e-12."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch
from torch import nn

import parallel3d
from parallel3d.gradients.deferred import collecting
from parallel3d.gradients.finalize import needs_tp_sum
from parallel3d.tensor.layers import ColumnLinear, RowLinear, ShardSlice, shard_slice_of
from parallel3d.tensor.mappings import TPContext
from runtime.errors import InvalidCall
from tests.support.tensor_models import (
    WIDTH,
    Attention,
    CutModel,
    Mlp,
    Parallel,
    batch,
    check_equal,
    check_model,
    make,
    whole_step,
)
from tests.support.tensor_ranks import in_threads, num_exchanges


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()

    def forward(self, values):
        return values + self.attention(self.norm(values))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slices"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("blocks", "options"),
    [((Mlp,), {}), ((Attended, Mlp), {}), ((Parallel, Parallel), {}), ((Mlp, Mlp), {"tied": True, "bias": False})],
    ids=["mlp", "attention", "parallel", "tied"],
)
def test_models(blocks, options, size, sequence_parallel):
    model = make(*blocks, **options)
    expected = whole_step(copy.deepcopy(model))
    in_threads(size, lambda exchange: check_model(exchange, model, expected, sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slices"])
async def test_through_calls(sequence_parallel):
    """Where no memory is shared."""
    model = make(Attended, Mlp)
    expected = whole_step(copy.deepcopy(model))

    async def main() -> None:
        async with parallel3d.mesh(tp=2) as mesh:
            exchange = mesh.tp.tensor_exchange()
            await mesh.compute(check_model, exchange, model, expected, sequence_parallel=sequence_parallel)

    await parallel3d.in_process(main, ranks=2)


def test_tp_1_changes_nothing():
    model = make(Attended)
    before = list(model.whole.modules())

    def work(exchange):
        with pytest.raises(AssertionError):
            CutModel(model, exchange)  # nothing is applied

    in_threads(1, work)
    assert list(model.whole.modules()) == before


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slices"])
def test_several_microbatches_add_up(sequence_parallel):
    model = make(Attended, Mlp)
    expected = whole_step(copy.deepcopy(model), 0, 1, 2)

    def work(exchange):
        cut = CutModel(copy.deepcopy(model), exchange, sequence_parallel=sequence_parallel)
        losses = [cut.loss(cut.stage(tokens), targets) for tokens, targets in map(batch, (0, 1, 2))]
        for loss in losses:  # all forwards first
            loss.backward()
        check_equal(cut, sum(loss.item() for loss in losses), expected)

    in_threads(2, work)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slices"])
def test_a_split_backward(sequence_parallel):
    model = make(Attended, Parallel)
    expected = whole_step(copy.deepcopy(model), 0, 1)

    def work(exchange):
        cut = CutModel(copy.deepcopy(model), exchange, sequence_parallel=sequence_parallel)
        jobs, total = deque(), 0.0
        for number in (0, 1):
            tokens, targets = batch(number)
            loss = cut.loss(cut.stage(tokens), targets)
            with collecting(jobs):
                loss.backward()
            total += loss.item()
        waiting = [name for name, each in cut.model.whole.named_parameters() if each.grad is None]
        assert {"front.tokens.weight", "head.weight", "blocks.0.attention.q.weight", "blocks.1.down.bias"} <= {*waiting}
        with torch.no_grad():
            for job in jobs:
                job()
        check_equal(cut, total, expected)

    in_threads(2, work)


def test_columns_of_one_input_share_a_sum():
    """An exchange for the embedding, the row and the loss; in backward one for q, k and v, and one for the head."""
    model = make(Attended)
    model.whole.blocks[0].attention.head_norm = nn.Identity()

    def work(exchange):
        cut = CutModel(copy.deepcopy(model), exchange)
        tokens, targets = batch()
        loss = cut.loss(cut.stage(tokens), targets)
        forward = num_exchanges(exchange)
        loss.backward()
        return forward, num_exchanges(exchange) - forward

    assert in_threads(2, work) == [(3, 2), (3, 2)]


def pair(exchange) -> tuple[nn.Sequential, nn.Sequential]:
    """A column and a row, whole and cut."""
    whole = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    generator = torch.Generator().manual_seed(1)  # of its own, for each rank is a thread
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return whole, cut_pair(whole, TPContext(exchange))


def cut_pair(whole: nn.Sequential, tp: TPContext) -> nn.Sequential:
    columns = ShardSlice.of_rank(0, 6, tp.rank, tp.size)
    rows = ShardSlice.of_rank(1, 6, tp.rank, tp.size)
    return nn.Sequential(
        ColumnLinear(tp, whole[0], {"weight": columns, "bias": columns}, path="first"),
        nn.Tanh(),
        RowLinear(tp, whole[2], {"weight": rows}, path="last"),
    )


def test_an_input_that_is_changed_is_another_input():
    def work(exchange):
        whole, _ = pair(exchange)
        columns = ShardSlice.of_rank(0, 6, exchange.rank, 2)
        column = ColumnLinear(
            TPContext(exchange), whole[0], {"weight": columns, "bias": columns}, sequence_parallel=True
        )
        inputs = torch.full((1, 2, 4), float(exchange.rank), dtype=torch.float64)
        with torch.no_grad():
            before, again = column(inputs), column(inputs)
            assert torch.equal(before, again)
            assert num_exchanges(exchange) == 1
            inputs += 1
            after = column(inputs)
        return bool((after != before).all())

    assert in_threads(2, work) == [True, True]


def test_an_input_without_a_gradient_costs_no_sum():
    def work(exchange):
        whole, cut = pair(exchange)
        values = torch.ones(2, 3, 4, dtype=torch.float64)
        whole(values).sum().backward()
        cut(values).sum().backward()
        assert num_exchanges(exchange) == 1
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            mine, theirs = cut.get_parameter(name), whole.get_parameter(name).grad
            own = shard_slice_of(mine)
            torch.testing.assert_close(mine.grad, theirs if own is None else own.of(theirs), rtol=0, atol=1e-12)

    in_threads(2, work)


def test_frozen_weights_get_no_gradient():
    def work(exchange):
        whole, _ = pair(exchange)
        whole[0].requires_grad_(False)
        whole[2].weight.requires_grad_(False)
        cut = cut_pair(whole, TPContext(exchange))
        values = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        cut(values).sum().backward()
        wanted = torch.autograd.grad(whole(values).sum(), [values, whole[2].bias])
        torch.testing.assert_close([values.grad, cut[2].bias.grad], list(wanted), rtol=0, atol=1e-12)
        assert [each.grad for each in (cut[0].weight, cut[0].bias, cut[2].weight)] == [None] * 3
        whole.requires_grad_(False)
        assert not cut_pair(whole, TPContext(exchange))(values.detach()).requires_grad

    in_threads(2, work)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slices"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, sequence_parallel):
    model = make(Attended, Mlp)
    loss, _ = whole_step(copy.deepcopy(model))

    def work(exchange):
        cut = CutModel(copy.deepcopy(model), exchange, sequence_parallel=sequence_parallel)
        with mode():
            tokens, targets = batch()
            number = num_exchanges(exchange)
            assert abs(cut.loss(cut.stage(tokens), targets).item() - loss) < 1e-12 * loss
            exchanges = num_exchanges(exchange) - number
            assert exchanges == (3 + 1 if not sequence_parallel else 3 + 1 + 3), "q, k and v share the joined values"
        loss_again = cut.loss(cut.stage(tokens), targets)
        loss_again.backward()
        return abs(loss_again.item() - loss)

    assert max(in_threads(2, work)) < 1e-12 * loss


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "slices"])
def test_autocast(sequence_parallel):
    """As near to the whole model as that is to itself in float32."""
    model = make(Attended, Mlp, dtype=torch.float32)
    expected = whole_step(copy.deepcopy(model))
    half = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = whole_step(half)
    allowed = max((rounded[1][name] - each).abs().max().item() for name, each in expected[1].items())

    def work(exchange):
        cut = CutModel(copy.deepcopy(model), exchange, sequence_parallel=sequence_parallel)
        tokens, targets = batch()
        with torch.autocast("cpu", torch.bfloat16):
            logits = cut.stage(tokens)
            loss = cut.loss(logits, targets)
        assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        loss.backward()
        assert {each.grad.dtype for each in cut.model.whole.parameters()} == {torch.float32}
        check_equal(cut, expected[0], expected, tolerance=2 * allowed)
        assert abs(loss.item() - expected[0]) < 0.02 * expected[0]

    in_threads(2, work)


def test_gradients_are_added_to_main_grads_and_reported():
    def work(exchange):
        whole, cut = pair(exchange)
        told = []
        for name, parameter in cut.named_parameters():
            parameter.main_grad = torch.full_like(parameter, 7.0)
            parameter.on_gradient = lambda by_hand, name=name: told.append((name, by_hand))
        for _ in range(2):
            values = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
            cut(values).sum().backward()
            whole(values.detach()).sum().backward()
        for name, parameter in cut.named_parameters():
            assert parameter.grad is parameter.main_grad
            wanted, own = whole.get_parameter(name).grad, shard_slice_of(parameter)
            torch.testing.assert_close(parameter.grad, wanted if own is None else own.of(wanted), rtol=0, atol=1e-12)
        return sorted(told)

    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert in_threads(2, work) == [sorted(2 * [(name, True) for name in names])] * 2


def test_two_backwards_through_one_graph():
    def work(exchange):
        whole, cut = pair(exchange)
        for each in (whole, cut):
            total = each(torch.ones(3, 4, dtype=torch.float64, requires_grad=True)).sum()
            total.backward(retain_graph=True)
            total.backward()
        wanted, own = whole[0].weight.grad, shard_slice_of(cut[0].weight)
        torch.testing.assert_close(cut[0].weight.grad, own.of(wanted), rtol=0, atol=1e-12)

    in_threads(2, work)


def test_an_input_is_not_kept():
    def work(exchange):
        _, cut = pair(exchange)
        tp = cut[0].tp
        inputs = torch.ones(3, 4, dtype=torch.float64, requires_grad=True) * 2
        output = cut(inputs)
        assert tp._last is not None
        del inputs
        assert tp._last is None
        output.sum().backward()

    in_threads(2, work)


# What every rank has but uses for its part.


def test_a_parameter_between_columns_and_their_row_gets_all_of_its_gradient():
    model = make(Attended, Attended)
    expected = whole_step(copy.deepcopy(model), 0, 1)
    assert "blocks.0.attention.head_norm.weight" in expected[1]

    def work(exchange):
        cut = CutModel(copy.deepcopy(model), exchange)
        total = 0.0
        for tokens, targets in map(batch, (0, 1)):
            loss = cut.loss(cut.stage(tokens), targets)
            loss.backward()
            total += loss.item()
        check_equal(cut, total, expected)
        assert not any(map(needs_tp_sum, cut.model.whole.parameters()))

    in_threads(3, work)


def test_what_sees_a_slice_of_the_sequence_says_so():
    model = make(Attended, Mlp)

    def work(exchange):
        cut = CutModel(copy.deepcopy(model), exchange, sequence_parallel=True)
        return [name for name, each in cut.model.whole.named_parameters() if needs_tp_sum(each)]

    slices = ["blocks.0.norm", "blocks.0.attention.head_norm", "blocks.1.norm"]
    assert in_threads(2, work)[0] == [f"{name}.{kind}" for name in slices for kind in ("weight", "bias")]


class Gated(nn.Module):
    """Something whole beside the columns."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), gate

    def forward(self, values):
        return values + self.down(self.up(values) * self.gate(values).mean(-1, keepdim=True))


@pytest.mark.parametrize(
    ("gate", "what"),
    [(lambda: nn.Linear(WIDTH, 1), "a Linear or Embedding that is not sharded"),
     (nn.Identity, "replicated values")],
)  # fmt: skip
def test_whole_values_beside_columns_are_refused(gate, what):
    model = make(Mlp, lambda: Gated(gate()))

    def work(exchange):
        cut = CutModel(copy.deepcopy(model), exchange)
        with pytest.raises(InvalidCall) as caught:
            cut.stage(batch()[0])
        return str(caught.value)

    assert in_threads(2, work)[0] == (
        "parallel.tensor_plan: the input of blocks.1.down, which is sharded over the ranks, comes from columns and "
        f"also from {what}, whose gradient would be wrong on every rank. Between columns and their row there may be "
        "parameters that are used directly, such as a norm's. Shard the rest as well, or have all of it replicated."
    )


# Mistakes.


def test_inputs_of_the_wrong_width():
    def work(exchange):
        _, cut = pair(exchange)
        values = torch.ones(3, 5, dtype=torch.float64)
        with pytest.raises(
            InvalidCall, match=r"^first got 5 features, but it has weights for 4\. The input of a column must not be"
        ):
            cut[0](values)
        with pytest.raises(
            InvalidCall, match=r"^last got 5 features, but it has weights for 3\. The input of a row must come from"
        ):
            cut[2](values)

    in_threads(2, work)


def test_weights_that_change_before_the_backward():
    def work(exchange):
        _, cut = pair(exchange)
        for index, path in ((2, "last"), (0, "first")):
            total = cut(torch.ones(3, 4, dtype=torch.float64, requires_grad=True)).sum()
            with torch.no_grad():
                cut[index].weight.add_(1.0)
            with pytest.raises(InvalidCall, match=rf"^the weight of {path} was changed between forward and backward"):
                total.backward()

    in_threads(2, work)


def test_a_sequence_that_does_not_divide():
    model = make(Mlp)

    def work(exchange):
        cut = CutModel(copy.deepcopy(model), exchange, sequence_parallel=True)
        with pytest.raises(InvalidCall) as caught:
            cut.stage(batch(length=7)[0])
        return str(caught.value)

    assert in_threads(2, work)[0] == (
        "parallel.sequence_parallel splits dimension 1 of the input of blocks.0 into 2 slices, but the input is "
        "(2, 7, 12). Set it to false, or give samples of another length."
    )
