"""The event loop: uvloop, with an orderly end on signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from runtime.errors import InvalidCall
from runtime.signals import RankSignals

T = TypeVar("T")


def run_on_uvloop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new uvloop; `run` adds the handling of SIGTERM."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on uvloop to its end.

    SIGINT raises KeyboardInterrupt and SIGTERM exits with 143, both after `main` was cancelled, so every `async with`
    and `finally` in it has run. A signal that arrives while the loop itself closes takes effect after that; only a
    second SIGINT interrupts it.
    """
    if asyncio.iscoroutine(main):
        main.close()
        raise InvalidCall("run: give it the function, run(main), not the coroutine, run(main()).")
    with RankSignals() as signals:
        try:
            result = run_on_uvloop(signals.cancelling(main))
        except asyncio.CancelledError:
            if signals.is_terminated:
                raise SystemExit(128 + signal.SIGTERM) from None
            raise
    signals.raise_late()
    return result
