"""The run's metrics: what ranks told, as Prometheus reads it."""

from __future__ import annotations

import base64
import math
import platform
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from monitoring.analysis.facts import RunFacts
from monitoring.analysis.observations import Bottleneck, Severity
from monitoring.analysis.rules.bottlenecks import KINDS
from monitoring.events.collectives import CollectiveRecorder
from monitoring.events.events import RECORD_BYTES, Axis, Event, What, pack_into
from monitoring.events.loop_lag import LagHistogram
from monitoring.events.time_parts import PARTS
from monitoring.live.observer import Observer
from monitoring.prometheus.metric_families import RUN_FAMILIES
from monitoring.prometheus.run_metrics import RunMetrics
from tests.support.observed import report
from tests.support.processes import ROOT
from tests.support.prometheus import check_metrics
from tests.support.tools import needs

FACTS = RunFacts(
    run_id="20260101-000000-abcd",
    world_size=2,
    dp=2,
    model="gpt",
    schedule="1f1b",
    flops_per_token=1e9,
    memory_budget=1 << 30,
    version="0.1.0",
    started=1000.5,
)


class Run:
    """An observer and its metrics; bottlenecks are what the test says."""

    def __init__(self, facts: RunFacts = FACTS, **options) -> None:
        self.found: list[Bottleneck] = []
        self.observer = Observer(facts, find=lambda *_: self.found, now=lambda: 2000.25)
        self.metrics = RunMetrics(self.observer, **options)

    def text(self) -> str:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self.metrics)
        return generate_latest(registry).decode()

    def values(self) -> dict[str, dict[tuple[str, ...], float]]:
        """By name, and then by the labels' values in the order of their names."""
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                found.setdefault(sample.name.removeprefix("parallel3d_"), {})[labels] = sample.value
        return found

    def take_places(self, device: str = "cpu") -> None:
        for rank in range(2):
            report(self.observer, rank, {"kind": "mesh", "coords": [rank, 0, 0]})
            told = {"device": device, "parameters": 5, "host": f"host{rank}", "num_cores": 2}
            report(self.observer, rank, {"kind": "ready", **told})

    def take_step(self, step: int, seconds: float, **changed) -> None:
        told = {"loss": 2.5, "grad_norm": 1.5, "learning_rate": 0.25, "tokens": 64, "bandwidth": None}
        report(self.observer, 0, {"kind": "step", "step": step, "seconds": seconds, **told, **changed})


def events(*each: Event) -> dict[str, object]:
    buffer = bytearray(len(each) * RECORD_BYTES)
    for number, event in enumerate(each):
        pack_into(buffer, number * RECORD_BYTES, event)
    return {"kind": "events", "data": base64.b64encode(buffer).decode(), "dropped": 0}


def some_step(rank: int, step: int) -> dict[str, object]:
    """One second: half of it computes, a quarter of that without a core; rank 1 comes to the reduction late."""
    start, late = float(step), 0.125 * rank
    all_reduce = Event(What.COLLECTIVE, step, start + 0.625, start + 0.75, axis=Axis.DP, waited=0.125, num_bytes=4000)
    return events(
        Event(What.DATA, step, start, start + 0.125),
        Event(What.F, step, start + 0.125, start + 0.375, 0, 0, cpu=0.1875),
        Event(What.B, step, start + 0.375, start + 0.625, 0, 0, cpu=0.1875),
        Event(What.REDUCE, step, start + 0.625 + late, start + 0.875),
        all_reduce,
        Event(What.OPTIMIZER, step, start + 0.875, start + 1.0),
        Event(What.STEP, step, start, start + 1.0),
    )


def test_before_anything_is_told_there_is_nothing_to_alarm():
    found = Run().values()
    assert found["build_info"] == {(platform.python_version(), pytest.importorskip("torch").__version__, "0.1.0"): 1}
    assert found["run_info"] == {("2x1x1", "gpt", "float32", FACTS.run_id, "1f1b"): 1}
    assert found["start_time_seconds"] == {(): 1000.5}
    assert found["steps_total"] == {("ok",): 0, ("failed",): 0}
    assert found["step_duration_seconds_count"] == found["event_loop_lag_seconds_count"] == {(): 0}
    assert found["bottleneck_state"] == {(kind, "low"): 0 for kind in KINDS}
    assert found["nonfinite_gradients_total"] == found["steps_incomplete_total"] == {(): 0}
    assert found["memory_budget_bytes"] == {(): 1 << 30}
    for absent in ("training_loss", "last_step_timestamp_seconds", "phase_seconds_total", "pipeline_bubble_ratio"):
        assert absent not in found


def test_scripts_are_no_run():
    assert "run_info" not in Run(RunFacts(world_size=2)).values()
    assert "memory_budget_bytes" not in Run(RunFacts(world_size=2)).values()


def test_progress():
    run = Run()
    run.take_places()
    before = time.time()
    for step, seconds in enumerate((0.25, 0.3, 4.0, 1000.0)):
        run.take_step(step, seconds, loss=4.0 - step)
    found = run.values()
    assert found["steps_total"] == {("ok",): 4, ("failed",): 0}
    assert found["tokens_total"] == {(): 256}
    buckets = found["step_duration_seconds_bucket"]
    assert [buckets[le,] for le in ("0.1", "0.25", "0.5", "2.5", "5.0", "300.0", "+Inf")] == [0, 1, 2, 2, 3, 3, 4]
    assert found["step_duration_seconds_sum"] == {(): 1004.55}
    assert found["step_duration_seconds_count"] == {(): 4}
    assert (found["training_loss"], found["gradient_norm"], found["learning_rate"]) == ({(): 1}, {(): 1.5}, {(): 0.25})
    assert before <= found["last_step_timestamp_seconds"][()] <= time.time()
    assert found["rank_last_report_timestamp_seconds"] == {("0",): 2000.25, ("1",): 2000.25}
    assert found["rank_info"] == {("cpu", str(rank), f"host{rank}", "0", str(rank), "0"): 1 for rank in range(2)}


def test_a_loss_that_is_no_number_is_shown_as_such():
    run = Run()
    run.take_step(0, 1.0, loss=math.nan)
    assert math.isnan(run.values()["training_loss"][()])


def test_utilization_is_absent_where_a_device_has_no_known_peak():
    run = Run()
    run.take_places("cpu")
    run.take_step(0, 1.0)
    assert "model_flops_utilization_ratio" not in run.values()
    run.take_places("NVIDIA H100 80GB HBM3")
    assert run.values()["model_flops_utilization_ratio"][()] == pytest.approx(64e9 / 2 / 67e12, rel=0.2)


def test_where_the_time_goes_adds_up():
    run = Run()
    run.take_places()
    for step in range(3):
        report(run.observer, 0, some_step(0, step))
        report(run.observer, 1, some_step(1, step))
    report(run.observer, 1, {"kind": "events", "data": "", "dropped": 7})
    found = run.values()
    phases = found["phase_seconds_total"]
    assert set(phases) == {(phase, str(rank)) for phase in PARTS for rank in range(2)}
    for rank in ("0", "1"):
        total = sum(phases[phase, rank] for phase in PARTS) + found["unattributed_seconds_total"][rank,]
        assert total == pytest.approx(3.0)
        assert phases["compute", rank] == found["compute_cpu_seconds_total"][rank,] == pytest.approx(3 * 0.375)
        assert found["core_wait_seconds_total"][rank,] == pytest.approx(3 * 0.125)
    assert phases["straggler", "0"] == pytest.approx(3 * 0.125)
    assert phases["straggler", "1"] == 0
    assert found["pipeline_bubble_ratio"] == {("0",): 0}
    assert all(0 < score <= 1 for score in found["straggler_score_ratio"].values())
    assert found["collective_bytes_total"] == {("dp", "all_reduce"): 6 * 4000}
    assert found["collective_duration_seconds_count"] == {("dp", "all_reduce"): 6}
    assert found["collective_duration_seconds_bucket"]["dp", "0.3", "all_reduce"] == 6
    assert found["collective_duration_seconds_bucket"]["dp", "0.1", "all_reduce"] == 0
    assert found["collective_duration_seconds_sum"] == {("dp", "all_reduce"): 6 * 0.125}
    assert found["collective_bus_bandwidth_bytes_per_second"] == {("dp", "all_reduce", "default"): 32000}
    assert found["events_dropped_total"] == {("0",): 0, ("1",): 7}


def test_calls_of_scripts_are_counted_from_their_totals():
    run, recorder = Run(RunFacts(world_size=2)), CollectiveRecorder()
    recorder.record("dp", "all_reduce", "ring", "adaptive", 1000, 2, 0.5, 1.0)
    for _ in range(2):  # totals since the mesh began: the later word stands
        report(run.observer, 1, {"kind": "collectives", "mesh": 1, **recorder.to_wire()})
    found = run.values()
    assert found["collective_bytes_total"] == {("dp", "all_reduce"): 1000}
    assert found["collective_duration_seconds_count"] == {("dp", "all_reduce"): 1}
    assert found["collective_bus_bandwidth_bytes_per_second"] == {("dp", "all_reduce", "ring"): 2000}


def lag(*seconds: float) -> dict[str, object]:
    histogram = LagHistogram()
    for each in seconds:
        histogram.observe(each)
    return {"kind": "loop_lag", **histogram.to_wire()}


def test_the_lag_of_all_event_loops_is_added_up():
    run = Run()
    for rank, each in ((1, lag(1.0)), (1, lag(4.0)), (0, lag(0.0, 0.25)), (0, {"kind": "loop_lag", "counts": []})):
        report(run.observer, rank, each)
    found = run.values()
    buckets = found["event_loop_lag_seconds_bucket"]
    assert [buckets[le,] for le in ("0.0005", "0.1", "0.25", "1.0", "+Inf")] == [1, 1, 2, 2, 3]
    assert found["event_loop_lag_seconds_sum"] == {(): 4.25}
    assert found["event_loop_lag_worst_seconds"] == {("0",): 0.25, ("1",): 4.0}


def test_memory_queue_and_gradients():
    run = Run()
    report(run.observer, 1, {"kind": "memory", "bytes": 900, "kinds": {"weights": 400, "optimizer": 300}})
    report(run.observer, 1, {"kind": "queue", "mean": 1.5, "capacity": 2})
    for rank in range(2):
        report(run.observer, rank, {"kind": "nonfinite", "step": 3})
    found = run.values()
    assert found["memory_bytes"] == {("process", "1"): 900, ("weights", "1"): 400, ("optimizer", "1"): 300}
    assert (found["data_queue_batches"], found["data_queue_capacity_batches"]) == ({("1",): 1.5}, {(): 2})
    assert found["nonfinite_gradients_total"] == {(): 1}


def bottleneck(kind: str, severity: Severity) -> Bottleneck:
    return Bottleneck(kind, severity, "It is slow.", {}, "Do something.", "pipeline.microbatches")


def test_every_kind_of_bottleneck_has_one_series_with_the_severity_that_it_had_last():
    run = Run()
    run.found = [bottleneck("straggler", Severity.MEDIUM), bottleneck("straggler", Severity.CRITICAL)]
    run.observer.finish()
    state = run.values()["bottleneck_state"]
    assert {where: value for where, value in state.items() if value} == {("straggler", "critical"): 1}
    assert len(state) == len(KINDS)
    run.found = [bottleneck("data_starved", Severity.HIGH)]
    run.observer.finish()
    state = run.values()["bottleneck_state"]
    assert {where: value for where, value in state.items() if value} == {("data_starved", "high"): 1}
    assert state["straggler", "critical"] == 0
    assert len(state) == len(KINDS)


def test_a_run_that_failed_has_a_failed_step():
    assert Run(has_failed=lambda: True).values()["steps_total"] == {("ok",): 0, ("failed",): 1}


def full() -> Run:
    run = Run()
    run.take_places()
    run.take_step(0, 1.0)
    for rank in range(2):
        for step in range(3):
            report(run.observer, rank, some_step(rank, step))
        report(run.observer, rank, lag(0.1))
        report(run.observer, rank, {"kind": "memory", "bytes": 900, "kinds": {"weights": 400}})
        report(run.observer, rank, {"kind": "queue", "mean": 1.5, "capacity": 2})
    return run


def test_all_names_are_there_with_their_labels_and_no_others():
    found = {family.name: family for family in text_string_to_metric_families(full().text())}
    assert set(found) == {f"parallel3d_{name.removesuffix('_total')}" for name in RUN_FAMILIES}
    for name, family in RUN_FAMILIES.items():
        told = found[f"parallel3d_{name.removesuffix('_total')}"]
        assert told.documentation == family.help
        assert told.type == {"info": "gauge"}.get(family.kind, family.kind)
        for sample in told.samples:
            assert set(sample.labels) - {"le"} == set(family.labels)
        if name != "model_flops_utilization_ratio":
            assert told.samples, name


def test_the_docs_tell_every_metric():
    told = (ROOT / "docs" / "prometheus.md").read_text()
    for name, family in RUN_FAMILIES.items():
        labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
        assert f"| `{name}{labels}` | {family.kind} | {family.help.removesuffix('.')} |" in told


def test_no_histogram_has_ranks():
    """A histogram is a dozen series for each of its labels' values."""
    assert not [name for name, family in RUN_FAMILIES.items() if family.kind == "histogram" and "rank" in family.labels]


@needs("promtool")
def test_promtool_finds_no_fault():
    check_metrics(full().text())
