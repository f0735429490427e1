"""How many batches were ready each time one was asked for: 0 says that steps wait for data."""

from __future__ import annotations


class QueueDepths:
    """Of one rank's batches."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """The most that are loaded ahead."""
        self._sum = self._num = 0

    def note(self, depth: int) -> None:
        """When a batch is asked for."""
        self._sum += depth
        self._num += 1

    def take(self) -> float | None:
        """The mean since it was taken last; None where no batch was asked for."""
        mean = self._sum / self._num if self._num else None
        self._sum = self._num = 0
        return mean
