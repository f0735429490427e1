"""Random numbers of one rank among those that draw the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel3d.seeding import OwnDraws, OwnNumbers, RankNumbers, numbers_kept, seed_from_now_on, seeded
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
    check_that_it_drops_the_same_again(dropout(1))


def test_a_forward_that_is_computed_again_drops_the_same_also_beside_other_ranks():
    with OwnDraws():
        check_that_it_drops_the_same_again(nn.Dropout(0.5))
    check_that_it_drops_the_same_again(nn.Dropout(0.5))


def check_that_it_drops_the_same_again(module):
    values = torch.ones(1000, requires_grad=True)
    kept = checkpoint(module, values, use_reentrant=False)
    module(torch.ones(1000))  # another layer, before the backward
    kept.sum().backward()
    assert torch.equal(values.grad, kept)


def test_ranks_in_one_process_draw_as_if_each_were_alone():
    at_once = Barrier(2)

    def draws(seed):
        with OwnDraws():
            seed_from_now_on(seed)
            found = []
            for _ in range(20):
                at_once.wait(10)
                found.append(nn.functional.dropout(torch.ones(100)))
                found.append(torch.rand(10_000))  # which can't be told where to draw from
            with seeded(3):
                found.append(torch.randn(4))
            with numbers_kept():
                torch.rand(())
            return torch.cat([*found, torch.rand(4)])

    before = torch.get_rng_state()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(draws, (1, 1))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    with ThreadPoolExecutor(2) as threads:
        again, other = threads.map(draws, (1, 2))
    assert torch.equal(again, first)
    assert not torch.equal(other, first)


def test_a_rank_that_swaps_its_numbers_leaves_those_that_another_begins_with():
    def swap():
        with OwnDraws():
            module = nn.Dropout(0.0)
            OwnNumbers(1, CPU).give_to(module)
            module(torch.ones(3))

    with seeded(5):
        alone = torch.rand(3), torch.rand(3)
    with seeded(5):
        first, thread = torch.rand(3), Thread(target=swap)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        both = first, torch.rand(3)
    assert all(map(torch.equal, alone, both))
