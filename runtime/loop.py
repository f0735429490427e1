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
    `async with` and `finally` in it has run. A signal that comes while the loop itself ends is heard after that;
    only a second SIGINT breaks it off.
    """
    if asyncio.iscoroutine(main):
        main.close()
        raise InvalidCall("run: give it the function, run(main), not the coroutine, run(main()).")
    terminated = False
    late: set[int] = set()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: object) -> None:
        if number == signal.SIGINT and number in late:
            raise KeyboardInterrupt
        late.add(number)

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
            signal.signal(signal.SIGTERM, note)
            if before[signal.SIGINT] is signal.default_int_handler:
                signal.signal(signal.SIGINT, note)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(guarded())
    except asyncio.CancelledError:
        if terminated:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if signal.SIGINT in late:
        raise KeyboardInterrupt
    if signal.SIGTERM in late:
        raise SystemExit(128 + signal.SIGTERM)
    return result
