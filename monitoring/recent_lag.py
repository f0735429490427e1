"""How late the ranks' event loops ran their timers lately, from totals that each rank sends now and then."""

from __future__ import annotations

from collections import deque

from monitoring.loop_lag import BOUNDS, LagHistogram

SECONDS = 10.0
"""A rank tells once a second, with 20 timers in each: so a rank's say has some 200 in it."""


class RecentLag:
    """Each rank's first word is what the others are compared with: setting up holds a loop up, and is over."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._before: dict[int, LagHistogram] = {}
        self._news: deque[tuple[float, LagHistogram]] = deque()

    def take(self, rank: int, lag: LagHistogram, now: float) -> None:
        """A rank's totals since its start."""
        before, self._before[rank] = self._before.get(rank), lag
        if before is not None and all(a >= b for a, b in zip(lag.counts, before.counts, strict=True)):
            self._news.append((now, _since(lag, before)))
        while self._news and self._news[0][0] < now - self._seconds:
            self._news.popleft()

    def histogram(self, now: float) -> LagHistogram | None:
        """All ranks together; None where none has told lately."""
        found = LagHistogram()
        for moment, each in self._news:
            if moment >= now - self._seconds:
                found.counts = [a + b for a, b in zip(found.counts, each.counts, strict=True)]
                found.total += each.total
                found.worst = max(found.worst, each.worst)
        return found if any(found.counts) else None


def _since(lag: LagHistogram, before: LagHistogram) -> LagHistogram:
    """The worst is known by its bucket only, unless it is the worst of all."""
    counts = [a - b for a, b in zip(lag.counts, before.counts, strict=True)]
    highest = max((bound for bound, count in zip(BOUNDS, counts, strict=True) if count), default=0.0)
    return LagHistogram(counts, lag.total - before.total, min(highest, lag.worst))
