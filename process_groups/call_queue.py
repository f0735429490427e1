"""Runs the calls of one channel in order: briefly on the event loop's thread, otherwise on a thread of its own.

A call is a generator that does this rank's work and yields what it has to wait for. The event loop can therefore start
a call, and the queue's thread can continue it where the loop stopped.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from process_groups.call import Call, Completion
from process_groups.counters import Abandoned, Counter, Patience
from runtime.errors import CommunicationError
from runtime.threads import DaemonThreads

Wait = tuple[Counter, int]
"""A counter and the value it has to reach."""

Steps = Iterator[Wait]
_SHORT_BYTES = 1 << 20  # the event loop moves this much in about 0.2 ms; larger calls are left to the thread
_MIDDLE_BYTES = 16 << 20  # takes a millisecond or two; up to this size the cost of waking the thread matters


@dataclass(frozen=True, slots=True)
class _AwaitHabit:
    """When to expect that the caller awaits the next call immediately, so that waking the thread would waste time."""

    at_once_seconds: float = 0.0003
    """Longest time from a call to an immediate await; with cold caches Python alone takes half of it."""
    num_calls: int = 4
    """Consecutive immediate awaits after which the next one is expected."""
    look_seconds: float = 0.01
    """Calls further apart than this don't count; the thread checks at this interval whether the pattern still holds."""


_HABIT = _AwaitHabit()


def is_short(call: Call) -> bool:
    """Whether the call is small enough to run on the event loop."""
    return _num_bytes(call) <= _SHORT_BYTES


def _num_bytes(call: Call) -> int:
    tensor = call.target if call.target is not None else call.source
    return 0 if tensor is None else tensor.nbytes


_NOTHING: Steps = iter(())


class CallQueue:
    """One channel's calls, in the order they were made."""

    def __init__(
        self,
        name: str,
        patience: Patience,
        is_abandoned: Callable[[], bool],
        explain: Callable[[Call], CommunicationError],
    ) -> None:
        self.patience, self.is_abandoned, self.explain = patience, is_abandoned, explain
        self._tasks: deque[Task] = deque()
        self._failed: list[Task] = []
        """Kept alive, because a peer may still write into their buffers."""
        self._driving = threading.Lock()
        self.ending = threading.Lock()
        self._thread = DaemonThreads(name, limit=1)
        self._thread_is_called = self._kick_is_due = self._is_stopped = False
        self._thread_is_wanted = threading.Event()
        self._is_looked_after = False
        self._num_awaited_at_once = 0
        self._latest_added = -math.inf
        """When the most recently awaited call was made."""

    def add(self, call: Call, steps: Steps, is_short: bool) -> Task:
        """Queue a call. A short call that is first in the queue runs immediately until it has to wait. Longer calls are
        left to the thread, unless the caller is expected to await them before the thread would start."""
        task = Task(self, call, steps)
        if not is_short:
            task.added = time.monotonic() if _num_bytes(call) <= _MIDDLE_BYTES else None
            is_next = not self._tasks
            # Before reading _is_looked_after: the thread clears it first and then runs all queued tasks.
            self._tasks.append(task)
            has_habit = self._is_looked_after and self._num_awaited_at_once >= _HABIT.num_calls
            if has_habit and is_next and task.added is not None:
                self._kick_soon()
            else:
                self.call_thread()
            return task
        if not self._tasks and self._driving.acquire(blocking=False):
            try:
                if task.go_on(0.0):
                    if task.exception() is not None:
                        self._failed.append(task)
                    return task
                self._tasks.append(task)
            finally:
                self._driving.release()
        else:
            self._tasks.append(task)
        self._kick_soon()
        return task

    def add_waiting(self, call: Call, steps: Steps) -> Task:
        """Queue a short call that has started and has to wait."""
        task = Task(self, call, steps)
        self._tasks.append(task)
        self._kick_soon()
        return task

    def note_await(self, added: float, now: float) -> None:
        """Record that a medium-sized call made at `added` is awaited at `now`."""
        is_at_once = now - added < _HABIT.at_once_seconds and added - self._latest_added < _HABIT.look_seconds
        self._num_awaited_at_once = self._num_awaited_at_once + 1 if is_at_once else 0
        self._latest_added = added
        if self._num_awaited_at_once >= _HABIT.num_calls and not self._is_looked_after and not self._is_stopped:
            self._is_looked_after = True
            self._thread.submit(self._look)

    def _look(self) -> None:
        """Runs in the thread while calls are awaited immediately. The thread is not woken for each call but polls, so
        that a call makes progress even if the loop is busy."""
        latest = -math.inf
        self._thread_is_wanted.clear()
        while not (self._thread_is_called or self._is_stopped or self._thread_is_wanted.wait(_HABIT.look_seconds)):
            if self._latest_added == latest:
                break  # no call was awaited since the last check
            latest = self._latest_added
        self._is_looked_after = False
        with self._driving:
            self._drive(math.inf)

    def _kick_soon(self) -> None:
        """Wake the thread in the loop's next iteration if calls are still queued then."""
        if not self._kick_is_due:
            asyncio.get_running_loop().call_soon(self._kick)
            self._kick_is_due = True

    @property
    def is_idle(self) -> bool:
        """Whether a call made now would be first in the queue."""
        return not self._tasks and not self._driving.locked()

    def _kick(self) -> None:
        self._kick_is_due = False
        if self._tasks:
            self.call_thread()

    def go_on(self, end: float) -> bool:
        """Run queued calls until `end`; False if some are left or another thread is running them."""
        if not self._driving.acquire(blocking=False):
            return False
        try:
            return self._drive(end)
        finally:
            self._driving.release()

    def _drive(self, end: float) -> bool:
        while self._tasks:
            task = self._tasks[0]
            if not task.go_on(end):
                return False
            if task.exception() is not None:
                self._failed.append(task)
            self._tasks.popleft()
        return True

    def call_thread(self) -> None:
        if not self._thread_is_called and not self._is_stopped:
            self._thread_is_called = True
            self._thread.submit(self._drive_in_thread)
            self._thread_is_wanted.set()

    def _drive_in_thread(self) -> None:
        self._thread_is_called = False  # before reading the queue, so that later calls wake the thread again
        with self._driving:
            self._drive(math.inf)

    def stop(self) -> None:
        """Make the thread exit after it has run the queued calls."""
        if self._tasks:
            self.call_thread()
        self._is_stopped = True
        self._thread_is_wanted.set()
        self._thread.stop()


class Channel(Protocol):
    """An ordered stream of calls between this rank and its partners, which see each call before its bytes move."""

    def post_at_once(self, call: Call) -> bool:
        """Publish the call to the partners. Does nothing and returns False if one of them is too far behind."""

    @property
    def finish(self) -> Callable[[], None]:
        """A function that marks the oldest unfinished call as finished."""


@dataclass(frozen=True, slots=True)
class Quick:
    """Runs small calls of one kind directly in the caller."""

    queue: CallQueue
    is_next: Callable[[], bool]
    """Whether such a call may run now; True only if no other call is ahead of it."""
    _begin: Callable[[Call], Steps | None]

    def begin(self, call: Call) -> Steps | None:
        """Run the call until it has to wait; returns the remaining steps, or None if it is done."""
        try:
            return self._begin(call)
        except Exception as failed:  # peers have seen the call, so it fails on all ranks
            raise CommunicationError(f"{type(failed).__name__}: {failed}") from failed


class Ended:
    """The Completion of a call that ended while it was made."""

    ended_at = None

    def has_ended(self) -> bool:
        return True

    def ended_well(self, seconds: float) -> bool:
        return True

    def exception(self) -> None:
        return None

    def add_done_callback(self, callback: Callable[[Completion], None], /) -> None:
        callback(self)


ENDED = Ended()


class Task:
    """One call in its queue, and its Completion."""

    __slots__ = (
        "_callbacks", "_error", "_is_inference", "_queue", "_steps", "_waits_for", "added", "call", "ended", "ended_at",
    )  # fmt: skip

    def __init__(self, queue: CallQueue, call: Call, steps: Steps) -> None:
        self._queue, self.call, self._steps = queue, call, steps
        self._is_inference = call.target is not None and call.target.is_inference()
        self._waits_for: Wait | None = None
        self.added: float | None = None
        """When a medium-sized call was added; None for other calls and after the await."""
        self.ended = False
        self.ended_at: float | None = None
        self._error: CommunicationError | None = None
        self._callbacks: list[Callable[[Completion], None]] | None = None

    def go_on(self, end: float) -> bool:
        """Continue the call until `end`; returns whether it has ended."""
        if not self._is_inference:
            return self._go_on(end)
        with torch.inference_mode():  # the mode is per thread, and inference tensors are writable only in it
            return self._go_on(end)

    def _go_on(self, end: float) -> bool:
        queue, wait, error = self._queue, self._waits_for, None
        try:
            if wait is not None and not wait[0].reaches(wait[1], end, queue.patience, queue.is_abandoned):
                return False
            for wait in self._steps:
                if not wait[0].reaches(wait[1], end, queue.patience, queue.is_abandoned):
                    self._waits_for = wait
                    return False
        except Abandoned:
            error = queue.explain(self.call)
        except CommunicationError as failed:
            error = failed
        except Exception as failed:  # a failing tensor operation must end the call, not the thread
            error = CommunicationError(f"{type(failed).__name__}: {failed}")
        self._end(error)
        return True

    def _end(self, error: CommunicationError | None) -> None:
        self._steps = _NOTHING  # releases the tensors that the steps hold
        with self._queue.ending:
            self._error, self.ended_at, self.ended = error, time.monotonic(), True
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)

    def has_ended(self) -> bool:
        return self.ended

    def ended_well(self, seconds: float) -> bool:
        now = time.monotonic() if seconds else 0.0
        if seconds and self.added is not None:
            self._queue.note_await(self.added, now)
            self.added = None
        if not self.ended:
            self._queue.go_on(now + seconds)
        return self.ended and self._error is None

    def exception(self) -> CommunicationError | None:
        return self._error

    def add_done_callback(self, callback: Callable[[Completion], None], /) -> None:
        with self._queue.ending:
            if not self.ended:
                self._callbacks = [*(self._callbacks or ()), callback]
                self._queue.call_thread()
                return
        callback(self)
