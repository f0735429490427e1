"""What a rank does on SIGINT and SIGTERM: cancel what runs, and end in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class RankSignals:
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
