"""Which ranks are slow, step after step: by what they do themselves, never by how long a step takes them.

A collective makes all ranks' steps equally long, so each rank's own forwards and backwards are compared, without its
waits for others, and when it comes to where ranks meet. A rank's score is its own speed over what could be expected of
it, the least of four:

| compared with | expected                                                                                 |
|---------------|------------------------------------------------------------------------------------------|
| `peers`       | the fastest rank with the same work                                                      |
| `itself`      | its own best median so far, if no rank with the same work reaches its own, but others do |
| `processor`   | the share of its computing in which the best rank had a core                             |
| `arrival`     | a step without what others wait for it, and nothing that is known of it explains         |

Where a host has more ranks than cores, ranks take turns: there only processor time is compared, and `processor` and
`arrival` not at all.

A rank is named once its score was below 0.67 in three steps on end, and no more after three of 0.8 and above.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median

from monitoring.analysis.facts import RankFacts
from monitoring.analysis.observations import RankStep, StepTimes, Straggler
from monitoring.analysis.totals import WARM_UP

SLOW, FAST = 0.67, 0.8
"""Between the two nothing changes, so that a rank is not named and cleared in turn."""
IN_A_ROW = 3
_MEDIAN_OF = 5  # steps; one that was disturbed does not matter


class StragglerDetector:
    """Fed with each step of the mesh, in order."""

    def __init__(self, warm_up: int = WARM_UP) -> None:
        self._warm_up = warm_up
        self._habits: dict[int, _Habit] = defaultdict(_Habit)
        self._slow: Counter[int] = Counter()
        self._fast: Counter[int] = Counter()
        self._named: dict[int, Straggler] = {}
        self._latest: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=IN_A_ROW))
        self.scores: dict[int, float] = {}
        """Of each rank, 0 to 1: the median of its latest three steps. Empty before one counts."""

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Those that are named now, by rank."""
        return tuple(self._named[rank] for rank in sorted(self._named))

    def take(self, times: StepTimes, ranks: Mapping[int, RankFacts]) -> None:
        if self._warm_up > 0:
            self._warm_up -= 1
            return
        crowded = crowded_hosts(tuple(ranks.values()))
        worst = self._compare(times.ranks, ranks, crowded)
        for rank, (score, compared_with) in worst.items():
            self._latest[rank].append(score)
            self._judge(Straggler(rank, score, compared_with, times.step))
        self.scores = {rank: median(latest) for rank, latest in self._latest.items()}
        if self._named:
            self._name_hosts(ranks)

    def _compare(
        self, steps: Sequence[RankStep], ranks: Mapping[int, RankFacts], crowded: frozenset[str]
    ) -> dict[int, tuple[float, str]]:
        """Of each rank the least score, and what it was compared with."""
        own = {each.rank: _seconds(each, ranks[each.rank], crowded) for each in steps}
        scores = {
            "peers": _against_peers(own, ranks),
            "itself": self._against_habits(own, ranks),
            "processor": _over_best(_core_shares(steps, ranks, crowded)),
            "arrival": {each.rank: _punctuality(each) for each in steps if ranks[each.rank].host not in crowded},
        }
        return {rank: min((found.get(rank, 1.0), name) for name, found in scores.items()) for rank in own}

    def _against_habits(self, own: Mapping[int, float], ranks: Mapping[int, RankFacts]) -> dict[int, float]:
        """Peers say more of a rank than its past does; but if all with the same work slow down, only the past can."""
        best: dict[int, float] = {}
        for rank, seconds in own.items():
            speed, stage = self._habits[rank].speed(seconds), ranks[rank].place.pp
            if speed is not None:
                best[stage] = max(speed, best.get(stage, 0.0))
        scores = _over_best(best)
        return {rank: scores[ranks[rank].place.pp] for rank in own if ranks[rank].place.pp in scores}

    def _judge(self, now: Straggler) -> None:
        rank = now.rank
        self._slow[rank] = self._slow[rank] + 1 if now.score < SLOW else 0
        self._fast[rank] = self._fast[rank] + 1 if now.score >= FAST else 0
        if rank in self._named:
            if self._fast[rank] >= IN_A_ROW:
                del self._named[rank]
            elif now.score < SLOW:
                self._named[rank] = replace(now, since_step=self._named[rank].since_step)
        elif self._slow[rank] >= IN_A_ROW:
            self._named[rank] = replace(now, since_step=now.since_step - IN_A_ROW + 1)

    def _name_hosts(self, ranks: Mapping[int, RankFacts]) -> None:
        """Where every slow rank is on one host, and every rank of that host is slow, it is the host that is."""
        hosts = Counter(facts.host for facts in ranks.values())
        slow = Counter(ranks[rank].host for rank in self._named)
        host = next(iter(slow), None)
        is_host = len(hosts) > 1 and len(slow) == 1 and host is not None and slow[host] == hosts[host]
        for rank, straggler in self._named.items():
            self._named[rank] = replace(straggler, host=host if is_host else None)


class _Habit:
    """How long a rank computes in a step when nothing disturbs it."""

    __slots__ = ("_best", "_latest")

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._best: float | None = None

    def speed(self, seconds: float) -> float | None:
        """Of this step, over its best so far; None before that is known. A rank that beats its best is no faster than
        others reach theirs: it may have had a bad start."""
        best = self._best
        self._latest.append(seconds)
        if len(self._latest) == _MEDIAN_OF:
            usual = median(self._latest)
            self._best = usual if best is None else min(best, usual)
        return None if best is None else min(1.0, best / seconds)


@lru_cache(maxsize=8)  # the same for every step of a run
def crowded_hosts(ranks: tuple[RankFacts, ...]) -> frozenset[str]:
    """Those that have more ranks than cores. What one rank alone may not use, others can."""
    counts, cores = Counter[str](), dict[str, int]()
    for facts in ranks:
        counts[facts.host] += facts.is_cpu
        cores[facts.host] = max(facts.num_cores, cores.get(facts.host, 0))
    return frozenset(host for host, count in counts.items() if 0 < cores[host] < count)


def _seconds(step: RankStep, facts: RankFacts, crowded: frozenset[str]) -> float:
    """Of a rank's own computing; never 0, for all are divided by it."""
    return max(1e-9, step.compute_cpu if facts.host in crowded and facts.is_cpu else step.compute_wall)


def _against_peers(own: Mapping[int, float], ranks: Mapping[int, RankFacts]) -> dict[int, float]:
    least: dict[int, float] = {}
    for rank, seconds in own.items():
        stage = ranks[rank].place.pp
        least[stage] = min(seconds, least.get(stage, seconds))
    return {rank: least[ranks[rank].place.pp] / seconds for rank, seconds in own.items()}


def _core_shares(
    steps: Iterable[RankStep], ranks: Mapping[int, RankFacts], crowded: frozenset[str]
) -> dict[int, float]:
    """How much of its computing each rank had a core for, where that is known and each could have one."""
    found = {}
    for step in steps:
        facts = ranks[step.rank]
        if facts.is_cpu and facts.num_cores and facts.host not in crowded and step.compute_wall > 0:
            found[step.rank] = min(1.0, step.compute_cpu / step.compute_wall)
    return found


def _punctuality(step: RankStep) -> float:
    """What the step would have taken had it come with the others, over what it took."""
    return max(0.0, 1 - step.lateness / step.seconds) if step.seconds > 0 else 1.0


def _over_best(values: Mapping[int, float]) -> dict[int, float]:
    best = max(values.values(), default=0.0)
    return {key: value / best for key, value in values.items()} if best > 0 else {}
