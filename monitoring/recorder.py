"""A rank's events until somebody takes them: a ring that never waits, and forgets the oldest when nobody comes."""

from __future__ import annotations

import threading
from typing import NamedTuple

from monitoring.events import RECORD_BYTES, Event, pack_into

CAPACITY = 1 << 14  # events: some hundred steps of a deep pipeline, in less than a MiB


class Batch(NamedTuple):
    """Events that were taken, oldest first."""

    data: bytes
    dropped: int
    """Events that nobody took in time, since the start."""


class Recorder:
    """Written by the engine thread and the event loop."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._buffer = bytearray(capacity * RECORD_BYTES)
        self._capacity = capacity
        self._written = self._taken = self._dropped = 0
        self._lock = threading.Lock()

    def record(self, event: Event) -> None:
        """Never waits longer than the copying of one batch takes."""
        with self._lock:
            pack_into(self._buffer, self._written % self._capacity * RECORD_BYTES, event)
            self._written += 1

    def take(self, at_most: int = CAPACITY) -> Batch:
        """The oldest that are there, and not again."""
        with self._lock:
            oldest = self._written - self._capacity
            if oldest > self._taken:
                self._dropped += oldest - self._taken
                self._taken = oldest
            end = min(self._written, self._taken + at_most)
            data = self._between(self._taken, end)
            self._taken = end
            return Batch(data, self._dropped)

    def _between(self, first: int, end: int) -> bytes:
        start, stop = (place % self._capacity * RECORD_BYTES for place in (first, end))
        if end - first and stop <= start:
            return bytes(self._buffer[start:] + self._buffer[:stop])
        return bytes(self._buffer[start:stop])
