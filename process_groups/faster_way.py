"""Which of two ways to do the same takes less time here and now, by how long the latest calls took."""

from __future__ import annotations

from collections import Counter, deque
from statistics import median

_LATEST = 3  # calls whose median counts: one that was disturbed does not matter
_TRY_EVERY = 32  # calls: the other way may have become the faster one, as a virtual machine's cores move


class FasterWay:
    """For calls of about the same size each, as what fits a cache is another matter."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._num_calls = Counter[int]()

    def is_second(self, num_bytes: int) -> bool:
        """Whether the next call of this size should go the second way."""
        size = num_bytes.bit_length()
        first, second = self._latest(size, False), self._latest(size, True)
        if min(len(first), len(second)) < _LATEST:
            return len(first) == _LATEST
        is_try = (self._num_calls[size] + 1) % _TRY_EVERY == 0
        return (median(second) < median(first)) != is_try

    def took(self, num_bytes: int, second: bool, seconds: float) -> None:
        """A call went that way."""
        size, per_byte = num_bytes.bit_length(), seconds / num_bytes
        own, other = self._latest(size, second), self._latest(size, not second)
        if own and other and per_byte < median(other) <= median(own):
            own.clear()  # it was the slower one, and may be so no more: the next calls tell
        own.append(per_byte)
        self._num_calls[size] += 1

    def _latest(self, size: int, way: bool) -> deque[float]:
        return self._seconds.setdefault((size, way), deque(maxlen=_LATEST))
