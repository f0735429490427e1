"""Shares of a step's samples: contiguous, complete, even or by speed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.gradient_server.sample_shares import Share, Speeds, by_speed, even

TOTALS = st.integers(0, 10_000)
WORKERS = st.sets(st.integers(0, 99), min_size=1, max_size=12)
SPEED = st.floats(0.01, 1000)


@pytest.mark.parametrize(
    ("total", "workers", "expected"),
    [
        (8, [0, 1], {0: (0, 4), 1: (4, 8)}),
        (10, [0, 1, 2, 3], {0: (0, 2), 1: (2, 4), 2: (4, 6), 3: (6, 10)}),
        (7, [5], {5: (0, 7)}),
        (5, [4, 1], {1: (0, 2), 4: (2, 5)}),
        (1, [0, 1], {0: (0, 0), 1: (0, 1)}),
    ],
)
def test_even_shares_leave_the_remainder_to_the_last(total, workers, expected):
    assert even(total, workers) == expected


@pytest.mark.parametrize(
    ("total", "speeds", "lengths"),
    [
        (10, {0: 9.0, 1: 1.0}, [9, 1]),
        (12, {0: 1.0, 1: 2.0, 2: 3.0}, [2, 4, 6]),
        (7, {0: 1.0, 1: 1.0}, [4, 3]),
        (4, {0: 1000.0, 1: 1.0, 2: 1.0}, [2, 1, 1]),  # everybody has something to do
        (2, {0: 1.0, 1: 1.0, 2: 5.0}, [0, 0, 2]),  # as far as there is
    ],
)
def test_shares_by_speed(total, speeds, lengths):
    assert [share.length for share in by_speed(total, speeds).values()] == lengths


@settings(deadline=None)
@given(TOTALS, WORKERS, st.data())
def test_shares_are_contiguous_and_complete_in_order_of_id(total, workers, data):
    speeds = {worker: data.draw(SPEED) for worker in workers}
    for shares in (even(total, workers), by_speed(total, speeds)):
        assert list(shares) == sorted(workers)
        edges = [0, *(share.end for share in shares.values())]
        assert [share.start for share in shares.values()] == edges[:-1]
        assert edges[-1] == total
        assert edges == sorted(edges)


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(SPEED, min_size=1, max_size=4))
def test_no_other_shares_would_take_less_time(total, speeds):
    shares = by_speed(total, dict(enumerate(speeds)))
    lengths = [share.length for share in shares.values()]
    took = max(length / speed for length, speed in zip(lengths, speeds, strict=True))
    slowest = max(range(len(speeds)), key=lambda i: lengths[i] / speeds[i])
    if total < len(speeds) or lengths[slowest] <= 1:
        return  # nobody is left without a sample, whatever it costs
    for other, speed in enumerate(speeds):
        if other != slowest:
            assert (lengths[other] + 1) / speed >= took * (1 - 1e-9)


def test_a_share_knows_its_length():
    assert Share(3, 7).length == 4


def test_until_everybody_was_measured_shares_are_even():
    speeds = Speeds()
    speeds.note(0, samples=5, seconds=1.0)
    assert speeds.shares(10, [0, 1]) == even(10, [0, 1])


def test_measured_speeds_move_the_samples():
    speeds = Speeds()
    speeds.note(0, samples=5, seconds=1.0)
    speeds.note(1, samples=5, seconds=4.0)
    assert speeds.shares(10, [0, 1]) == {0: (0, 8), 1: (8, 10)}


def test_a_small_gain_is_not_worth_other_shares():
    speeds = Speeds()
    speeds.note(0, samples=500, seconds=1.0)
    speeds.note(1, samples=500, seconds=1.02)
    assert speeds.shares(1000, [0, 1], even(1000, [0, 1])) == even(1000, [0, 1])
    speeds.note(1, samples=500, seconds=9.0)
    assert speeds.shares(1000, [0, 1], even(1000, [0, 1]))[0].length > 550


def test_shares_of_other_workers_are_not_kept():
    speeds = Speeds()
    speeds.note(0, samples=5, seconds=1.0)
    speeds.note(1, samples=5, seconds=1.0)
    assert speeds.shares(10, [0, 1], even(10, [0, 1, 2])) == even(10, [0, 1])


def test_one_slow_step_does_not_decide_alone():
    speeds = Speeds()
    for _ in range(10):
        speeds.note(0, samples=10, seconds=1.0)
        speeds.note(1, samples=10, seconds=1.0)
    speeds.note(1, samples=10, seconds=10.0)
    assert speeds.shares(100, [0, 1])[1].length > 30


def test_who_has_left_is_forgotten_and_no_samples_tell_nothing():
    speeds = Speeds()
    speeds.note(0, samples=0, seconds=1.0)
    speeds.note(0, samples=5, seconds=0.0)
    assert speeds.shares(4, [0]) == even(4, [0])
    speeds.note(0, samples=5, seconds=1.0)
    speeds.note(1, samples=1, seconds=1.0)
    speeds.forget(1)
    assert speeds.shares(10, [0, 1]) == even(10, [0, 1])
