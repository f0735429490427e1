"""How long to wait before the next try: twice as long each time, and never as long as others who began with us."""

from __future__ import annotations

import random

FIRST_SECONDS, MOST_SECONDS = 0.1, 5.0


class Backoff:
    """The waits between tries that failed one after the other."""

    def __init__(self, first: float = FIRST_SECONDS, most: float = MOST_SECONDS) -> None:
        self._first, self._most, self._num_failed = first, most, 0

    def reset(self) -> None:
        """A try went well."""
        self._num_failed = 0

    def next(self) -> float:
        """Seconds: between a half and the whole of what doubling gives, so that a thousand workers whose server came
        back do not all knock at once."""
        longest: float = min(self._most, self._first * 2 ** min(self._num_failed, 32))
        self._num_failed += 1
        return longest * random.uniform(0.5, 1.0)
