"""The run's metrics for Prometheus: takes what ranks report, and serves it on loopback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from monitoring.loop_lag import BOUNDS, LagHistogram


class LoopLagCollector(Collector):
    """`parallel3d_event_loop_lag_seconds` over all ranks, and each rank's worst as a gauge."""

    def __init__(self) -> None:
        self._by_rank: dict[int, LagHistogram] = {}

    def update(self, rank: int, histogram: LagHistogram) -> None:
        """Take a rank's totals since its start."""
        self._by_rank[rank] = histogram

    def collect(self) -> Iterable[Metric]:
        ranks = dict(self._by_rank)  # a scrape runs in another thread
        counts = [sum(column) for column in zip(*(h.counts for h in ranks.values()), strict=True)] or [0] * len(BOUNDS)
        running, buckets = 0, []
        for bound, count in zip(BOUNDS, counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), running))
        yield HistogramMetricFamily(
            "parallel3d_event_loop_lag_seconds",
            "How late the ranks' event loops ran their timers.",
            buckets=buckets,
            sum_value=sum(h.total for h in ranks.values()),
        )
        worst = GaugeMetricFamily(
            "parallel3d_event_loop_lag_worst_seconds",
            "The latest timer of a rank's event loop since the rank started.",
            labels=["rank"],
        )
        for rank, histogram in sorted(ranks.items()):
            worst.add_metric([str(rank)], histogram.worst)
        yield worst


class MetricsServer:
    """`/metrics` of one run, on loopback, from a thread of its own."""

    def __init__(self, port: int) -> None:
        self._lag = LoopLagCollector()
        registry = CollectorRegistry()
        registry.register(self._lag)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/metrics"

    def take(self, rank: int, message: Mapping[str, object]) -> None:
        """A rank's report over the control channel; what does not fit is not ours to judge, and left out."""
        if message.get("kind") == "loop_lag":
            try:
                self._lag.update(rank, LagHistogram.from_wire(message))
            except ValueError:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
