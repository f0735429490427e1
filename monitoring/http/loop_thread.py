"""An event loop in a low-priority daemon thread; a process can exit without waiting for it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

NICENESS = 10
"""Added to the process's niceness: computing ranks come first, but the thread still gets a tenth of a busy core."""
_NICEST = 19


class BackgroundLoop:
    """Starts its thread when constructed, and runs until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # only Linux has a niceness and a policy for each thread
            thread = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(_NICEST, niceness))
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # waking up does not preempt a rank
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_cancel_all(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule a call, from any thread; does nothing after `stop`."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """Only from the loop's own thread."""
        self._loop.call_later(seconds, function, *args)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; only from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, seconds: float) -> None:
        """End the thread, and wait up to `seconds` for it."""
        self.call(self._loop.stop)
        self._thread.join(seconds)


async def _cancel_all(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
