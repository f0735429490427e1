"""Commands of a run's program to all ranks: stop, or use another learning rate. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from runtime.errors import InvalidCall


class Command(NamedTuple):
    """Everything that is commanded at a time; a newer one replaces it."""

    number: int = 0
    """Counts commands; 0: none was given."""
    stops: bool = False
    learning_rate: float | None = None
    """None: as configured."""
    report_bytes: int = 0
    """Bytes per rank of the reports that ranks gather beside the next step (see rank_exchange.py); 0: none."""


class CommandSender:
    """Sends each command to rank 0, and reports the first step that it applies to."""

    def __init__(self, send: Callable[..., object]) -> None:
        """send: takes the fields of a `command` message. It may be lost while rank 0 starts, see `resend`."""
        self._send, self._command = send, Command()
        self._waiting: dict[int, asyncio.Future[int | None]] = {}

    @property
    def stops(self) -> bool:
        """Whether a stop was commanded."""
        return self._command.stops

    def stop(self) -> None:
        """Let all ranks end after the step that they are in."""
        self._change(self._command._replace(stops=True))

    def set_learning_rate(self, rate: float | None) -> asyncio.Future[int | None]:
        """Use this rate, or the configured one. Resolves to the first step with it, or None if the run ends before."""
        self._change(self._command._replace(learning_rate=None if rate is None else float(rate)))
        applied: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting[self._command.number] = applied
        return applied

    def _change(self, command: Command) -> None:
        self._command = command._replace(number=self._command.number + 1)
        self.resend()

    def resend(self) -> None:
        """Send the newest command again, once rank 0 is ready."""
        number, stops, rate, _ = self._command
        self._send(number=number, stops=stops, learning_rate=rate)

    def applied(self, number: int, first: int) -> bool:
        """Ranks apply the command `number` from step `first` on. Returns whether it set a learning rate."""
        done = [each for each in self._waiting if each <= number]
        for each in done:
            _resolve(self._waiting.pop(each), first)
        return bool(done)

    def close(self) -> None:
        """The run has ended: no further command is applied."""
        for waiting in self._waiting.values():
            _resolve(waiting, None)


def check_learning_rate(rate: float | None) -> None:
    """Raises InvalidCall."""
    if rate is not None and not (isinstance(rate, int | float) and 0 <= rate < 1e6):
        raise InvalidCall(f"set_learning_rate: {rate!r}: give a number from 0 to below a million, or None.")


def _resolve(future: asyncio.Future[int | None], value: int | None) -> None:
    if not future.done():  # its waiter may have been cancelled
        future.set_result(value)
