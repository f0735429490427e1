"""Calls of one channel, carried out in order: by the event loop's thread for a moment, or else by a thread.

A call is a generator that does its part and yields what it has to wait for. So the event loop's thread can begin a
call, and the queue's thread continues it where the loop had to stop.
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
_SHORT_BYTES = 1 << 20  # the event loop moves these in about 0.2 ms; a thread moves more
_MIDDLE_BYTES = 16 << 20  # moved in a millisecond or two: up to here the cost of waking the thread matters


@dataclass(frozen=True, slots=True)
class _AwaitHabit:
    """When callers are expected to await the next call right away, so that waking the thread would only cost time."""

    at_once_seconds: float = 0.0003
    """From a call to its await; with cold caches Python alone takes half of that."""
    num_calls: int = 4
    """Consecutive calls that were awaited at once."""
    look_seconds: float = 0.01
    """Calls further apart make no habit; the thread looks this often whether there still is one."""


_HABIT = _AwaitHabit()


def is_short(call: Call) -> bool:
    """Whether this rank's part takes so little time that the event loop can do it."""
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
        """Kept, because a peer may still be writing a last piece into their buffers."""
        self._driving = threading.Lock()
        self.ending = threading.Lock()
        self._thread = DaemonThreads(name, limit=1)
        self._thread_is_called = self._kick_is_due = self._is_stopped = False
        self._thread_is_wanted = threading.Event()
        self._is_looked_after = False
        self._num_awaited_at_once = 0
        self._latest_added = -math.inf
        """When the call was made that was awaited last."""

    def add(self, call: Call, steps: Steps, is_short: bool) -> Task:
        """Queue a call. A short one that is next goes ahead at once, as far as it can without waiting. Others are for
        the thread, unless it would come too late anyway because callers use to await them right away."""
        task = Task(self, call, steps)
        if not is_short:
            task.added = time.monotonic() if _num_bytes(call) <= _MIDDLE_BYTES else None
            is_next = not self._tasks
            self._tasks.append(
                task
            )  # before the look at the thread: what is there when it stops looking, it carries out
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
        """Queue a short call that has to wait."""
        task = Task(self, call, steps)
        self._tasks.append(task)
        self._kick_soon()
        return task

    def note_await(self, added: float, now: float) -> None:
        """A call of middle length that was made at `added` is awaited now."""
        is_at_once = now - added < _HABIT.at_once_seconds and added - self._latest_added < _HABIT.look_seconds
        self._num_awaited_at_once = self._num_awaited_at_once + 1 if is_at_once else 0
        self._latest_added = added
        if self._num_awaited_at_once >= _HABIT.num_calls and not self._is_looked_after and not self._is_stopped:
            self._is_looked_after = True
            self._thread.submit(self._look)

    def _look(self) -> None:
        """In the thread: while calls are awaited at once it is not woken for each, but looks now and then, so that
        a call makes progress even if the loop is busy with something else."""
        latest = -math.inf
        self._thread_is_wanted.clear()
        while not (self._thread_is_called or self._is_stopped or self._thread_is_wanted.wait(_HABIT.look_seconds)):
            if self._latest_added == latest:
                break  # no call was awaited since the last look
            latest = self._latest_added
        self._is_looked_after = False
        with self._driving:
            self._drive(math.inf)

    def _kick_soon(self) -> None:
        """Wake the thread for the call unless it is awaited before the loop's next turn."""
        if not self._kick_is_due:
            asyncio.get_running_loop().call_soon(self._kick)
            self._kick_is_due = True

    @property
    def is_idle(self) -> bool:
        """Whether a call that is made now would be the next."""
        return not self._tasks and not self._driving.locked()

    def _kick(self) -> None:
        self._kick_is_due = False
        if self._tasks:
            self.call_thread()

    def go_on(self, end: float) -> bool:
        """Carry calls out until `end`; False when some are left, or when the thread is at it."""
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
        self._thread_is_called = False  # before looking: what comes later calls again
        with self._driving:
            self._drive(math.inf)

    def stop(self) -> None:
        """Let the thread end after what is left to do."""
        if self._tasks:
            self.call_thread()
        self._is_stopped = True
        self._thread_is_wanted.set()
        self._thread.stop()


class Channel(Protocol):
    """Calls that have one order on this rank and on its partners, which see each call before its bytes move."""

    def post_at_once(self, call: Call) -> bool:
        """Show the call to the partners; False, and nothing done, if one of them is too far behind."""

    @property
    def finish(self) -> Callable[[], None]:
        """Show that the oldest call that was not finished is."""


@dataclass(frozen=True, slots=True)
class Quick:
    """How small calls of one sort are carried out where they are made."""

    queue: CallQueue
    is_next: Callable[[], bool]
    """Whether such a call may be carried out now; True only where nothing comes before it."""
    _begin: Callable[[Call], Steps | None]

    def begin(self, call: Call) -> Steps | None:
        """Carry it out as far as possible without waiting; returns what is left to do, if anything."""
        try:
            return self._begin(call)
        except Exception as failed:  # peers have seen the call: it fails for all
            raise CommunicationError(f"{type(failed).__name__}: {failed}") from failed


class Ended:
    """The Completion of a call that was carried out when it was made."""

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
        """When, until it is awaited; of a call of middle length."""
        self.ended = False
        self.ended_at: float | None = None
        self._error: CommunicationError | None = None
        self._callbacks: list[Callable[[Completion], None]] | None = None

    def go_on(self, end: float) -> bool:
        """Whether it has ended."""
        if not self._is_inference:
            return self._go_on(end)
        with torch.inference_mode():  # a thread has its own mode, and such a tensor can be written to in no other
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
        except Exception as failed:  # a failing tensor operation shall end the call, not the thread
            error = CommunicationError(f"{type(failed).__name__}: {failed}")
        self._end(error)
        return True

    def _end(self, error: CommunicationError | None) -> None:
        self._steps = _NOTHING  # with the steps go the tensors that they hold
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
