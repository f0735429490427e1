"""Event-loop lag: how late a rank's event loop runs its timers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.010, 0.020, 0.050, 0.100, 0.250, 0.500, 1.0, float("inf"))
INTERVAL = 0.05  # seconds: 20 wake-ups a second cost eight ranks on two cores under 1 %


@dataclass(slots=True)
class LagHistogram:
    """Counts per bucket of `BOUNDS` (not cumulative), so that histograms of ranks can be added."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    total: float = 0.0
    worst: float = 0.0

    def observe(self, lag: float) -> None:
        self.counts[next(i for i, bound in enumerate(BOUNDS) if lag <= bound)] += 1
        self.total += lag
        self.worst = max(self.worst, lag)

    def quantile(self, q: float) -> float:
        """Interpolated linearly within a bucket, and never above the worst value; 0 without data."""
        wanted, seen, lower = q * sum(self.counts), 0, 0.0
        for bound, count in zip(BOUNDS, self.counts, strict=True):
            if count and seen + count >= wanted:
                return lower + (wanted - seen) / count * (max(lower, min(bound, self.worst)) - lower)
            seen, lower = seen + count, bound
        return 0.0

    def to_wire(self) -> dict[str, object]:
        """A copy, so that later observations do not change it."""
        return {"counts": [*self.counts], "total": self.total, "worst": self.worst}

    @staticmethod
    def from_wire(fields: Mapping[str, object]) -> LagHistogram:
        """Raises ValueError for anything that `to_wire` could not have written."""
        counts, total, worst = fields.get("counts"), fields.get("total"), fields.get("worst")
        if not (isinstance(counts, list) and len(counts) == len(BOUNDS) and all(map(_is_count, counts))):
            raise ValueError("event-loop lag: counts do not fit the bounds")
        if not (isinstance(total, float) and isinstance(worst, float)) or not all(map(_is_lag, (total, worst))):
            raise ValueError("event-loop lag: total and worst are numbers")
        return LagHistogram(counts, total, worst)


def _is_lag(value: float) -> bool:
    return 0 <= value < math.inf  # false for NaN too


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


class LagMeter:
    """Sets a timer on the running loop again and again, and records how late each one fires."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.histogram = LagHistogram()
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None

    def start(self, also: Callable[[], None] = lambda: None) -> None:
        """`also` is called with each timer, as a sign that the loop is not blocked."""
        self._loop, self._also = asyncio.get_running_loop(), also
        self._arm()

    def _arm(self) -> None:
        due = time.monotonic() + self._interval  # some loops cache their own time during an iteration
        self._timer = self._loop.call_later(self._interval, self._ring, due)

    def _ring(self, due: float) -> None:
        self.histogram.observe(max(0.0, time.monotonic() - due))
        self._also()
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
