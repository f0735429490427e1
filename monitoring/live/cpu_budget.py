"""Limits repeated work to a share of a core: the longer it took, the later it is due again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CpuBudget:
    """Measures CPU time: by the wall clock, a low-priority thread would also count the time it waits for a core."""

    def __init__(
        self,
        share: float,
        pause: float = 0.0,
        longest: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """share: of a core. pause, longest: bounds in seconds on the time until the work is due again."""
        self._share, self._pause, self._longest, self._clock, self._processor = share, pause, longest, clock, processor
        self._next = float("-inf")

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._next

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Context in which to do the work; sets when it is due again."""
        started = self._processor()
        try:
            yield
        finally:  # work that fails takes time too
            took = self._processor() - started
            self._next = self._clock() + max(self._pause, min(took / self._share, self._longest))
