"""A gradient server's metrics for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from monitoring.prometheus.metric_families import Family, histograms, number, numbers

GRADIENT_SERVER_FAMILIES = {
    "gradient_server_connections": Family(
        "gauge", "Open connections, by the protocol's version; none: has not joined yet.", ("version",)
    ),
    "gradient_server_workers": Family("gauge", "Workers that have joined and are there."),
    "gradient_server_bytes_total": Family("counter", "Bytes from and to workers.", ("direction",)),
    "gradient_server_in_flight_bytes": Family("gauge", "Bytes that wait to be sent, all connections together."),
    "gradient_server_frames_rejected_total": Family(
        "counter", "Frames, joins and gradients that were refused.", ("reason",)
    ),
    "gradient_server_steps_total": Family("counter", "Steps whose averages were sent."),
    "gradient_server_reduction_seconds": Family(
        "histogram", "From the first byte of a step's gradients to its last average."
    ),
}
"""Families by name without the prefix."""

REDUCTION_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, float("inf"))
"""Seconds. The range covers small gradients on one host up to large ones over a slow network."""

_numbers, _number, _histograms = (partial(each, GRADIENT_SERVER_FAMILIES) for each in (numbers, number, histograms))


@dataclass(slots=True)
class GradientServerTotals:
    """Counts since the server started."""

    steps: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    bytes_in: int = 0
    """Of closed connections only, like `bytes_out`."""
    bytes_out: int = 0
    reduction_counts: list[int] = field(default_factory=lambda: [0] * len(REDUCTION_BOUNDS))
    reduction_seconds: float = 0.0

    def note_step(self, seconds: float) -> None:
        self.steps += 1
        self.reduction_counts[bisect_left(REDUCTION_BOUNDS, seconds)] += 1
        self.reduction_seconds += seconds


@dataclass(frozen=True, slots=True)
class GradientServerFigures:
    """The server's figures at one moment."""

    totals: GradientServerTotals
    connections: Mapping[str, int]
    workers: int
    bytes_in: int
    bytes_out: int
    bytes_waiting: int


class GradientServerMetrics(Collector):
    """Reads the server's figures at each scrape."""

    def __init__(self, read: Callable[[], GradientServerFigures]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        figures = self._read()
        totals = figures.totals
        yield _numbers("gradient_server_connections", [((name,), n) for name, n in figures.connections.items()])
        yield _number("gradient_server_workers", figures.workers)
        moved = {"in": figures.bytes_in, "out": figures.bytes_out}
        yield _numbers("gradient_server_bytes_total", [((direction,), n) for direction, n in moved.items()])
        yield _number("gradient_server_in_flight_bytes", figures.bytes_waiting)
        rejected = sorted(totals.rejected.items())
        yield _numbers("gradient_server_frames_rejected_total", [((reason,), n) for reason, n in rejected])
        yield _number("gradient_server_steps_total", totals.steps)
        yield _histograms(
            "gradient_server_reduction_seconds",
            [((), REDUCTION_BOUNDS, totals.reduction_counts, totals.reduction_seconds)],
        )
