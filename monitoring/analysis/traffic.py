"""What ranks moved, by op and axis of the mesh: calls, bytes, how long they took, and how fast. Messages between stages
are `send` on the axis pp."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from monitoring.events.collectives import KINDS as OPS
from monitoring.events.collectives import CollectiveTotal, Key, bus_factor
from monitoring.events.events import AXES, SENDS, STRATEGIES, Axis, Event, What

BOUNDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, float("inf"))
"""Seconds of a call: from a small exchange in shared memory to a large one between hosts."""
_COLLECTIVE = int(What.COLLECTIVE)
_SENDS = frozenset(map(int, SENDS))

Where = tuple[str, str]
"""Op and axis."""
_BETWEEN_STAGES: Where = ("send", Axis.PP.label)


@dataclass(slots=True)
class CallTotals:
    """Calls of one op on one axis, all ranks together, since the start."""

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))
    """Calls by how long they took: each within a bound of `BOUNDS`, and above the one before. Calls that were told
    together count with their mean."""

    def add(self, calls: int, num_bytes: int, seconds: float) -> None:
        if calls > 0:
            self.calls += calls
            self.num_bytes += num_bytes
            self.seconds += seconds
            self.counts[bisect_left(BOUNDS, seconds / calls)] += calls

    def merge(self, other: CallTotals) -> None:
        self.calls += other.calls
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]


class _RankTraffic:
    """Of one rank, and from one source."""

    __slots__ = ("bandwidths", "totals")

    def __init__(self) -> None:
        self.totals: dict[Where, CallTotals] = {}
        self.bandwidths: dict[tuple[str, str, str], float] = {}
        """Bus bandwidth of the latest report that had such calls."""

    def add(self, where: Where, calls: int, num_bytes: int, seconds: float) -> None:
        totals = self.totals.get(where)
        if totals is None:
            totals = self.totals[where] = CallTotals()
        totals.add(calls, num_bytes, seconds)


class Traffic:
    """Ranks tell of their calls twice: as events, with each call's time, and as totals, which scripts without a
    coordinator send too. Of a rank that sends events those count, and its totals don't."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """sizes: the number of ranks along each axis, the `world` too."""
        self._sizes = dict(sizes)
        self._events: dict[int, _RankTraffic] = {}
        self._told: dict[int, _RankTraffic] = {}
        self._by_mesh: dict[tuple[int, int], Mapping[Key, CollectiveTotal]] = {}

    def take_events(self, rank: int, events: Iterable[Event]) -> None:
        own = self._events.setdefault(rank, _RankTraffic())
        moved: dict[tuple[str, str, str], list[float]] = {}
        for event in events:
            what = event[0]
            if what in _SENDS:  # ends with the handing over, which says nothing of how fast the message travels
                own.add(_BETWEEN_STAGES, event.calls, event.num_bytes, event.end - event.start)
            if what != _COLLECTIVE:
                continue
            op, axis = OPS[event.op], AXES[event.axis]
            own.add((op, axis), event.calls, event.num_bytes, event.waited)
            sums = moved.setdefault((op, axis, STRATEGIES[event.strategy]), [0.0, 0.0])
            sums[0] += event.num_bytes * bus_factor(op, max(1, self._sizes.get(axis, 1)))
            sums[1] += event.waited
        for key, (num_bytes, seconds) in moved.items():
            if num_bytes > 0 and seconds > 0:
                own.bandwidths[key] = num_bytes / seconds

    def take_totals(self, rank: int, mesh: int, totals: Mapping[Key, CollectiveTotal]) -> None:
        """A rank's since this mesh of it began; its other meshes, ended or not, are added."""
        before = self._by_mesh.get((rank, mesh), {})
        self._by_mesh[rank, mesh] = totals
        own = self._told.setdefault(rank, _RankTraffic())
        for (group, op, strategy), total in totals.items():
            new = total - before.get((group, op, strategy), CollectiveTotal())
            axis = group if group in AXES else AXES[Axis.WORLD]
            own.add((op, axis), new.calls, new.num_bytes, new.seconds)
            if new.bus_bandwidth is not None:
                own.bandwidths[op, axis, strategy] = new.bus_bandwidth

    def _ranks(self) -> Iterable[_RankTraffic]:
        return (self._told | self._events).values()

    def totals(self) -> dict[Where, CallTotals]:
        """All ranks' calls since the start."""
        found: dict[Where, CallTotals] = {}
        for rank in self._ranks():
            for where, totals in rank.totals.items():
                found.setdefault(where, CallTotals()).merge(totals)
        return dict(sorted(found.items()))

    def bandwidths(self) -> dict[tuple[str, str, str], float]:
        """Bus bandwidth in bytes a second by op, axis and strategy: the ranks' mean, each by its latest report."""
        each: dict[tuple[str, str, str], list[float]] = {}
        for rank in self._ranks():
            for key, bandwidth in rank.bandwidths.items():
                each.setdefault(key, []).append(bandwidth)
        return {key: fmean(bandwidths) for key, bandwidths in sorted(each.items())}
