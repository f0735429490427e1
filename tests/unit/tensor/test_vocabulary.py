"""A cut vocabulary: the cross-entropy of parts of the logits, embeddings, and logits put together again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from parallel3d.models.losses import cross_entropy_sum
from parallel3d.tensor.layers import ColumnLinear, ShardSlice
from parallel3d.tensor.mappings import TPContext
from parallel3d.tensor.vocabulary import (
    VocabEmbedding,
    VocabHead,
    gather_logits,
    vocab_cross_entropy,
)
from runtime.errors import InvalidCall
from tests.support.tensor_ranks import in_threads


def cut_for(exchange, vocabulary: int) -> ShardSlice:
    return ShardSlice.of_rank(0, vocabulary, exchange.rank, exchange.size)


def logits_and_targets(vocabulary: int, dtype=torch.float64, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(3, 4, vocabulary, generator=generator, dtype=torch.float64) * scale
    return logits.to(dtype), torch.randint(0, vocabulary, (3, 4), generator=generator)


def cut_logits(exchange, logits: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What a head gives on this rank that changes nothing, and its input."""
    vocabulary, values = logits.shape[-1], logits.clone().requires_grad_()
    head = nn.Linear(vocabulary, vocabulary, bias=False, dtype=logits.dtype)
    nn.init.eye_(head.weight)
    cut = cut_for(exchange, vocabulary)
    local = VocabHead(TPContext(exchange), head, {"weight": cut})(values)
    return local if mask is None else local.masked_fill(mask[..., cut.start : cut.stop], -math.inf), values


def cut_loss(exchange, logits, targets, mask=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the gradient of the logits for 0.25 of it."""
    local, values = cut_logits(exchange, logits, mask)
    loss = vocab_cross_entropy(local, targets, cut_for(exchange, logits.shape[-1]), TPContext(exchange))
    (loss * 0.25).backward()
    return loss.detach(), values.grad


def whole_loss(logits, targets, mask=None) -> tuple[torch.Tensor, torch.Tensor]:
    whole = logits.clone().requires_grad_()
    shown = whole if mask is None else whole.masked_fill(mask, -math.inf)
    loss = functional.cross_entropy(shown.flatten(0, -2), targets.flatten(), reduction="sum")
    (loss * 0.25).backward()
    return loss.detach(), whole.grad


def check(size: int, logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    wanted, gradient = whole_loss(logits, targets, mask)
    found = in_threads(size, lambda exchange: cut_loss(exchange, logits, targets, mask))
    assert len({loss.item() for loss, _ in found}) == 1, "every rank has the same bits"
    for loss, each in found:
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(each, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocabulary", [4, 11, 24])
def test_cross_entropy(size, vocabulary):
    check(size, *logits_and_targets(vocabulary))


def test_targets_that_are_ignored():
    logits, targets = logits_and_targets(11)
    targets[0], targets[2, 1] = -100, -100
    check(2, logits, targets)
    assert torch.equal(cross_entropy_sum(logits, targets), whole_loss(logits, targets)[0])


def test_a_microbatch_whose_targets_are_all_ignored():
    logits, targets = logits_and_targets(11)
    targets.fill_(-100)
    check(3, logits, targets)
    assert cross_entropy_sum(logits, targets).item() == 0.0


def test_large_logits_and_masked_ones():
    logits, targets = logits_and_targets(12)
    logits[0] *= 1e4
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask[1, :, 6:] = mask[2, :, :5] = True  # all that the second rank has, and most of the first's
    targets[1], targets[2] = targets[1] % 6, 6 + targets[2] % 6
    check(2, logits, targets, mask)


def test_16_bit_logits_are_added_up_in_float32():
    logits, targets = logits_and_targets(11, torch.bfloat16)
    wanted, gradient = whole_loss(logits.float(), targets)
    found = in_threads(2, lambda exchange: cut_loss(exchange, logits, targets))
    assert found[0][0].dtype is torch.float32
    torch.testing.assert_close(found[0][0], wanted)
    assert found[0][1].dtype is torch.bfloat16
    torch.testing.assert_close(found[0][1].float(), gradient, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("target", "shown"), [(11, 11), (-1, -1), (-101, -101), (1000, 1000)])
def test_a_target_that_is_in_no_vocabulary(target, shown):
    logits, targets = logits_and_targets(11)
    targets[0, 0], targets[1, 1] = -100, target

    def work(exchange):
        with pytest.raises(InvalidCall, match=rf"^target {shown} is not in the vocabulary of 11, 0 to 10\.$"):
            cut_loss(exchange, logits, targets)

    in_threads(2, work)


def test_a_second_backward_is_refused():
    logits, targets = logits_and_targets(12)

    def work(exchange):
        local, _ = cut_logits(exchange, logits)
        loss = vocab_cross_entropy(local, targets, cut_for(exchange, 12), TPContext(exchange))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"^a second backward through the cross-entropy"):
            loss.backward()

    in_threads(2, work)


@pytest.mark.parametrize("vocabulary", [12, 11])
def test_logits_put_together(vocabulary):
    logits, _ = logits_and_targets(vocabulary)
    weights = torch.arange(vocabulary, dtype=torch.float64)

    def work(exchange):
        local, values = cut_logits(exchange, logits)
        whole = gather_logits(local, cut_for(exchange, vocabulary), TPContext(exchange))
        assert torch.equal(whole, logits)
        (whole * weights).sum().backward()
        return values.grad

    for gradient in in_threads(3, work):
        assert torch.equal(gradient, weights.expand_as(gradient))


def test_a_parameter_between_the_head_and_the_loss():
    """Such as a temperature."""
    logits, targets = logits_and_targets(11)
    wanted_temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    functional.cross_entropy((logits * wanted_temperature).flatten(0, 1), targets.flatten(), reduction="sum").backward()

    def work(exchange):
        temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        local = cut_logits(exchange, logits)[0] * temperature
        vocab_cross_entropy(local, targets, cut_for(exchange, 11), TPContext(exchange)).backward()
        return temperature.grad

    for found in in_threads(2, work):
        torch.testing.assert_close(found, wanted_temperature.grad, rtol=1e-12, atol=0)


# Embeddings and heads.


def embedding(vocabulary: int = 7, padding: int | None = None) -> nn.Embedding:
    weight = torch.randn(vocabulary, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return nn.Embedding(vocabulary, 4, padding_idx=padding, _weight=weight)


@pytest.mark.parametrize("padding", [None, 0, 6])
@pytest.mark.parametrize("size", [2, 3])
def test_embedding(size, padding):
    tokens = torch.tensor([[0, 6, 3, 3], [5, 6, 6, 1]])
    weights = torch.randn(2, 4, 4, dtype=torch.float64)
    whole = embedding(padding=padding)
    wanted = whole(tokens)
    (wanted * weights).sum().backward()

    def work(exchange):
        cut = cut_for(exchange, 7)
        module = VocabEmbedding(TPContext(exchange), embedding(padding=padding), {"weight": cut})
        found = module(tokens)
        assert torch.equal(found, wanted)
        for _ in range(2):
            (module(tokens) * weights).sum().backward()
        torch.testing.assert_close(module.weight.grad, 2 * cut.of(whole.weight.grad), rtol=0, atol=1e-12)
        with torch.no_grad():
            assert not module(tokens).requires_grad
        assert module(tokens[:0]).shape == (0, 4, 4)

    in_threads(size, work)


@pytest.mark.parametrize(("token", "shown"), [(7, 7), (-1, -1)])
def test_a_token_that_is_in_no_vocabulary(token, shown):
    def work(exchange):
        module = VocabEmbedding(TPContext(exchange), embedding(), {"weight": cut_for(exchange, 7)})
        with pytest.raises(InvalidCall, match=rf"^token {shown} is not in the vocabulary of 7, 0 to 6\.$"):
            module(torch.tensor([3, token]))

    in_threads(2, work)


def test_a_head_is_a_column_that_knows_its_part():
    def work(exchange):
        cut = cut_for(exchange, 7)
        head = VocabHead(TPContext(exchange), nn.Linear(4, 7), {"weight": cut, "bias": cut})
        assert isinstance(head, ColumnLinear)
        return head.shard_slice, head(torch.ones(2, 3, 4)).shape

    assert in_threads(2, work) == [(ShardSlice(0, 0, 4, 7), (2, 3, 4)), (ShardSlice(0, 4, 7, 7), (2, 3, 3))]
