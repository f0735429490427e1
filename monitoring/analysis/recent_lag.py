"""How late the ranks' event loops ran their timers lately, from totals that each rank sends now and then."""

from __future__ import annotations

from collections import defaultdict, deque

from monitoring.events.loop_lag import BOUNDS, LagHistogram

_LOWER = (0.0, *BOUNDS[:-1])
SECONDS = 10.0
"""A rank tells once a second, with 20 timers in each: so a rank's say has some 200 in it."""


class RecentLag:
    """Each rank's first word is what the others are compared with: setting up holds a loop up, and is over."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._before: dict[int, LagHistogram] = {}
        self._news: deque[tuple[float, int, LagHistogram]] = deque()

    def take(self, rank: int, lag: LagHistogram, now: float) -> None:
        """A rank's totals since its start."""
        before, self._before[rank] = self._before.get(rank), lag
        if before is not None and all(a >= b for a, b in zip(lag.counts, before.counts, strict=True)):
            self._news.append((now, rank, _since(lag, before)))
        while self._news and self._news[0][0] < now - self._seconds:
            self._news.popleft()

    def histograms(self, now: float) -> dict[int, LagHistogram]:
        """By rank, of those that have told lately."""
        all_of_them: dict[int, LagHistogram] = defaultdict(LagHistogram)
        for moment, rank, each in self._news:
            if moment >= now - self._seconds and any(each.counts):
                found = all_of_them[rank]
                found.counts = [a + b for a, b in zip(found.counts, each.counts, strict=True)]
                found.total += each.total
                found.worst = max(found.worst, each.worst)
        return dict(all_of_them)


def _since(lag: LagHistogram, before: LagHistogram) -> LagHistogram:
    """The worst is known only if it is the worst of all. Else it lies in the highest bucket, and as high in it as the
    total allows if all others are as low as they may be."""
    counts = [a - b for a, b in zip(lag.counts, before.counts, strict=True)]
    total = lag.total - before.total
    if lag.worst > before.worst:
        return LagHistogram(counts, total, lag.worst)
    bounds = [(low, high) for low, high, count in zip(_LOWER, BOUNDS, counts, strict=True) if count]
    low, high = max(bounds, default=(0.0, 0.0))
    spare = max(0.0, total - sum(low * count for low, count in zip(_LOWER, counts, strict=True)))
    return LagHistogram(counts, total, min(low + spare, high, lag.worst))
