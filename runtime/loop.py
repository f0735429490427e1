"""The event loop a rank lives on: uvloop, with orderly ends on SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from runtime.errors import InvalidCall

T = TypeVar("T")


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on uvloop to its end.

    SIGINT raises KeyboardInterrupt and SIGTERM exits with 143, both after `main` was cancelled, so that every
    `async with` and `finally` in it has run.
    """
    if asyncio.iscoroutine(main):
        main.close()
        raise InvalidCall("run: give it the function, run(main), not the coroutine, run(main()).")
    terminated = terminated_late = False
    previous = signal.getsignal(signal.SIGTERM)

    def note(*_: object) -> None:
        nonlocal terminated_late
        terminated_late = True

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None

        def terminate(task: asyncio.Task[T] = task) -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await main()
        finally:  # uvloop would leave its own handler, and the process deaf to SIGTERM
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, note)  # what is left is the loop's own end, which is not to be broken off

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(guarded())
    except asyncio.CancelledError:
        if terminated:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
    if terminated_late:
        raise SystemExit(128 + signal.SIGTERM)
    return result
