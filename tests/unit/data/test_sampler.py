"""The order of samples: every pass has each once, replicas share a step, and any step can be the first."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.data.sampler import Permutation, Sampler
from runtime.errors import InvalidCall

QUICK = settings(max_examples=60, deadline=None)
SIZES = st.integers(1, 500)
SEEDS = st.integers(0, 2**63 - 1)


def order(size: int, key: str) -> list[int]:
    return Permutation(size, key)(np.arange(size, dtype=np.uint64)).tolist()


def whole_step(step: int, dp: int, **options: int) -> list[int]:
    return [index for rank in range(dp) for index in Sampler(dp=dp, dp_rank=rank, **options).indices(step)]


@QUICK
@given(size=SIZES, key=st.text())
def test_an_order_has_every_number_once(size, key):
    assert sorted(order(size, key)) == list(range(size))


@QUICK
@given(size=SIZES, key=st.text(), data=st.data())
def test_a_place_of_an_order_is_the_same_alone(size, key, data):
    place = data.draw(st.integers(0, size - 1))
    assert Permutation(size, key)(np.array([place], np.uint64)).tolist() == [order(size, key)[place]]


def test_an_order_never_changes_from_version_to_version():
    assert order(10, "0:0") == [2, 9, 5, 8, 7, 3, 6, 0, 1, 4]
    big = Permutation(10**15, "7:3")(np.array([0, 1, 10**15 - 1], np.uint64))
    assert big.tolist() == [91894719326710, 78255886161378, 725995680674478]


def test_orders_of_a_billion_samples_need_no_memory():
    places = np.arange(10**9 - 1000, 10**9, dtype=np.uint64)
    numbers = Permutation(10**9, "key")(places)
    assert len(set(numbers.tolist())) == 1000
    assert 4e8 < numbers.mean() < 6e8


@pytest.mark.parametrize("size", [2, 3, 5, 16, 17])
def test_every_number_comes_to_every_place_about_equally_often(size):
    counts = np.zeros((size, size))
    for key in range(400):
        counts[np.arange(size), order(size, f"{key}:0")] += 1
    assert np.abs(counts - 400 / size).max() < 5 * (400 / size) ** 0.5


def test_neighbours_are_torn_apart():
    """Of a random order one number in `size` stays beside its neighbour."""
    numbers = np.array(order(10_000, "a"), np.int64)
    assert (np.abs(np.diff(numbers)) == 1).sum() < 12
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05


@QUICK
@given(num_samples=SIZES, share=st.integers(1, 9), dp=st.integers(1, 5), step=st.integers(0, 300), seed=SEEDS)
def test_a_steps_batch_is_the_same_for_every_dp(num_samples, share, dp, step, seed):
    options = {"num_samples": num_samples, "batch_size": share * dp, "seed": seed}
    assert whole_step(step, dp, **options) == whole_step(step, 1, **options)


@QUICK
@given(num_samples=SIZES, share=st.integers(1, 9), dp=st.integers(1, 5), seed=SEEDS, shuffle=st.booleans())
def test_each_pass_has_every_sample_once(num_samples, share, dp, seed, shuffle):
    options = {"num_samples": num_samples, "batch_size": share * dp, "seed": seed, "shuffle": shuffle}
    seen: list[int] = []
    while len(seen) < 3 * num_samples:
        seen += whole_step(len(seen) // (share * dp), dp, **options)
    for start in range(0, 3 * num_samples, num_samples):
        assert sorted(seen[start : start + num_samples]) == list(range(num_samples))


@QUICK
@given(num_samples=st.integers(20, 500), dp=st.integers(1, 5), step=st.integers(0, 300))
def test_replicas_never_share_a_sample_inside_a_pass(num_samples, dp, step):
    first = step * 4 * dp % num_samples
    indices = whole_step(step, dp, num_samples=num_samples, batch_size=4 * dp)
    if first + 4 * dp <= num_samples:
        assert len(set(indices)) == 4 * dp


def test_the_picture_in_the_docstring():
    sampler = Sampler(5, 2, seed=0)
    assert [sampler.indices(step) for step in range(5)] == [[2, 1], [3, 0], [4, 2], [4, 3], [1, 0]]


def test_passes_and_seeds_have_orders_of_their_own():
    def passes(seed: int) -> list[list[int]]:
        sampler = Sampler(100, 100, seed=seed)
        return [sampler.indices(step) for step in range(3)]

    orders = [*passes(0), *passes(1)]
    assert len({tuple(each) for each in orders}) == 6
    assert passes(0) == passes(0)


def test_a_batch_may_be_longer_than_the_data():
    indices = Sampler(3, 8, shuffle=False).indices(1)
    assert indices == [2, 0, 1, 2, 0, 1, 2, 0]


def test_without_shuffling_the_order_is_that_of_the_data():
    assert [Sampler(5, 2, shuffle=False).indices(step) for step in range(3)] == [[0, 1], [2, 3], [4, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples = 0: give at least 1."),
        ({"batch_size": 3, "dp": 2}, "batch_size = 3: give a positive multiple of dp(2)."),
        ({"batch_size": 0}, "batch_size = 0: give a positive multiple of dp(1)."),
        ({"dp": 2, "dp_rank": 2}, "dp_rank = 2: there are 2 replicas, 0 to 1."),
    ],
)
def test_a_sampler_that_cannot_be(options, message):
    with pytest.raises(InvalidCall, match=re.escape(message)):
        Sampler(**{"num_samples": 8, "batch_size": 4, **options})


def test_a_step_before_the_first():
    with pytest.raises(InvalidCall, match="step = -1: steps count from 0"):
        Sampler(8, 4).indices(-1)
