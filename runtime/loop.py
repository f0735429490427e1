"""The event loop, uvloop, and an orderly end on SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import uvloop

from runtime.errors import InvalidCall

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
    with _Signals() as signals:
        try:
            result = run_on_uvloop(signals.cancelling(main))
        except asyncio.CancelledError:
            if signals.is_terminated:
                raise SystemExit(128 + signal.SIGTERM) from None
            raise
    signals.raise_late()
    return result


class _Signals:
    """SIGINT and SIGTERM during a `run`. Restores the handlers it found."""

    def __init__(self) -> None:
        self.is_terminated = False
        self._late: set[int] = set()
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    async def cancelling(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `main`; SIGTERM cancels it. Afterwards both signals are only noted."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate, task)
        try:
            return await main()
        finally:  # uvloop would leave its own handler, and SIGTERM would be ignored
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._note)
            if self._before[signal.SIGINT] is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._note)

    def _terminate(self, task: asyncio.Task[Any]) -> None:
        self.is_terminated = True
        task.cancel()

    def _note(self, number: int, _: object) -> None:
        if number == signal.SIGINT and number in self._late:
            raise KeyboardInterrupt
        self._late.add(number)

    def raise_late(self) -> None:
        """Let the signals that were only noted take effect."""
        if signal.SIGINT in self._late:
            raise KeyboardInterrupt
        if signal.SIGTERM in self._late:
            raise SystemExit(128 + signal.SIGTERM)
