"""Counters in shared memory, and how ranks wait for them: a moment awake, then asleep on a futex.

A counter has one writer, which stores the new value and wakes all that sleep on it; no sleeper is elected to wake the
others, so no wake-up is lost. A sleeper still looks again now and then, because a dead writer wakes none.

Waking costs a system call, so a rank says that it sleeps before it looks for the last time, and a writer stores the
value before it looks who sleeps. Both have to happen in that order in memory too: the kernel sees to it for the
sleeper, a lock for the writer.
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
_LONGEST_SLEEP = 0.05  # seconds, then whether the group was aborted
CAN_WAIT = platform.machine() == "x86_64"
"""Only there do other cores see stores in order, and is a lock a fence: Python has nothing else to ask for either."""


class Patience(NamedTuple):
    """How long to look before sleeping: at most about as long as being woken takes, 60 µs with the caches gone cold."""

    looks: int
    """Looks at the counter, without a pause."""
    turns: int
    """Then turns given to others, with a look after each."""


def patience(num_ranks_here: int) -> Patience:
    """For ranks that share this host's cores. Where they don't fit, a peer needs the core more than this one."""
    return Patience(1600, 10) if num_ranks_here <= num_cores() else Patience(0, 100)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_longest_sleep = _Timespec(0, int(_LONGEST_SLEEP * 1e9))


class Sleepers:
    """How many threads of each rank of a group may be asleep: a word a rank, written by that rank alone."""

    def __init__(self, mine: memoryview, theirs: Sequence[memoryview]) -> None:
        self._mine, self.theirs = mine, theirs
        self._counting = threading.Lock()

    def only(self, theirs: memoryview) -> Sleepers:
        """For a counter that one peer waits for."""
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
        """Its value, for those who look often."""
        self._address = ctypes.c_void_p(mapping.address + offset)  # little-endian: its low half is the futex

    @property
    def value(self) -> int:
        return self.words[0]

    def store(self, value: int) -> None:
        """For its one writer."""
        self.words[0] = value
        with self._fence:  # never contended
            pass
        for sleeping in self._sleepers.theirs:
            if sleeping[0]:
                self.wake()
                return

    def wake(self) -> None:
        """Have those who sleep on it look around."""
        _syscall(_FUTEX, self._address, _WAKE, _EVERYBODY, None, None, 0)

    def reaches(self, target: int, end: float, patience: Patience, is_abandoned: Callable[[], bool]) -> bool:
        """Whether it is at `target` or beyond by the moment `end` (of time.monotonic; 0: look once)."""
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
