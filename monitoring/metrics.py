"""The run's metrics for Prometheus: takes what ranks report, and serves it on loopback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from monitoring.collectives import CollectiveRecorder, CollectiveTotal, Key
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


class CollectivesCollector(Collector):
    """`parallel3d_collective_*` of each rank, by group, kind and strategy."""

    def __init__(self) -> None:
        self._by_mesh: dict[tuple[int, int], Mapping[Key, CollectiveTotal]] = {}
        self._by_rank: dict[tuple[int, Key], CollectiveTotal] = {}
        self._bandwidths: dict[tuple[int, Key], float] = {}

    def update(self, rank: int, mesh: int, totals: Mapping[Key, CollectiveTotal]) -> None:
        """Take a rank's totals since this mesh of it began; its other meshes, ended or not, are added."""
        before = self._by_mesh.get((rank, mesh), {})
        self._by_mesh[rank, mesh] = totals
        for key, total in totals.items():
            new = total - before.get(key, CollectiveTotal())
            self._by_rank[rank, key] = self._by_rank.get((rank, key), CollectiveTotal()) + new
            bandwidth = new.bus_bandwidth
            if bandwidth is not None:
                self._bandwidths[rank, key] = bandwidth

    def collect(self) -> Iterable[Metric]:
        totals, bandwidths = sorted(self._by_rank.copy().items()), self._bandwidths.copy()  # for another thread
        labels = ["rank", "group", "kind", "strategy"]
        calls = CounterMetricFamily(
            "parallel3d_collective_calls",
            "Collectives, sends, receives and barriers of a rank that ended well.",
            labels=labels,
        )
        num_bytes = CounterMetricFamily(
            "parallel3d_collective_bytes",
            "Their sizes as nccl-tests counts them: the whole input of reduce_scatter, the whole result of all_gather.",
            labels=labels,
        )
        seconds = CounterMetricFamily(
            "parallel3d_collective_seconds",
            "The time from call to end, added up; calls may overlap.",
            labels=labels,
        )
        bandwidth = GaugeMetricFamily(
            "parallel3d_collective_bus_bandwidth_bytes_per_second",
            "Bus bandwidth as nccl-tests defines it, over the rank's last report that had such calls.",
            labels=labels,
        )
        for (rank, key), total in totals:
            where = [str(rank), *key]
            calls.add_metric(where, total.calls)
            num_bytes.add_metric(where, total.num_bytes)
            seconds.add_metric(where, total.seconds)
            if (rank, key) in bandwidths:
                bandwidth.add_metric(where, bandwidths[rank, key])
        yield from (calls, num_bytes, seconds, bandwidth)


class MetricsServer:
    """`/metrics` of one run, on loopback, from a thread of its own."""

    def __init__(self, port: int) -> None:
        self._lag, self._collectives = LoopLagCollector(), CollectivesCollector()
        registry = CollectorRegistry()
        registry.register(self._lag)
        registry.register(self._collectives)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/metrics"

    def take(self, rank: int, message: Mapping[str, object]) -> None:
        """A rank's report over the control channel; what does not fit is not ours to judge, and left out."""
        with suppress(ValueError):
            match message:
                case {"kind": "loop_lag"}:
                    self._lag.update(rank, LagHistogram.from_wire(message))
                case {"kind": "collectives", "mesh": int(mesh)}:
                    self._collectives.update(rank, mesh, CollectiveRecorder.from_wire(message))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
