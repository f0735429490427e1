"""The event loop's lag: counted, sent, added up over ranks, and served to Prometheus."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from monitoring.loop_lag import BOUNDS, LagHistogram, LagMeter
from monitoring.metrics import LoopLagCollector, MetricsServer


def histogram(*lags: float) -> LagHistogram:
    made = LagHistogram()
    for lag in lags:
        made.observe(lag)
    return made


def test_each_lag_is_counted_under_its_bound():
    found = histogram(0.0, 0.0005, 0.0006, 0.3, 50.0)
    assert found.counts == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert found.worst == 50.0
    assert found.total == pytest.approx(50.3011)


def test_quantiles_are_bounds_and_never_above_the_worst():
    found = histogram(*[0.0004] * 98, 0.004, 0.004)
    assert found.quantile(0.5) == 0.0005
    assert found.quantile(0.98) == 0.0005
    assert found.quantile(0.99) == found.quantile(1.0) == 0.004
    assert histogram().quantile(0.99) == 0.0
    assert histogram(7.0).quantile(0.5) == 7.0, "not infinity"


def test_a_histogram_travels_as_json():
    sent = histogram(0.001, 0.2)
    assert LagHistogram.from_wire(json.loads(json.dumps(sent.to_wire()))) == sent
    assert LagHistogram.from_wire(json.loads(json.dumps(histogram().to_wire()))) == histogram()


COUNTS = [0] * len(BOUNDS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "counts do not fit the bounds"),
        ({"counts": COUNTS[1:], "total": 0.0, "worst": 0.0}, "counts do not fit the bounds"),
        ({"counts": "0" * len(BOUNDS), "total": 0.0, "worst": 0.0}, "counts do not fit the bounds"),
        ({"counts": [*COUNTS[1:], 0.5], "total": 0.0, "worst": 0.0}, "counts do not fit the bounds"),
        ({"counts": [*COUNTS[1:], True], "total": 0.0, "worst": 0.0}, "counts do not fit the bounds"),
        ({"counts": COUNTS, "total": "0", "worst": 0.0}, "total and worst are numbers"),
        ({"counts": COUNTS, "total": 0.0}, "total and worst are numbers"),
    ],
)
def test_what_no_rank_can_have_sent_is_refused(fields, message):
    with pytest.raises(ValueError, match=rf"^event-loop lag: {message}$"):
        LagHistogram.from_wire(fields)


async def test_a_busy_loop_is_noticed():
    meter = LagMeter(interval=0.001)
    meter.start()
    time.sleep(0.05)  # noqa: ASYNC251  the lag itself
    await asyncio.sleep(0.005)  # its timer is due before this one
    meter.stop()
    assert 0.045 < meter.histogram.worst < 30
    stopped = sum(meter.histogram.counts)
    await asyncio.sleep(0.01)
    assert sum(meter.histogram.counts) == stopped


EXPOSITION = """\
# HELP parallel3d_event_loop_lag_seconds How late the ranks' event loops ran their timers.
# TYPE parallel3d_event_loop_lag_seconds histogram
parallel3d_event_loop_lag_seconds_bucket{le="0.0005"} 1.0
parallel3d_event_loop_lag_seconds_bucket{le="0.001"} 1.0
parallel3d_event_loop_lag_seconds_bucket{le="0.002"} 1.0
parallel3d_event_loop_lag_seconds_bucket{le="0.005"} 1.0
parallel3d_event_loop_lag_seconds_bucket{le="0.01"} 1.0
parallel3d_event_loop_lag_seconds_bucket{le="0.02"} 1.0
parallel3d_event_loop_lag_seconds_bucket{le="0.05"} 1.0
parallel3d_event_loop_lag_seconds_bucket{le="0.1"} 1.0
parallel3d_event_loop_lag_seconds_bucket{le="0.25"} 2.0
parallel3d_event_loop_lag_seconds_bucket{le="1.0"} 2.0
parallel3d_event_loop_lag_seconds_bucket{le="+Inf"} 3.0
parallel3d_event_loop_lag_seconds_count 3.0
parallel3d_event_loop_lag_seconds_sum 4.25
# HELP parallel3d_event_loop_lag_worst_seconds The latest timer of a rank's event loop since the rank started.
# TYPE parallel3d_event_loop_lag_worst_seconds gauge
parallel3d_event_loop_lag_worst_seconds{rank="0"} 0.25
parallel3d_event_loop_lag_worst_seconds{rank="10"} 4.0
"""


def test_the_exposition_adds_up_the_ranks():
    collector, registry = LoopLagCollector(), CollectorRegistry()
    registry.register(collector)
    collector.update(10, histogram(1.0))
    collector.update(10, histogram(4.0))  # totals since its start: the later word stands
    collector.update(0, histogram(0.0, 0.25))
    assert generate_latest(registry).decode() == EXPOSITION


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_the_server_serves_what_ranks_report_and_nothing_else():
    with MetricsServer(port=0) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert "parallel3d_event_loop_lag_seconds_count 0.0\n" in scrape(server.url)
        server.take(0, {"kind": "loop_lag", **histogram(0.0, 0.25).to_wire()})
        server.take(10, {"kind": "loop_lag", **histogram(4.0).to_wire()})
        server.take(1, {"kind": "loop_lag", "counts": "nonsense"})
        server.take(1, {"kind": "mesh", **histogram(9.0).to_wire()})
        assert scrape(server.url).partition("# HELP parallel3d_collective_")[0] == EXPOSITION
    with pytest.raises(OSError, match="refused"):
        scrape(server.url)
