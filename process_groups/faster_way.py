"""Which of two ways to do the same takes less time here and now, by how long the latest calls took."""

from __future__ import annotations

from collections import deque
from statistics import median

_LATEST = 3  # calls whose median counts: one that was disturbed does not matter
_TRY_EVERY = 32  # calls: the other way may have become the faster one, as a virtual machine's cores move


class FasterWay:
    """For calls of about the same size each, as what fits a cache is another matter."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._num_calls: dict[int, int] = {}

    def is_second(self, num_bytes: int) -> bool:
        """Whether the next call of this size should go the second way."""
        size = num_bytes.bit_length()
        number = self._num_calls[size] = self._num_calls.get(size, 0) + 1
        first, second = (self._latest(size, way) for way in (False, True))
        for way, latest in ((False, first), (True, second)):
            if len(latest) < _LATEST:
                return way
        return (median(second) < median(first)) != (number % _TRY_EVERY == 0)

    def took(self, num_bytes: int, second: bool, seconds: float) -> None:
        self._latest(num_bytes.bit_length(), second).append(seconds / num_bytes)

    def _latest(self, size: int, way: bool) -> deque[float]:
        return self._seconds.setdefault((size, way), deque(maxlen=_LATEST))
