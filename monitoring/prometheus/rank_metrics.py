"""Metrics that each rank serves itself, from what it knows without other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from monitoring.events import loop_lag
from monitoring.events.collectives import CollectiveTotal, Key
from monitoring.events.loop_lag import LagHistogram
from monitoring.events.time_parts import NO_TIME, PARTS, TimeParts
from monitoring.prometheus.metric_families import Family, histograms, number, numbers

_CALLS = ("op", "axis", "strategy")
RANK_FAMILIES = {
    "rank_steps_total": Family("counter", "Steps that this rank has made."),
    "rank_phase_seconds_total": Family(
        "counter",
        "What this rank's time went into, as far as it can tell alone: not who came late.",
        ("phase",),
    ),
    "rank_event_loop_lag_seconds": Family("histogram", "How late this rank's event loop ran its timers."),
    "rank_collective_calls_total": Family("counter", "Calls of this rank on its groups that ended well.", _CALLS),
    "rank_collective_bytes_total": Family("counter", "Their sizes, as nccl-tests counts them.", _CALLS),
    "rank_collective_seconds_total": Family("counter", "From call to end; calls may overlap.", _CALLS),
    "rank_memory_bytes": Family("gauge", "This rank's tensors that stay from step to step.", ("kind",)),
    "rank_events_dropped_total": Family("counter", "Events that came too fast to be kept."),
}
"""Their names differ from the run's metrics, so that no sum counts anything twice. The rank is not a label here:
service discovery adds it."""

_numbers, _number, _histograms = (partial(each, RANK_FAMILIES) for each in (numbers, number, histograms))


@dataclass(frozen=True, slots=True)
class RankFigures:
    """A rank's figures at one moment; counts are since its start."""

    num_steps: int = 0
    parts: TimeParts = NO_TIME
    lag: LagHistogram = field(default_factory=LagHistogram)
    collectives: Mapping[Key, CollectiveTotal] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0


class RankMetrics(Collector):
    """Reads the rank's figures at each scrape."""

    def __init__(self, figures: Callable[[], RankFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        now = self._figures()
        yield _number("rank_steps_total", now.num_steps)
        yield _numbers("rank_phase_seconds_total", [((part,), now.parts[part]) for part in PARTS])
        lag = now.lag
        yield _histograms("rank_event_loop_lag_seconds", [((), loop_lag.BOUNDS, list(lag.counts), lag.total)])
        yield from _calls(now.collectives)
        yield _numbers("rank_memory_bytes", [((kind,), size) for kind, size in sorted(now.memory.items())])
        yield _number("rank_events_dropped_total", now.dropped)


def _calls(totals: Mapping[Key, CollectiveTotal]) -> Iterator[Metric]:
    found = sorted(((op, axis, strategy), total) for (axis, op, strategy), total in totals.items())
    yield _numbers("rank_collective_calls_total", [(where, total.calls) for where, total in found])
    yield _numbers("rank_collective_bytes_total", [(where, total.num_bytes) for where, total in found])
    yield _numbers("rank_collective_seconds_total", [(where, total.seconds) for where, total in found])
