"""An event loop in a thread of its own that gives way to all others, and that no process waits for when it ends."""

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
"""More than the process has: ranks that compute come first, and yet it gets a tenth of a core that they all want."""
_NICEST = 19


class BackgroundLoop:
    """Runs until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # Linux has a niceness and a policy for each thread
            thread = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(_NICEST, niceness))
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # to wake up takes no core from a rank
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_cancel_all(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Soon, from any thread; without effect once it has been stopped."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """From the thread itself."""
        self._loop.call_later(seconds, function, *args)

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """From any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, seconds: float) -> None:
        """End the thread; waits up to so long for it."""
        self.call(self._loop.stop)
        self._thread.join(seconds)


async def _cancel_all(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
