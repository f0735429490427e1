"""Threads for calls that may block for long; unlike an executor's, they never keep a process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """Runs each submitted call in a thread of its own (up to `limit`), reusing idle ones; limit 1 keeps order."""

    def __init__(self, name: str, limit: int | None = None) -> None:
        self._name, self._limit = name, limit
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_unfinished = 0

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            nonlocal function, args
            if not future.set_running_or_notify_cancel():  # cancelled while it waited its turn
                self._finished_one()
                return
            try:
                result = function(*args)
            except BaseException as error:
                del function, args
                self._finished_one()
                if isinstance(error, StopIteration):  # no future can carry one
                    error = RuntimeError("the function raised StopIteration").with_traceback(error.__traceback__)
                future.set_exception(error)
            else:
                # What the call was given goes before its end is known: once all calls have ended, the process may
                # end too, and a destructor of torch's that then waits for the GIL aborts it.
                del function, args
                self._finished_one()
                future.set_result(result)

        with self._lock:
            self._num_unfinished += 1
            grow = self._num_unfinished > self._num_threads and self._num_threads != self._limit
            self._num_threads += grow
        self._queue.put(work)
        if grow:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        return future

    @property
    def num_unfinished(self) -> int:
        """Calls that wait or run."""
        return self._num_unfinished

    def _finished_one(self) -> None:
        with self._lock:
            self._num_unfinished -= 1

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def stop(self) -> None:
        """Let the threads end after what was submitted; does not wait. Nothing may be submitted afterwards."""
        for _ in range(self._num_threads):
            self._queue.put(None)
