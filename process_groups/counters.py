"""Counters in shared memory. Ranks wait for them by spinning briefly and then sleeping on a futex.

A counter has one writer, which stores the new value and wakes every sleeper itself, so no wake-up is lost. Sleepers
also time out regularly, because a dead writer wakes nobody.

Waking costs a system call, so the writer makes it only if a rank is marked as sleeping. A sleeper sets its mark before
it checks the value for the last time, and the writer stores the value before it reads the marks. Memory must keep that
order: the kernel ensures it for the sleeper, a lock for the writer.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from process_groups.arena import Mapping
from runtime.cores import num_cores

_MASK = (1 << 32) - 1
_WAIT, _WAKE, _EVERYBODY = 0, 1, (1 << 31) - 1
_FUTEX = 202  # the system call's number on x86_64
_LONGEST_SLEEP = 0.05  # seconds until a sleeper checks whether the group was aborted
CAN_WAIT = platform.machine() == "x86_64"
"""Only on x86_64 do other cores see stores in order, and is a lock a full fence; Python offers no other fence."""


class Patience(NamedTuple):
    """How long to spin before sleeping: at most about as long as a wake-up takes, 60 µs with cold caches."""

    looks: int
    """Number of reads of the counter without a pause."""
    turns: int
    """Then number of sched_yield calls, with a read after each."""


def patience(num_ranks_here: int) -> Patience:
    """The patience for this many ranks on the host. With more ranks than cores, a waiting rank yields its core at
    once."""
    return Patience(1600, 10) if num_ranks_here <= num_cores() else Patience(0, 100)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_longest_sleep = _Timespec(0, int(_LONGEST_SLEEP * 1e9))


class Sleepers:
    """How many threads of each rank of a group may be asleep: one word per rank, written only by that rank."""

    def __init__(self, mine: memoryview, theirs: Sequence[memoryview]) -> None:
        self._mine, self.theirs = mine, theirs
        self._counting = threading.Lock()

    def only(self, theirs: memoryview) -> Sleepers:
        """The same for a counter that only one peer waits for."""
        found = Sleepers(self._mine, (theirs,))
        found._counting = self._counting
        return found

    def __enter__(self) -> None:
        with self._counting:
            self._mine[0] += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._counting:
            self._mine[0] -= 1


class Abandoned(Exception):
    """The group was aborted while a call waited."""


class Counter:
    """One 64-bit word of an arena."""

    __slots__ = ("_address", "_fence", "_sleepers", "words")

    def __init__(self, mapping: Mapping, offset: int, sleepers: Sleepers) -> None:
        self._sleepers, self._fence = sleepers, threading.Lock()
        self.words = mapping.memory[offset : offset + 8].cast("Q")
        """A one-word view of the value, for fast repeated reads."""
        self._address = ctypes.c_void_p(mapping.address + offset)  # little-endian: the futex is the low half

    @property
    def value(self) -> int:
        return self.words[0]

    def store(self, value: int) -> None:
        """Set the value and wake sleepers. Only the counter's one writer may call it."""
        self.words[0] = value
        with self._fence:  # never contended
            pass
        for sleeping in self._sleepers.theirs:
            if sleeping[0]:
                self.wake()
                return

    def wake(self) -> None:
        """Wake all sleepers, so that they check the value and whether the group was aborted."""
        _syscall(_FUTEX, self._address, _WAKE, _EVERYBODY, None, None, 0)

    def reaches(self, target: int, end: float, patience: Patience, is_abandoned: Callable[[], bool]) -> bool:
        """Wait until the value is at least `target`; False if it isn't by `end` (time.monotonic(); 0: check once).

        Raises Abandoned if `is_abandoned()` while waiting."""
        words, give_way = self.words, os.sched_yield
        if words[0] >= target:
            return True
        if end == 0.0:
            return False
        for _ in range(patience.looks):
            if words[0] >= target:
                return True
        for _ in range(patience.turns):
            give_way()
            if words[0] >= target:
                return True
        while (value := words[0]) < target:
            if is_abandoned():
                raise Abandoned
            left = end - time.monotonic()
            if left <= 0:
                return False
            limit = _longest_sleep if left > _LONGEST_SLEEP else _Timespec(0, int(left * 1e9))
            with self._sleepers:
                _syscall(_FUTEX, self._address, _WAIT, ctypes.c_uint(value & _MASK), ctypes.byref(limit), None, 0)
        return True
