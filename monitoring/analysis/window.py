"""The latest steps of a run as one: what each rank did on average, for rules and pages to look at."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import fmean

from monitoring.analysis.observations import (
    AxisTraffic,
    RankStep,
    RankWindow,
    StageSeconds,
    StepTimes,
    Straggler,
    Window,
)
from monitoring.events.loop_lag import BOUNDS, LagHistogram
from monitoring.events.time_parts import TimeParts, mean_of

NUM_STEPS = 20
_LOWER = (0.0, *BOUNDS[:-1])
LAG_SECONDS = 10.0
"""Ranks report once a second, and run 20 timers in it: so there are some 200 of each rank."""


class LatestSteps:
    """Holds the steps of a window, warm-up left out."""

    def __init__(self, warm_up: int, num_steps: int = NUM_STEPS) -> None:
        self._warm_up = warm_up
        self._steps: deque[StepTimes] = deque(maxlen=num_steps)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, times: StepTimes) -> None:
        if self._warm_up > 0:
            self._warm_up -= 1
        else:
            self._steps.append(times)

    def window(
        self,
        scores: Mapping[int, float],
        stragglers: Sequence[Straggler] = (),
        memory: Mapping[int, int] | None = None,
        lag: Mapping[int, LagHistogram] | None = None,
        queue: Mapping[int, float] | None = None,
    ) -> Window:
        """With what is known besides the steps; memory: the most that each rank had, in bytes."""
        if not self._steps:
            return Window()
        columns = zip(*(step.ranks for step in self._steps), strict=True)
        ranks = {column[0].rank: _mean_rank(column, scores, memory or {}) for column in columns}
        return Window(
            num_steps=len(self._steps),
            first_step=self._steps[0].step,
            last_step=self._steps[-1].step,
            seconds=fmean(step.seconds for step in self._steps),
            ranks=ranks,
            parts=mean_of([step.parts for step in self._steps]),
            traffic=_mean_traffic(self._steps),
            stragglers=tuple(stragglers),
            lag=dict(lag or {}),
            queue=dict(queue or {}),
        )


def _mean_rank(steps: Sequence[RankStep], scores: Mapping[int, float], memory: Mapping[int, int]) -> RankWindow:
    rank = steps[0].rank

    def mean(name: str) -> float:
        return fmean(map(attrgetter(name), steps))

    return RankWindow(
        rank=rank,
        seconds=mean("seconds"),
        parts=TimeParts(tuple(map(fmean, zip(*(step.parts.seconds for step in steps), strict=True)))),
        remainder=mean("remainder"),
        compute_wall=mean("compute_wall"),
        compute_cpu=mean("compute_cpu"),
        core_wait=mean("core_wait"),
        bubble_ratio=mean("bubble_ratio"),
        score=scores.get(rank),
        stages=_mean_stages(steps),
        memory=memory.get(rank),
    )


def _mean_stages(steps: Sequence[RankStep]) -> dict[int, StageSeconds]:
    found: dict[int, list[StageSeconds]] = defaultdict(list)
    for step in steps:
        for stage, seconds in step.stages.items():
            found[stage].append(seconds)
    return {
        stage: StageSeconds(
            sum(each.forward for each in all_of_it) / len(steps),
            sum(each.backward for each in all_of_it) / len(steps),
            sum(each.weight for each in all_of_it) / len(steps),
        )
        for stage, all_of_it in sorted(found.items())
    }


def _mean_traffic(steps: Iterable[StepTimes]) -> tuple[AxisTraffic, ...]:
    sums: dict[tuple[str, str], list[float]] = {}
    count = 0
    for step in steps:
        count += 1
        for each in step.traffic:
            row = sums.setdefault((each.op, each.axis), [0.0, 0.0, 0.0])
            for place, value in enumerate((each.calls, each.num_bytes, each.seconds)):
                row[place] += value
    return tuple(AxisTraffic(*key, *(value / count for value in row)) for key, row in sorted(sums.items()))


class RecentLag:
    """How late ranks' event loops ran their timers lately, from totals that each rank sends now and then.

    A rank's first report only serves to subtract it from later ones: it has the set-up, which holds a loop up."""

    def __init__(self, seconds: float = LAG_SECONDS) -> None:
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
        """By rank, for ranks with recent reports."""
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
