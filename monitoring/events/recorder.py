"""Ring buffer of a rank's events: when it is full, new events overwrite the oldest."""

from __future__ import annotations

import threading
from typing import NamedTuple

from monitoring.events.events import NO_MICROBATCH, NO_STAGE, OPS, RECORD, RECORD_BYTES, STRATEGIES, Axis, What

CAPACITY = 1 << 14  # events: some hundred steps of a deep pipeline, in less than a MiB
_AXES = {axis.label: axis.value for axis in Axis}
_OP_PLACES = {name: place for place, name in enumerate(OPS)}
_STRATEGY_PLACES = {name: place for place, name in enumerate(STRATEGIES)}
_COLLECTIVE = What.COLLECTIVE.value
_pack_into = RECORD.pack_into


class Batch(NamedTuple):
    """Events taken from the recorder, oldest first."""

    data: bytes
    dropped: int
    """Number of events overwritten before they were taken, since the start."""


class Recorder:
    """Thread-safe: the engine thread and the event loop both write to it."""

    __slots__ = ("_buffer", "_capacity", "_dropped", "_lock", "_taken", "_written", "step")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._buffer = bytearray(capacity * RECORD_BYTES)
        self._capacity = capacity
        self._written = self._taken = self._dropped = 0
        self._lock = threading.Lock()
        self.step = 0
        """The current step, for collectives, whose callers do not know it."""

    def record(
        self,
        what: int,
        step: int,
        start: float,
        end: float,
        stage: int = NO_STAGE,
        microbatch: int = NO_MICROBATCH,
        cpu: float = 0.0,
        waited: float = 0.0,
        num_bytes: int = 0,
        axis: int = 0,
        op: int = 0,
        strategy: int = 0,
        calls: int = 1,
    ) -> None:
        """Takes the fields of an `Event` in its order, without building the object. Blocks at most while another thread
        copies a batch."""
        with self._lock:
            written = self._written
            _pack_into(
                self._buffer, written % self._capacity * RECORD_BYTES,
                what, step, start, end, stage, microbatch, cpu, waited, num_bytes, axis, op, strategy, calls,
            )  # fmt: skip
            self._written = written + 1

    def collective(
        self,
        group: str,
        kind: str,
        strategy: str,
        num_bytes: int,
        seconds: float,
        began: float,
        calls: int = 1,
        ended: float | None = None,
    ) -> None:
        """Record calls on a group. For several calls with gaps, `ended` is later than began + seconds."""
        end = began + seconds if ended is None else ended
        self.record(
            _COLLECTIVE, self.step, began, end, NO_STAGE, NO_MICROBATCH, 0.0, seconds, num_bytes,
            _AXES.get(group, 0), _OP_PLACES[kind], _STRATEGY_PLACES.get(strategy, 0), calls,
        )  # fmt: skip

    def take(self, at_most: int = CAPACITY) -> Batch:
        """Remove and return the oldest events."""
        with self._lock:
            oldest = self._written - self._capacity
            if oldest > self._taken:
                self._dropped += oldest - self._taken
                self._taken = oldest
            end = min(self._written, self._taken + at_most)
            data = self._between(self._taken, end)
            self._taken = end
            return Batch(data, self._dropped)

    @property
    def dropped(self) -> int:
        """Number of events lost, as of the latest `take`."""
        return self._dropped

    def latest(self) -> bytes:
        """The latest events, taken or not: as many as the ring holds."""
        with self._lock:
            return self._between(max(0, self._written - self._capacity), self._written)

    def _between(self, first: int, end: int) -> bytes:
        start, stop = (place % self._capacity * RECORD_BYTES for place in (first, end))
        if end - first and stop <= start:
            return bytes(self._buffer[start:] + self._buffer[:stop])
        return bytes(self._buffer[start:stop])
