"""Sends what a rank's recorder holds to the rank's owner, about once a second, while the engine thread computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from monitoring.events.events import RECORD_BYTES
from monitoring.events.recorder import Recorder
from monitoring.messages import Events
from parallel3d.data.batches import QueueDepths
from runtime.control import MAX_MESSAGE_BYTES

INTERVAL = 1.0  # seconds: whoever takes the events wakes up for them, on a core that ranks may want
_PAUSE = 0.005  # seconds between looks whether the engine computes
_MOST = (MAX_MESSAGE_BYTES - 256) * 3 // 4 // RECORD_BYTES  # events of a message, which is base64 and some words
_SOON = 0.1  # seconds, where there was more than may be sent at a time
_MOST_MESSAGES = 4  # at a time: the event loop has other things to do


class Listener(Protocol):
    """Who is told."""

    @property
    def is_behind(self) -> bool:
        """Whether what it was told before still waits to be sent."""

    def send(self, kind: str, **fields: object) -> None:
        """Never waits."""


class EventSender:
    """Of one rank. While the listener is behind, nothing is taken: the recorder forgets the oldest, and counts them."""

    def __init__(
        self,
        recorder: Recorder,
        listener: Listener,
        is_computing: Callable[[], bool],
        queue: QueueDepths | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """is_computing: whether the engine thread is at work, so that nobody waits for the event loop."""
        self._recorder, self._listener, self._is_computing, self._queue = recorder, listener, is_computing, queue
        self._clock, self._dropped = clock, 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on, until `stop`."""
        self._due = self._clock() + INTERVAL
        self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._ring)

    def _ring(self) -> None:
        """Between steps others wait for this rank; but where none comes, as without data, it is told all the same."""
        now, pause = self._clock(), _PAUSE
        if self._is_computing() or now > self._due + INTERVAL:
            pause = _SOON if self.send_some() else INTERVAL
            self._due = now + pause
        self._timer = asyncio.get_running_loop().call_later(pause, self._ring)

    def send_some(self) -> bool:
        """As much as may be sent at a time. Whether there may be more."""
        there_is_more = all(not self._listener.is_behind and self._send_one() for _ in range(_MOST_MESSAGES))
        depth = None if self._queue is None else self._queue.take()
        if depth is not None and self._queue is not None:
            self._listener.send("queue", mean=depth, capacity=self._queue.capacity)
        return there_is_more

    def _send_one(self) -> bool:
        """False where there was nothing."""
        data, dropped = self._recorder.take(_MOST)
        if not data and dropped == self._dropped:
            return False
        self._dropped = dropped
        self._listener.send("events", **Events.to_wire(data, dropped))
        return bool(data)

    def stop(self) -> None:
        """Send what is left, all of it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.send_some()
        while self._send_one():
            pass
