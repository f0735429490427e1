"""Steps are put together from what ranks send in pieces, whatever is missing."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.analysis.timeline import Timeline
from monitoring.events.events import Axis, Event, What
from tests.support.observed import Told


def told(step: int) -> list[Event]:
    return Told(step, start=100.0 + step).add(What.F, 0.5, 0, 0).add(What.OPTIMIZER, 0.5).done()


def numbers(steps: list[dict[int, list[Event]]]) -> list[int]:
    return [events[0][-1].step for events in steps]


def test_a_step_is_handed_on_once_all_ranks_have_ended_it():
    timeline = Timeline(2)
    forward, optimizer, end = told(0)
    assert timeline.take(0, [forward, optimizer]) == []
    assert timeline.take(1, told(0)) == []
    assert timeline.take(0, [end]) == [{0: told(0), 1: told(0)}]
    assert timeline.take(0, told(1)) == []
    assert numbers(timeline.take(1, told(1) + told(2))) == [1]
    assert timeline.incomplete == 0


def test_several_come_at_once_and_in_order():
    timeline = Timeline(2)
    timeline.take(1, told(0) + told(1) + told(2))
    assert numbers(timeline.take(0, told(0) + told(1) + told(2) + told(3))) == [0, 1, 2]


def test_a_step_is_given_up_once_the_missing_rank_has_ended_a_later_one():
    timeline = Timeline(2)
    timeline.take(0, told(0) + told(1) + told(2))
    assert timeline.take(1, told(1)[:-1]) == [], "it may end step 0 yet, for all that is known"
    assert numbers(timeline.take(1, told(1)[-1:])) == [1]
    assert timeline.incomplete == 1
    timeline.take(1, told(0))  # much too late
    assert numbers(timeline.take(1, told(2))) == [2]
    assert timeline.incomplete == 1


def test_the_end_of_a_run_gives_up_what_some_ranks_have_not_ended():
    timeline = Timeline(2)
    timeline.take(0, told(0) + told(1) + told(2))
    timeline.take(1, told(0) + told(1)[:1])
    timeline.flush()
    assert timeline.incomplete == 2
    timeline.flush()
    assert timeline.incomplete == 2


def test_a_step_of_which_events_were_lost_is_given_up_though_it_ends():
    timeline = Timeline(2)
    timeline.take(0, told(0) + told(1) + told(2) + told(3))
    assert numbers(timeline.take(1, told(0) + told(1)[:1])) == [0]
    timeline.lose(1)
    assert timeline.take(1, []) == []
    assert numbers(timeline.take(1, told(1)[-1:] + told(2))) == [2]
    assert timeline.incomplete == 1
    timeline.lose(1)
    assert numbers(timeline.take(1, told(3)[1:])) == []
    assert timeline.incomplete == 2


def test_steps_of_which_all_ranks_ends_were_lost_are_counted():
    timeline = Timeline(2)
    for rank in (0, 1):
        timeline.take(rank, told(4))
        timeline.take(rank, told(8))
    assert timeline.incomplete == 3


def test_a_call_that_is_told_late_counts_in_the_next_step():
    timeline = Timeline(1)
    timeline.take(0, told(0))
    late = Event(What.COLLECTIVE, 0, 100.2, 100.3, axis=Axis.DP, num_bytes=8)
    assert timeline.take(0, [late, Event(What.F, 0, 100.3, 100.4)]) == []
    [step] = timeline.take(0, told(1))
    assert step[0] == [late, *told(1)]


def test_what_was_broken_off_is_forgotten():
    """A step that failed on all ranks is never ended; the next one is."""
    timeline = Timeline(1)
    timeline.take(0, told(3)[:1])
    assert numbers(timeline.take(0, told(4))) == [4]
    assert timeline._open == {0: {}}


def test_a_rank_that_never_ends_a_step_fills_no_memory():
    timeline = Timeline(2)
    for step in range(2000):
        timeline.take(0, told(step)[:1])
    assert len(timeline._open[0]) <= 512
    assert timeline.incomplete == 2000 - 512
    for _ in range(20):
        timeline.take(1, told(5000)[:1] * 10_000)
    assert len(timeline._open[1][5000]) == 1 << 16


def test_a_step_with_very_many_events_still_ends():
    timeline = Timeline(1)
    timeline.take(0, told(0)[:1] * (1 << 17))
    [step] = timeline.take(0, told(0))
    assert len(step[0]) == (1 << 16) + 1
    assert step[0][-1] == told(0)[-1]


def test_steps_older_than_one_that_was_given_up_are_not_waited_for():
    timeline = Timeline(2)
    timeline.take(0, told(0))
    for step in range(1, 514):  # rank 1 ends nothing until it has too much
        timeline.take(1, told(step)[:1])
    assert timeline.incomplete == 1
    timeline.take(0, told(600))
    assert numbers(timeline.take(1, told(600))) == [600]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
def test_however_it_is_cut_every_step_comes_once(world_size: int, num_steps: int, chance: random.Random):
    timeline, ready = Timeline(world_size), []
    waiting = {rank: [event for step in range(num_steps) for event in told(step)] for rank in range(world_size)}
    while any(waiting.values()):
        rank = chance.choice([rank for rank, events in waiting.items() if events])
        size = chance.randint(1, 5)
        ready += timeline.take(rank, waiting[rank][:size])
        del waiting[rank][:size]
    assert numbers(ready) == list(range(num_steps))
    assert all(events == {rank: told(step) for rank in range(world_size)} for step, events in enumerate(ready))
