"""What is known of a run follows from its ranks' messages, whatever they send."""

from __future__ import annotations

import json
import math

import pytest

from monitoring.analysis.device_peaks import peak_flops
from monitoring.analysis.facts import RunFacts, Status
from monitoring.events.events import What
from monitoring.events.time_parts import NO_TIME, PARTS, TimeParts, mean_of
from monitoring.live.observer import Observer
from parallel3d.config import load_config
from parallel3d.planning.preflight import ModelFacts
from parallel3d.runs.record import RunError, RunRecord
from runtime.errors import Coords
from tests.support.observed import Told, events_message, report


def record_of(**overrides) -> RunRecord:
    return RunRecord(load_config(None, overrides={"train.steps": 9, **overrides}, environ={}))


def step_message(step: int, seconds: float = 0.5, *, loss: float = 1.0, **more) -> dict:
    return {
        "kind": "step",
        "step": step,
        "loss": loss,
        "grad_norm": 2.0,
        "learning_rate": 3e-4,
        "tokens": 100,
        "seconds": seconds,
        "bandwidth": 1.5,
        **more,
    }


def watch(record: RunRecord, num_steps: int = 3) -> None:
    """As an observer would have seen its ranks: each step takes half a second, three fifths of it for computing."""
    config = record.config
    sizes = {"dp": config.parallel.dp, "tp": config.parallel.tp, "pp": config.parallel.pp}
    observer = Observer(RunFacts(world_size=config.world_size, **sizes))
    for rank in range(config.world_size):
        coords = record.ranks[rank].coords if rank in record.ranks else None
        report(observer, rank, {"kind": "mesh", "coords": list(coords or (0, 0, 0))})
    for step in range(num_steps):
        for rank in range(config.world_size):
            told = Told(step, 100.0 + step).add(What.DATA, 0.1).add(What.F, 0.3, 0, 0).gap(0.1)
            report(observer, rank, events_message(told.done()))
    record.observed = observer.summary()


def test_parts_add_up_and_none_is_below_zero():
    parts = TimeParts.of({"compute": 0.6, "pp_comm": 0.1, "other": -1e-9})
    assert parts.to_json() == pytest.approx(dict.fromkeys(PARTS, 0.0) | {"compute": 0.6, "pp_comm": 0.1})
    assert parts.total == pytest.approx(0.7)
    assert sum(parts.shares().values()) == pytest.approx(1.0)
    assert NO_TIME.shares() == dict.fromkeys(PARTS, 0.0)
    assert mean_of([parts, NO_TIME]).total == pytest.approx(0.35)


@pytest.mark.parametrize(("num_steps", "warm_up", "rate"), [(1, 0, 100), (2, 1, 100), (3, 2, 200), (5, 2, 200)])
def test_the_first_steps_do_not_count_for_speed(num_steps, warm_up, rate):
    record = record_of()
    for step in range(num_steps):
        report(record, 0, step_message(step, seconds=1.0 if step < 2 else 0.5))
    assert (record.num_warm_up, record.tokens_per_second) == (warm_up, pytest.approx(rate))
    watch(record, num_steps)
    assert record.told == []  # nobody has told of itself
    report(record, 0, {"kind": "mesh", "coords": [0, 0, 0]})
    assert record.told == [0]
    assert record.parts(0).total == pytest.approx(0.5 * len(record.counted))


def test_metrics_have_what_was_promised():
    record = record_of(**{"parallel.dp": 2})
    record.facts = ModelFacts(parameters=1234, flops_per_token=6.0 * 1234)
    for rank in (0, 1):
        report(record, rank, {"kind": "mesh", "coords": [rank, 0, 0]})
        report(record, rank, {"kind": "ready", "device": "cpu", "parameters": 617, "pid": 1})
        report(record, rank, {"kind": "memory", "bytes": 100})
        report(record, rank, {"kind": "memory", "bytes": 50})
    for step in range(3):
        report(record, 1, step_message(step))  # rank 0 reports for all
        report(record, 0, step_message(step, loss=3.0 - step))
        assert [each.step for each in record.steps] == [*range(step + 1)]
        assert record.steps[-1].tokens_per_second == 200.0
    record.status = Status.COMPLETED
    watch(record)
    found = json.loads(json.dumps(record.metrics(), allow_nan=False))
    assert found["status"] == "completed"
    assert (found["world_size"], found["final_loss"], found["losses"]) == (2, 1.0, [3.0, 2.0, 1.0])
    assert (found["step_seconds"], found["tokens_per_sec"]) == ([0.5] * 3, 200.0)
    assert found["ddp_metrics"] == {"allreduce_bandwidth_gbps": [1.5] * 3}
    assert (found["parameters"], found["warm_up_steps"], found["mfu"]) == (1234, 2, None)
    assert [rank["memory_bytes"] for rank in found["ranks"]] == [100, 100]
    assert found["ranks"][1]["coords"] == {"dp": 1, "tp": 0, "pp": 0}
    assert found["ranks"][1]["seconds"] == pytest.approx(
        dict.fromkeys(PARTS, 0.0) | {"compute": 0.3, "data": 0.1, "other": 0.1}
    )
    assert found["ranks"][1]["total_seconds"] == pytest.approx(0.5)
    assert found["parts"]["compute"] == pytest.approx(0.6)
    assert (found["ranks"][0]["bubble"], found["ranks"][0]["straggler_score"]) == (0.0, 1.0)
    assert (found["bottlenecks"], found["stragglers"], found["events_dropped"]) == ([], [], 0)
    assert (record.memory(), record.name(1)) == (200, "rank 1 (dp=1 tp=0 pp=0)")


def test_a_run_that_nobody_watched_has_the_same_keys():
    watched, alone = record_of(), record_of()
    for record in (watched, alone):
        report(record, 0, {"kind": "mesh", "coords": [0, 0, 0]})
        report(record, 0, step_message(0))
    watch(watched, 1)
    assert alone.metrics()["ranks"][0].keys() <= watched.metrics()["ranks"][0].keys()
    assert alone.metrics().keys() <= watched.metrics().keys()
    assert (alone.told, alone.parts(0), alone.metrics()["ranks"][0]["bubble"]) == ([], NO_TIME, 0.0)


def test_a_run_without_a_step_has_metrics_too():
    found = record_of().metrics()
    assert (found["tokens_per_sec"], found["final_loss"], found["losses"], found["ranks"]) == (0.0, None, [], [])
    assert found["ddp_metrics"] == {"allreduce_bandwidth_gbps": []}


def test_json_has_no_nan():
    record = record_of()
    report(record, 0, step_message(0, loss=math.nan))
    assert record.steps[0].to_json()["loss"] is None
    assert json.loads(json.dumps(record.metrics(), allow_nan=False))["losses"] == [None]


@pytest.mark.parametrize("kind", ["loop_lag", "heartbeat", "mesh", "step"])
def test_a_message_of_another_kind_or_a_malformed_one_changes_nothing(kind):
    record = record_of()
    report(record, 0, {"kind": kind})
    assert (record.steps, record.ranks) == ([], {})


def test_an_error_names_its_rank():
    error = RunError("rank 3 failed", 3, Coords(0, 1, 1), 12, "Traceback", ("Layer 3.",))
    assert error.name == "rank 3 (dp=0 tp=1 pp=1)"
    assert error.to_json()["coords"] == {"dp": 0, "tp": 1, "pp": 1}
    assert error.to_json()["notes"] == ["Layer 3."]


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA L4", "float32", 30.3e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB", "float64", None),
        ("NVIDIA A1000", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_peaks_of_devices(device, precision, peak):
    assert peak_flops(device, precision) == peak


def test_mfu_is_known_when_every_ranks_device_is():
    record = record_of(**{"parallel.dp": 2, "train.precision": "bfloat16"})
    record.facts = ModelFacts(parameters=10**9, flops_per_token=6e9)
    report(record, 0, {"kind": "ready", "device": "NVIDIA A100-SXM4-80GB", "parameters": 1})
    assert record.mfu(1e4) is None
    report(record, 1, {"kind": "ready", "device": "NVIDIA A100-SXM4-80GB", "parameters": 1})
    assert record.mfu(1e4) == pytest.approx(6e13 / 624e12)
