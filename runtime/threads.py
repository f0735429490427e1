"""Threads for calls that may block for long; unlike an executor's, they never keep the process alive."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")

SETTLE_SECONDS = 1.0
"""How long an ending process waits for its threads, in total."""
_all_threads: WeakSet[DaemonThreads] = WeakSet()


class DaemonThreads:
    """Runs each submitted call in its own thread, up to `limit`, reusing idle ones; limit 1 keeps the order."""

    def __init__(self, name: str, limit: int | None = None) -> None:
        self._name, self._limit = name, limit
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_unfinished = 0
        self._serving: list[threading.Thread] = []
        _all_threads.add(self)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            nonlocal function, args
            if not future.set_running_or_notify_cancel():  # cancelled while it was queued
                self._finished_one()
                return
            try:
                result = function(*args)
            except BaseException as error:
                del function, args
                self._finished_one()
                if isinstance(error, StopIteration):  # a future cannot carry it
                    error = RuntimeError("the function raised StopIteration").with_traceback(error.__traceback__)
                future.set_exception(error)
            else:
                del function, args
                self._finished_one()
                future.set_result(result)

        with self._lock:
            self._num_unfinished += 1
            grow = self._num_unfinished > self._num_threads and self._num_threads != self._limit
            self._num_threads += grow
        self._queue.put(work)
        if grow:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._serving.append(thread)
            thread.start()
        return future

    def _finished_one(self) -> None:
        with self._lock:
            self._num_unfinished -= 1

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # it refers to the call's result, which may be large

    def stop(self) -> None:
        """Let the threads end after the submitted calls, without waiting. Nothing may be submitted afterwards."""
        for _ in range(self._num_threads):
            self._queue.put(None)

    def settle(self, seconds: float) -> None:
        """Stop, and wait up to `seconds` for the threads to end."""
        self.stop()
        deadline = time.monotonic() + seconds
        for thread in self._serving:
            thread.join(max(0.0, deadline - time.monotonic()))


@atexit.register
def _settle_all() -> None:
    """End all threads before Python finalises: a thread in torch that waits for the GIL would abort the process then.

    This includes a thread whose call has returned its result and is still releasing its last tensors.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    for threads in list(_all_threads):
        threads.settle(deadline - time.monotonic())
