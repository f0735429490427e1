"""Counters in shared memory: what a waiter sees, when it sleeps, and that it is always woken."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

import pytest

from process_groups import counters as module
from process_groups.arena import Arena, Mapping, open_peer
from process_groups.counters import Abandoned, Counter, Patience, Sleepers, patience
from tests.support.processes import SECONDS

PLACE = 64
ASLEEP = Patience(looks=0, turns=0)


def counter(mapping: Mapping, offset: int, mine: int = 192, theirs: int = 192) -> Counter:
    """With the places of the words that say who sleeps. One rank that is its own peer needs but one."""
    words = [mapping.memory[place : place + 8].cast("Q") for place in (mine, theirs)]
    return Counter(mapping, offset, Sleepers(words[0], words[1:]))


@pytest.fixture
def counters():
    """The same counter as its owner sees it and as a peer does."""
    arena = Arena(4096, 2)
    peer = open_peer(arena.address_for_peers)
    yield counter(arena, PLACE), counter(peer, PLACE)
    arena.close()


@pytest.fixture
def nobody_looks_again(monkeypatch):
    """A sleeper that nobody wakes sleeps for ever, so that a lost wake-up is not overlooked."""
    monkeypatch.setattr(module, "_LONGEST_SLEEP", 3600.0)
    monkeypatch.setattr(module, "_longest_sleep", module._Timespec(3600, 0))


def never() -> bool:
    return False


def refuse() -> bool:
    raise AssertionError("asked without need")


class Waiter(threading.Thread):
    """Waits in a thread; `outcome` is what came of it."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._wait, self.outcome = wait, None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._wait()
        except Exception as error:
            self.outcome = type(error)

    def result(self) -> object:
        self.join(SECONDS)
        assert not self.is_alive(), "it still waits"
        return self.outcome


def test_a_peer_sees_what_the_owner_stores(counters):
    mine, theirs = counters
    assert theirs.value == 0
    assert list(theirs.words) == [0], "one word, no more"
    mine.store(7)
    assert theirs.value == 7
    assert theirs.reaches(7, math.inf, ASLEEP, refuse)
    assert theirs.reaches(3, 0.0, ASLEEP, refuse)
    assert list(theirs.words) == [7]


def test_a_look_does_not_wait(counters, monkeypatch):
    monkeypatch.setattr(module, "_syscall", refuse)
    monkeypatch.setattr(os, "sched_yield", refuse)
    assert not counters[0].reaches(1, 0.0, Patience(looks=100, turns=100), refuse)


def test_a_wait_ends_in_time(counters):
    end = time.monotonic() + 0.01
    assert not counters[1].reaches(1, end, Patience(looks=5, turns=5), never)
    assert time.monotonic() >= end
    assert not counters[1].reaches(1, time.monotonic() - 1, ASLEEP, never)


@pytest.mark.parametrize("patience", [ASLEEP, Patience(20, 0), Patience(0, 20), Patience(20, 20)])
def test_a_sleeper_is_woken(counters, nobody_looks_again, patience):
    mine, theirs = counters
    waiter = Waiter(lambda: theirs.reaches(3, math.inf, patience, never))
    for value in (1, 2, 3):
        mine.store(value)
    assert waiter.result() is True


def test_all_sleepers_are_woken(counters, nobody_looks_again):
    mine, theirs = counters
    waiters = [Waiter(lambda: theirs.reaches(1, math.inf, ASLEEP, never)) for _ in range(5)]
    mine.store(1)
    assert [waiter.result() for waiter in waiters] == [True] * 5


def test_no_wake_up_is_lost(nobody_looks_again):
    """Two take turns; whoever missed one store would sleep for an hour. (They have one GIL in common, so what a CPU
    does with the order of stores and loads shows between processes only.)"""
    arena = Arena(4096, 2)
    peer = open_peer(arena.address_for_peers)

    def lead(mine: Counter, theirs: Counter) -> bool:
        for number in range(1, 1500):
            mine.store(number)
            assert theirs.reaches(number, math.inf, ASLEEP, never)
        return True

    def follow(mine: Counter, theirs: Counter) -> bool:
        for number in range(1, 1500):
            assert theirs.reaches(number, math.inf, ASLEEP, never)
            mine.store(number)
        return True

    first, second = {"mine": 192, "theirs": 256}, {"mine": 256, "theirs": 192}
    one = Waiter(lambda: lead(counter(arena, 64, **first), counter(peer, 128, **first)))
    other = Waiter(lambda: follow(counter(arena, 128, **second), counter(peer, 64, **second)))
    assert (one.result(), other.result()) == (True, True)
    arena.close()


def test_nobody_is_woken_who_does_not_sleep(counters, monkeypatch):
    mine, theirs = counters
    calls = []
    monkeypatch.setattr(module, "_syscall", lambda *args: calls.append(args[2]))
    mine.store(1)
    assert calls == []
    with theirs._sleepers, theirs._sleepers:
        mine.store(2)
        assert calls == [module._WAKE]
    mine.store(3)
    assert calls == [module._WAKE]


def test_a_rank_sleeps_as_long_as_one_of_its_threads_does(nobody_looks_again):
    arena = Arena(4096, 2)
    word = arena.memory[192:200].cast("Q")
    sleepers = Sleepers(word, [word])
    one, other = (Counter(arena, place, each) for place, each in ((64, sleepers), (128, sleepers.only(word))))
    waiters = [Waiter(lambda counter=counter: counter.reaches(1, math.inf, ASLEEP, never)) for counter in (one, other)]
    while word[0] < 2:
        time.sleep(0)
    one.store(1)
    assert waiters[0].result() is True
    assert word[0] == 1, "the other one still sleeps"
    other.store(1)
    assert waiters[1].result() is True
    assert word[0] == 0
    arena.close()


def test_waiting_beyond_what_a_futex_counts(counters, nobody_looks_again):
    mine, theirs = counters
    mine.store((1 << 32) - 1)
    waiter = Waiter(lambda: theirs.reaches((1 << 32) + 1, math.inf, ASLEEP, never))
    mine.store(1 << 32)
    mine.store((1 << 32) + 1)
    assert waiter.result() is True
    assert theirs.value == (1 << 32) + 1


def test_a_waiter_learns_that_the_group_was_given_up(counters):
    with pytest.raises(Abandoned):
        counters[1].reaches(1, math.inf, Patience(looks=3, turns=3), lambda: True)


def test_a_sleeper_looks_around_when_woken(counters, nobody_looks_again):
    mine, theirs = counters
    is_given_up = False
    waiter = Waiter(lambda: theirs.reaches(1, math.inf, ASLEEP, lambda: is_given_up))
    is_given_up = True
    while waiter.is_alive():  # it may not be asleep yet
        mine.wake()
    assert waiter.result() is Abandoned


def test_a_sleeper_looks_around_by_itself(counters):
    """Its writer may be dead."""
    looks = 0

    def third_time() -> bool:
        nonlocal looks
        looks += 1
        return looks == 3

    began = time.monotonic()
    with pytest.raises(Abandoned):
        counters[1].reaches(1, math.inf, ASLEEP, third_time)
    assert time.monotonic() - began >= 2 * 0.9 * module._LONGEST_SLEEP


ALONE, CROWDED = Patience(looks=1600, turns=10), Patience(looks=0, turns=100)


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, ALONE), (4, ALONE), (5, CROWDED), (64, CROWDED)])
def test_ranks_that_share_cores_give_way_at_once(monkeypatch, num_ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert patience(num_ranks) == expected


def test_turns_let_others_run(counters, monkeypatch):
    mine, theirs = counters
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if turns == 4:
            mine.store(1)

    monkeypatch.setattr(os, "sched_yield", turn)
    assert theirs.reaches(1, math.inf, Patience(looks=20, turns=20), refuse)
    assert turns == 4


class CountedLooks:
    """A counter's word that counts who looks, and changes at some look."""

    def __init__(self, changes_at: float) -> None:
        self.num_looks, self._changes_at = 0, changes_at

    def __getitem__(self, index: int) -> int:
        assert index == 0
        self.num_looks += 1
        return int(self.num_looks >= self._changes_at)


@pytest.mark.parametrize(
    ("changes_at", "num_turns"),
    [
        (1, 0),  # the first look
        (2, 0),
        (21, 0),  # the last of 20 without a pause
        (22, 1),  # after the first turn
        (51, 30),
        (52, 30),  # the look before sleeping
    ],
)
def test_looks_then_turns_and_no_sleep(counters, monkeypatch, changes_at, num_turns):
    turns = []
    monkeypatch.setattr(os, "sched_yield", lambda: turns.append(1))
    monkeypatch.setattr(module, "_syscall", refuse)
    theirs = counters[1]
    theirs.words = words = CountedLooks(changes_at)
    assert theirs.reaches(1, math.inf, Patience(looks=20, turns=30), refuse)
    assert (words.num_looks, len(turns)) == (changes_at, num_turns)


def test_sleep_comes_after_the_last_look(counters, monkeypatch):
    turns, sleeps = [], []
    monkeypatch.setattr(os, "sched_yield", lambda: turns.append(1))
    monkeypatch.setattr(module, "_syscall", lambda *args: sleeps.append(args[2]))
    theirs = counters[1]
    theirs.words = words = CountedLooks(changes_at=53)
    assert theirs.reaches(1, math.inf, Patience(looks=20, turns=30), never)
    assert (words.num_looks, len(turns), sleeps) == (53, 30, [module._WAIT])
