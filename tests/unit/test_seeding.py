"""Random numbers of one rank among those that draw the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel3d.seeding import RankNumbers
from runtime.errors import InvalidCall

CPU = torch.device("cpu")


def dropout(rank, *, of_parts=True):
    module = nn.Dropout(0.5)
    RankNumbers(rank, CPU, lambda _: of_parts).give_to(module)
    return module


def drop(module):
    """Twice, and what the process draws next."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return module(torch.ones(1000)), module(torch.ones(1000)), torch.rand(4)


def test_ranks_drop_different_parts_and_draw_the_same_afterwards():
    (first, second, after), (other, _, also_after) = drop(dropout(0)), drop(dropout(1))
    assert 0.4 < (first != other).float().mean() < 0.6
    assert not torch.equal(first, second)
    assert torch.equal(after, also_after)


def test_ranks_drop_the_same_of_whole_values():
    for mine, others in zip(drop(dropout(0, of_parts=False)), drop(dropout(1, of_parts=False)), strict=True):
        assert torch.equal(mine, others)


def test_a_forward_whose_parts_cannot_be_told_is_refused():
    """It would drop others when it is computed again."""
    with pytest.raises(InvalidCall, match="use_reentrant=False"):
        checkpoint(dropout(1), torch.ones(1000, requires_grad=True), use_reentrant=True)


def test_a_forward_that_is_computed_again_drops_the_same():
    module, values = dropout(1), torch.ones(1000, requires_grad=True)
    kept = checkpoint(module, values, use_reentrant=False)
    module(torch.ones(1000))  # another layer, before the backward
    kept.sum().backward()
    assert torch.equal(values.grad, kept)
