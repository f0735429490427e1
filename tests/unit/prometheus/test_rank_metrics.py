"""A rank's own metrics, and how the run lists the endpoints of its ranks."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from monitoring.analysis.facts import RunFacts
from monitoring.events.collectives import CollectiveRecorder
from monitoring.events.loop_lag import LagHistogram
from monitoring.events.time_parts import PARTS, TimeParts
from monitoring.live.observer import Observer
from monitoring.prometheus.metric_families import RUN_FAMILIES
from monitoring.prometheus.rank_metrics import RANK_FAMILIES, RankFigures, RankMetrics
from monitoring.prometheus.run_metrics import scrape_targets
from tests.support.observed import report
from tests.support.prometheus import check_metrics
from tests.support.tools import needs


def exposition(figures: RankFigures) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RankMetrics(lambda: figures))
    return generate_latest(registry).decode()


def some_figures() -> RankFigures:
    lag, recorder = LagHistogram(), CollectiveRecorder()
    lag.observe(0.25)
    recorder.record("dp", "all_reduce", "ring", "adaptive", 1000, 2, 0.5, 1.0)
    parts = TimeParts.of({part: float(number) for number, part in enumerate(PARTS)})
    return RankFigures(3, parts, lag, recorder.totals(), {"weights": 400}, 7)


def test_what_a_rank_knows_is_shown():
    lines = exposition(some_figures()).splitlines()
    for expected in (
        "parallel3d_rank_steps_total 3.0",
        'parallel3d_rank_phase_seconds_total{phase="compute"} 0.0',
        'parallel3d_rank_phase_seconds_total{phase="other"} 9.0',
        'parallel3d_rank_event_loop_lag_seconds_bucket{le="0.1"} 0.0',
        'parallel3d_rank_event_loop_lag_seconds_bucket{le="0.25"} 1.0',
        "parallel3d_rank_event_loop_lag_seconds_sum 0.25",
        'parallel3d_rank_collective_calls_total{axis="dp",op="all_reduce",strategy="ring"} 1.0',
        'parallel3d_rank_collective_bytes_total{axis="dp",op="all_reduce",strategy="ring"} 1000.0',
        'parallel3d_rank_collective_seconds_total{axis="dp",op="all_reduce",strategy="ring"} 0.5',
        'parallel3d_rank_memory_bytes{kind="weights"} 400.0',
        "parallel3d_rank_events_dropped_total 7.0",
    ):
        assert expected in lines


def test_no_name_is_also_one_of_the_run():
    assert not RANK_FAMILIES.keys() & RUN_FAMILIES.keys()
    told = {line.split()[2] for line in exposition(some_figures()).splitlines() if line.startswith("# TYPE")}
    assert told == {f"parallel3d_{name}" for name in RANK_FAMILIES}


@needs("promtool")
def test_promtool_finds_no_fault():
    for figures in (RankFigures(), some_figures()):
        check_metrics(exposition(figures))


def test_ranks_are_listed_with_their_places():
    observer = Observer(RunFacts(run_id="a-run", world_size=2, dp=2))
    assert scrape_targets(observer.state) == []
    report(observer, 1, {"kind": "mesh", "coords": [1, 0, 0]})
    report(observer, 1, {"kind": "ready", "device": "cpu", "parameters": 1, "host": "node7"})
    for rank, message in (
        (1, {"kind": "endpoint", "target": "127.0.0.1:4001", "scheme": "http"}),
        (0, {"kind": "endpoint", "target": "[::1]:4000", "scheme": "https"}),
        (0, {"kind": "endpoint", "target": "evil.example/path:4000", "scheme": "http"}),
        (0, {"kind": "endpoint", "target": "127.0.0.1:4002", "scheme": "file"}),
        (0, {"kind": "endpoint", "target": 4002, "scheme": "http"}),
        (0, {"kind": "ready", "target": "127.0.0.1:4002", "scheme": "http"}),
    ):
        report(observer, rank, message)
    assert scrape_targets(observer.state) == [
        {"targets": ["[::1]:4000"], "labels": {"__scheme__": "https", "run_id": "a-run", "rank": "0"}},
        {
            "targets": ["127.0.0.1:4001"],
            "labels": {
                "__scheme__": "http", "run_id": "a-run", "rank": "1", "dp": "1", "tp": "0", "pp": "0", "host": "node7",
            },
        },
    ]  # fmt: skip
