"""Looks at a gradient server's connections now and then: who is silent, who is stuck, and who should hear from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from runtime.gradient_server.connection import Connection
from runtime.gradient_server.settings import GradientServerSettings
from runtime.gradient_server.state_relay import StateRelay
from runtime.gradient_server.wire.link import CLOSE_SECONDS, LinkLost
from runtime.gradient_server.wire.messages import Reason, WireError

_MOST_SECONDS = 1.0  # between two looks


class Watched(Protocol):
    """What it looks at."""

    @property
    def connections(self) -> Iterable[Connection]: ...

    @property
    def relay(self) -> StateRelay | None: ...

    @property
    def relay_source(self) -> Connection | None: ...

    @property
    def is_ending(self) -> bool: ...

    def give_up(self, connection: Connection, error: BaseException) -> None:
        """Hang up, and count it as lost."""


class Watch:
    """From `start` to `stop`."""

    def __init__(
        self, settings: GradientServerSettings, watched: Watched, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._watched, self._clock = settings, watched, clock
        shortest = min(settings.heartbeat_seconds, settings.timeout_seconds, settings.join_seconds)
        self._every = min(_MOST_SECONDS, shortest / 4)
        self._timer: asyncio.TimerHandle | None = None
        self._looked = clock()

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every, self._ring)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        try:
            self.look()
        finally:
            self.start()

    def look(self) -> None:
        """One look at all of them."""
        now = self._clock()
        # After a standstill of our own, what has come meanwhile was not read yet: nobody is to blame for silence.
        was_deaf, self._looked = now - self._looked > 2 * self._every + 0.5, now
        for connection in list(self._watched.connections):
            has_moved = connection.note_moves(now)
            if has_moved:
                connection.spoke = now
            error = None if was_deaf else self._what_is_wrong(connection, now)
            if error is not None:
                self._watched.give_up(connection, error)
            else:
                self._beat(connection, now)

    def _what_is_wrong(self, connection: Connection, now: float) -> Exception | None:
        settings, peer = self._settings, connection.link.peer
        patience = CLOSE_SECONDS if self._watched.is_ending else settings.timeout_seconds
        if connection.worker is None:
            is_late = now - connection.since > settings.join_seconds
            return WireError(Reason.TOO_SLOW, f"no join within {settings.join_seconds:g} s.") if is_late else None
        if now - connection.moved > patience:
            return LinkLost(f"{peer}: it took nothing of what was sent for {patience:g} s.")
        if now - self._heard(connection, now) > settings.timeout_seconds:
            return LinkLost(f"{peer}: it was not heard for {settings.timeout_seconds:g} s.")
        return None

    def _heard(self, connection: Connection, now: float) -> float:
        """When it was heard last, or could not be: one whose state others are slow to take is not read meanwhile."""
        relay = self._watched.relay
        if relay is None or connection is not self._watched.relay_source:
            return connection.link.last_heard
        return now if relay.is_held_up else max(connection.link.last_heard, relay.last_moved)

    def _beat(self, connection: Connection, now: float) -> None:
        is_idle = connection.outbox.is_empty and not connection.link.bytes_waiting
        if connection.voice is None or not is_idle or self._watched.is_ending:
            return
        if now - connection.spoke >= self._settings.heartbeat_seconds:
            connection.voice.beat()
            connection.spoke = now
