"""Of two ways the faster one is used, and the other one tried again now and then."""

from __future__ import annotations

from process_groups.faster_way import FasterWay

MANY = 1 << 20


def go(way: FasterWay, num_calls: int, first: float, second: float, num_bytes: int = MANY) -> list[bool]:
    """Which calls went the second way, if a call takes so many seconds each way."""
    gone = []
    for _ in range(num_calls):
        gone.append(way.is_second(num_bytes))
        way.took(num_bytes, gone[-1], second if gone[-1] else first)
    return gone


def test_both_are_tried_and_then_the_faster_one_is_used():
    assert go(FasterWay(), 12, first=1.0, second=2.0) == [False] * 3 + [True] * 3 + [False] * 6
    assert go(FasterWay(), 12, first=2.0, second=1.0) == [False] * 3 + [True] * 9


def test_one_disturbed_call_changes_nothing():
    way = FasterWay()
    go(way, 10, first=1.0, second=2.0)
    assert go(way, 1, first=9.0, second=2.0) == [False]
    assert go(way, 5, first=1.0, second=2.0) == [False] * 5


def test_a_way_that_becomes_slow_is_left_at_once():
    way = FasterWay()
    go(way, 10, first=1.0, second=2.0)
    assert go(way, 5, first=3.0, second=2.0) == [False, False, True, True, True]


def test_a_way_that_becomes_fast_is_noticed_by_the_next_try():
    way = FasterWay()
    assert sum(go(way, 320, first=1.0, second=2.0)) == 3 + 10, "one of 32 calls tries it again"
    gone = go(way, 63, first=1.0, second=0.5)
    assert gone == [False] * 31 + [True] * 32


def test_one_lucky_try_is_not_enough():
    way = FasterWay()
    go(way, 31, first=1.0, second=2.0)
    assert go(way, 1, first=1.0, second=0.5) == [True]
    assert go(way, 10, first=1.0, second=2.0) == [True] * 2 + [False] * 8, "the next two tell"


def test_sizes_apart():
    way = FasterWay()
    go(way, 10, first=1.0, second=2.0)
    assert go(way, 12, first=2.0, second=1.0, num_bytes=2 * MANY) == [False] * 3 + [True] * 9


def test_seconds_count_per_byte():
    way = FasterWay()
    for _ in range(3):
        way.took(2 * MANY - 1, False, 1.9)
        way.took(MANY, True, 1.1)
    assert not way.is_second(MANY)


def test_asking_alone_is_no_call():
    way = FasterWay()
    go(way, 30, first=1.0, second=2.0)
    assert not any(way.is_second(MANY) for _ in range(40))
    assert go(way, 3, first=1.0, second=2.0) == [False, True, False]
