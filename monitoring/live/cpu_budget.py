"""Work that may take a small share of a thread's time: the longer it took, the later it is due again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CpuBudget:
    """Counts processor time: a thread of low priority would otherwise count other threads' time as its own."""

    def __init__(
        self,
        share: float,
        pause: float = 0.0,
        longest: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """share: of a core. pause, longest: seconds between two times at least, and at most."""
        self._share, self._pause, self._longest, self._clock, self._processor = share, pause, longest, clock, processor
        self._next = float("-inf")

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Around the work."""
        started = self._processor()
        try:
            yield
        finally:  # what fails may have taken long, too
            took = self._processor() - started
            self._next = self._clock() + max(self._pause, min(took / self._share, self._longest))
