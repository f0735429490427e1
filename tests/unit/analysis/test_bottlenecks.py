"""Every kind of bottleneck from a window with that cause alone in it, and none from healthy ones."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from monitoring.analysis.facts import RankFacts, RunFacts
from monitoring.analysis.observations import (
    AxisTraffic,
    Bottleneck,
    RankWindow,
    Severity,
    StageSeconds,
    Straggler,
    Window,
)
from monitoring.analysis.rules.bottlenecks import HIDDEN_BY, KINDS, LEVELS, find_bottlenecks
from monitoring.analysis.rules.view import duration
from monitoring.events.loop_lag import BOUNDS, LagHistogram
from monitoring.events.time_parts import PARTS, TimeParts
from parallel3d.config import load_config
from parallel3d.config.sections import RunConfig
from parallel3d.pipeline.schedules.build import SCHEDULES
from parallel3d.planning.what_if import PipelinePlanner
from tests.support.processes import ROOT
from tests.support.windows import STEP, alike, idling, mesh, piped, rank_window, ranks_of, straggler, window_of

MIB = 1 << 20


def found(window: Window, facts: RunFacts, ranks: dict[int, RankFacts] | None = None) -> list[Bottleneck]:
    return find_bottlenecks(window, facts, ranks_of(facts) if ranks is None else ranks, PipelinePlanner.of_facts(facts))


def only(window: Window, facts: RunFacts, ranks: dict[int, RankFacts] | None = None) -> Bottleneck:
    """The one that is found."""
    every = found(window, facts, ranks)
    assert len(every) == 1, [each.message for each in every]
    return every[0]


@pytest.mark.parametrize(
    "facts",
    [mesh(), mesh(dp=2), mesh(tp=2), mesh(2, 2), mesh(dp=8)],
    ids=lambda facts: f"{facts.dp}x{facts.tp}x{facts.pp}",
)
def test_a_healthy_window(facts):
    parts = {"dp_comm": 0.01} if facts.dp > 1 else {}
    parts |= {"tp_comm": 0.01} if facts.tp > 1 else {}
    assert found(alike(facts, parts), facts) == []


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_healthy_pipeline(pp, microbatches, schedule):
    facts = mesh(pp=pp, microbatches=microbatches, schedule=schedule, batch_size=64)
    nearly = [0.1 + 0.01 * (stage % 2) for stage in range(pp)]
    assert found(piped(facts, nearly), facts) == []


def test_nothing_without_data():
    facts = mesh(dp=2)
    bad = {"data": 0.05}
    assert [each.kind for each in found(alike(facts, bad), facts)] == ["data_starved"]
    assert found(alike(facts, bad, num_steps=2), facts) == []
    assert found(Window(), facts) == []
    assert found(Window(num_steps=20, seconds=STEP), facts) == []
    assert found(replace(alike(facts, bad), seconds=0.0), facts) == []
    unknown = window_of(*(rank_window(rank, memory=None) for rank in (0, 1)))
    assert found(unknown, mesh(dp=2, memory_budget=1)) == []
    assert found(alike(mesh(dp=2)), mesh(dp=2, memory_budget=0)) == []


# Communication.


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_communication_by_axis(axis):
    facts = mesh(**{axis: 4})
    one = only(alike(facts, {f"{axis}_comm": 0.042}), facts)
    assert (one.kind, one.axis, one.severity) == (f"{axis}_comm", axis, Severity.MEDIUM)
    assert one.evidence["share"] == pytest.approx(0.42)
    assert "42 % of a step: 42 ms of 100 ms" in one.message
    # Half as many ranks: 1/2 over 3/4 of the bytes a sample, and half of the samples. Twice the batch: half a sample.
    gain = 0.42 / 2 if axis == "dp" else 0.42 * (1 - 2 / 3 / 2)
    assert one.gain == pytest.approx(gain)
    assert (one.key, one.value) == {
        "dp": ("train.batch_size", "128"),
        "tp": ("parallel.tp", "2"),
        "pp": ("parallel.pp", "2"),
    }[axis]


@pytest.mark.parametrize(("share", "severity"), [(0.3, None), (0.3001, "low"), (0.41, "medium"), (0.56, "high")])
def test_from_which_share_on_communication_counts(share, severity):
    every = found(alike(mesh(dp=2), {"dp_comm": share * STEP}), mesh(dp=2))
    assert [each.severity for each in every] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("axis", "order", "key", "value"),
    [
        ("tp", "tp-dp-pp", "parallel.order", "pp-dp-tp"),
        ("pp", "pp-dp-tp", "parallel.order", "dp-tp-pp"),
        ("dp", "dp-tp-pp", "comm.strategy", "hierarchical"),
    ],
)
def test_communication_between_hosts(axis, order, key, value):
    facts = mesh(4, 2, 2)
    ranks = ranks_of(facts, hosts=2, order=order)
    one = only(alike(facts, {f"{axis}_comm": 0.04}), facts, ranks)
    assert (one.kind, one.key, one.value, one.gain) == (f"{axis}_comm", key, value, None)


@pytest.mark.parametrize(("axis", "key"), [("tp", "parallel.tp"), ("pp", "parallel.pp"), ("dp", "train.batch_size")])
def test_communication_between_hosts_of_one_rank(axis, key):
    """No order of the ranks keeps it inside, and there is nothing to add up inside."""
    facts = mesh(**{axis: 2})
    one = only(alike(facts, {f"{axis}_comm": 0.04}), facts, ranks_of(facts, hosts=2))
    assert (one.kind, one.key) == (f"{axis}_comm", key)
    assert one.gain is not None


def test_an_axis_that_is_larger_than_a_host():
    facts = mesh(dp=2, pp=4)
    window = alike(facts, {"pp_comm": 0.04})
    assert only(window, facts, ranks_of(facts, hosts=2, order="pp-dp-tp")).key == "parallel.order"
    assert only(window, facts, ranks_of(facts, hosts=4, order="pp-dp-tp")).key == "parallel.pp"


@pytest.mark.parametrize("strategy", ["hierarchical", "adaptive"])
def test_gradients_that_are_added_up_inside_each_host_already(strategy):
    facts = mesh(dp=4, comm_strategy=strategy)
    one = only(alike(facts, {"dp_comm": 0.04}), facts, ranks_of(facts, hosts=2))
    assert (one.key, one.value) == ("train.batch_size", "128")


def test_no_axis_no_communication():
    assert found(alike(mesh(dp=2), {"tp_comm": 0.05}), mesh(dp=2)) == []


def test_traffic_is_evidence():
    facts = mesh(dp=2)
    traffic = (AxisTraffic("all_reduce", "dp", 4, 64 * MIB, 0.05), AxisTraffic("broadcast", "world", 9, 9, 0.01))
    one = only(alike(facts, {"dp_comm": 0.05}, traffic=traffic), facts)
    assert (one.kind, one.evidence["calls"], one.evidence["bytes"]) == ("dp_comm", 2, 32 * MIB)


def test_tp_efficiency():
    facts = mesh(tp=2)
    one = only(alike(facts, {"tp_comm": 0.02, "straggler": 0.005, "other": 0.0}), facts)
    assert (one.kind, one.axis, one.key, one.value) == ("tp_efficiency", "tp", "parallel.tp", "1")
    assert one.evidence["efficiency"] == pytest.approx(0.065 / 0.09)
    assert one.gain == pytest.approx(0.25), "alone, a rank exchanges nothing"
    assert found(alike(facts, {"tp_comm": 0.018, "compute": 0.072}), facts) == [], "80 % is enough"
    short = {"compute": 0.01, "tp_comm": 0.004}
    assert found(alike(facts, {**short, "optimizer": 0.086}), facts) == [], "layers are hardly any of the step"
    other = mesh(2, 2)
    assert found(alike(other, {"tp_comm": 0.012, "straggler": 0.01}), other) == [], "waits of another axis"


@pytest.mark.parametrize("supply", ["data", "checkpoint"])
def test_supplies_of_one_rank_are_not_what_tensor_parallelism_costs(supply):
    facts = mesh(tp=2)
    ranks = [rank_window(0, {supply: 0.04}), rank_window(1, {"straggler": 0.04})]
    assert only(window_of(*ranks), facts).kind in ("data_starved", "checkpoint_stalls")
    ranks[1] = rank_window(1, {"straggler": 0.08})
    assert "tp_efficiency" in {each.kind for each in found(window_of(*ranks), facts)}, "but the rest is"


def test_tp_communication_explains_tp_efficiency():
    assert only(alike(mesh(tp=2), {"tp_comm": 0.05}), mesh(tp=2)).kind == "tp_comm"


def buckets(calls: int, each: int, ranks: int = 2) -> tuple[AxisTraffic, ...]:
    return (AxisTraffic("all_reduce", "dp", calls * ranks, calls * each * ranks, 0.01),)


def test_small_buckets():
    facts = mesh(dp=2, bucket_bytes=4096)
    window = alike(facts, {"dp_comm": 0.04}, traffic=buckets(64, MIB // 4))
    one = only(window, facts)
    assert (one.kind, one.axis, one.key, one.value) == ("small_buckets", "dp", "comm.bucket_size", "25 MiB")
    assert one.severity is Severity.HIGH
    assert one.gain == pytest.approx(0.4 * (1 - 1 / 64) * (1 - 1 / 4))
    assert "64 calls a step of 256 KiB each" in one.message


@pytest.mark.parametrize(
    ("calls", "each", "bucket_bytes", "comm"),
    [
        (3, 4096, 4096, 0.02),  # a small model
        (64, 2 * MIB, 4096, 0.02),  # large tensors, each a bucket
        (64, 4096, 25 * MIB, 0.02),  # small for another reason
        (64, 4096, 4096, 0.005),  # hidden behind backward
    ],
)
def test_buckets_that_are_not_too_small(calls, each, bucket_bytes, comm):
    facts = mesh(dp=2, bucket_bytes=bucket_bytes)
    assert found(alike(facts, {"dp_comm": comm}, traffic=buckets(calls, each)), facts) == []


# Machines.


def test_a_straggler_among_replicas():
    facts = mesh(dp=2)
    ranks = [rank_window(0, {"straggler": 0.045}), rank_window(1, {"other": 0.0}, score=0.5)]
    one = only(window_of(*ranks, stragglers=(straggler(1),)), facts)
    assert (one.kind, one.rank, one.host, one.severity) == ("straggler", 1, None, Severity.HIGH)
    assert one.gain == pytest.approx(0.45), "half of its 90 ms, for which rank 0 waits"
    assert "Rank 1 is slow since step 2: 50 % of the speed of ranks with the same work" in one.message
    assert one.key == "parallel.order"


def test_a_rank_that_is_slow_for_a_moment():
    """In three of the window's twenty steps it is no bottleneck, in ten it is half of one."""
    facts = mesh(dp=2)
    ranks = [rank_window(0, {"straggler": 0.045}), rank_window(1, {"other": 0.0})]
    slow = replace(straggler(1, 0.66), since_step=19)
    assert found(window_of(*ranks, stragglers=(slow,)), facts) == []
    one = only(window_of(*ranks, stragglers=(replace(slow, since_step=12),)), facts)
    assert one.gain == pytest.approx(0.9 * 0.34 / 2), "half of the window"


def test_a_rank_without_its_core():
    facts = mesh(dp=2)
    ranks = [rank_window(0, {"straggler": 0.04}), rank_window(1, {"other": 0.04}, core_wait=0.04, compute_wall=0.09)]
    late = LagHistogram()
    for _ in range(40):
        late.observe(0.2)
    window = window_of(*ranks, stragglers=(straggler(1, 0.55, "processor"),), lag={1: late})
    one = only(window, facts)
    assert (one.kind, one.rank, one.key) == ("straggler", 1, "runtime.threads")


def test_a_rank_that_comes_late_for_no_known_reason():
    facts = mesh(dp=2)
    ranks = [rank_window(0, {"straggler": 0.045}), rank_window(1, {"other": 0.05})]
    one = only(window_of(*ranks, stragglers=(straggler(1, 0.55, "arrival"),)), facts)
    assert (one.kind, one.rank, one.key) == ("straggler", 1, "parallel.order")
    assert one.gain == pytest.approx(0.45), "of the whole step, not of its computing"
    assert "a step would take 55 % of its time, did it not come late" in one.message
    assert "between them on host node0" in one.remedy


def test_nobody_waits_for_a_straggler():
    facts = mesh(pp=2, microbatches=8, layers_per_stage=(2, 6))
    light = piped(facts, [0.1, 0.3])
    late = replace(light, stragglers=(straggler(0, 0.6, "processor"),))
    assert only(late, facts).kind == "uneven_stages", "it has time enough, and explains nothing"
    facts = mesh(dp=2)
    window = window_of(rank_window(0, {"straggler": 0.004}), rank_window(1), stragglers=(straggler(1),))
    assert found(window, facts) == []
    window = window_of(rank_window(0, {"straggler": 0.007}), rank_window(1), stragglers=(straggler(1),))
    assert only(window, facts).gain == pytest.approx(0.07)
    alone = window_of(rank_window(0), stragglers=(straggler(0, 0.6, "itself"),))
    assert only(alone, mesh()).gain == pytest.approx(0.85 * 0.4)


def test_a_straggling_host():
    facts = mesh(dp=4)
    slow = tuple(straggler(rank, host="node1", score=0.6 - rank / 100) for rank in (2, 3))
    window = window_of(
        *(rank_window(rank, {"straggler": 0.03}) for rank in (0, 1)), *map(rank_window, (2, 3)), stragglers=slow
    )
    one = only(window, facts, ranks_of(facts, hosts=2))
    assert (one.kind, one.rank, one.host) == ("straggler", None, "node1")
    assert (one.evidence["rank"], one.evidence["ranks"]) == (3, 2)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_straggler_in_a_pipeline_explains_the_pipeline(dp):
    facts = mesh(dp=dp, pp=2, microbatches=4, layers_per_stage=(4, 4))
    window = piped(facts, [0.1, 0.1], slower={1: 3.0})
    assert "uneven_stages" in {each.kind for each in found(window, facts)}, "as long as nobody is named"
    one = only(replace(window, stragglers=(straggler(1, 1 / 3, "itself"),)), facts)
    assert (one.kind, one.rank) == ("straggler", 1)


def test_a_straggler_accounts_for_communication_as_far_as_it_is_late():
    facts = mesh(dp=2)
    ranks = [rank_window(0, {"dp_comm": 0.033, "straggler": 0.01}), rank_window(1, {"dp_comm": 0.033})]
    late = {"stragglers": (straggler(1, 0.8),)}
    assert [each.kind for each in found(window_of(*ranks), facts)] == ["dp_comm"]
    assert [each.kind for each in found(window_of(*ranks, **late), facts)] == ["straggler"]
    ranks[1] = rank_window(1, {"dp_comm": 0.06})
    assert sorted(each.kind for each in found(window_of(*ranks, **late), facts)) == ["dp_comm", "straggler"]


def test_oversubscribed_cores():
    facts = mesh(2, 2, 2, microbatches=4)
    waiting = {"other": 0.04, "tp_comm": 0.031, "bubble": 0.01}
    lag = {0: LagHistogram([0] * 8 + [100, 0, 0, 0], 20.0, 0.2)}
    ranks = [rank_window(rank, waiting, core_wait=0.035, bubble_ratio=0.5) for rank in range(8)]
    one = only(window_of(*ranks, lag=lag), facts, ranks_of(facts, num_cores=2))
    assert (one.kind, one.host, one.key, one.value) == ("oversubscribed_cores", "node0", "parallel.dp", None)
    assert one.gain == pytest.approx(0.35)
    assert "8 ranks share 2 cores" in one.message
    few = ranks_of(mesh(dp=4), num_cores=2)
    one = only(window_of(*(rank_window(rank, core_wait=0.02) for rank in range(4))), mesh(dp=4), few)
    assert (one.key, one.value, one.severity) == ("parallel.dp", "2", Severity.LOW)


def test_cores_that_are_enough():
    facts = mesh(dp=4)
    waiting = window_of(*(rank_window(rank, {"other": 0.04}, core_wait=0.035) for rank in range(4)))
    assert found(waiting, facts, ranks_of(facts, num_cores=4)) == [], "something else waits, not for a core"
    assert found(waiting, facts, ranks_of(facts, num_cores=0)) == [], "not known"
    cuda = {number: replace(rank, device="NVIDIA H100") for number, rank in ranks_of(facts, num_cores=2).items()}
    assert found(waiting, facts, cuda) == []
    assert found(alike(facts), facts, ranks_of(facts, num_cores=2)) == [], "more ranks, but each gets its core"


@pytest.mark.parametrize(
    ("lags", "severity"),
    [
        ([0.01] * 100, None),
        ([0.01] * 95 + [0.5] * 5, None),
        ([0.01] * 90 + [0.1] * 10, None),
        ([0.01] * 90 + [0.2] * 10, "low"),
        ([0.01] * 90 + [2.0] * 10, "critical"),
        ([2.0] * 19, None),
    ],
)
def test_event_loop_lag(lags, severity):
    facts, lag = mesh(dp=2), LagHistogram()
    for each in lags:
        lag.observe(each)
    for lags, rank in (({0: lag, 1: lag}, None), ({0: LagHistogram([50] + [0] * 11, 0.01, 0.0003), 1: lag}, 1)):
        every = found(alike(facts, lag=lags), facts)
        assert [(each.kind, each.severity, each.rank, each.gain) for each in every] == (
            [("event_loop_lag", severity, rank, None)] if severity else []
        )


# Data and checkpoints.


def test_data_starved():
    facts = mesh(dp=2)
    one = only(alike(facts, {"data": 0.04}, queue={0: 0.0, 1: 0.0}), facts)
    assert (one.kind, one.severity, one.rank, one.key) == ("data_starved", Severity.HIGH, None, "data.factory")
    assert one.gain == pytest.approx(0.4)
    assert one.evidence["batches_ready"] == 0
    assert found(alike(facts, {"data": 0.01}), facts) == []


def test_data_that_comes_in_bursts():
    facts = mesh(prefetch=3)
    one = only(alike(facts, {"data": 0.02}, queue={0: 1.2}), facts)
    assert (one.kind, one.key, one.value) == ("data_starved", "data.prefetch", "6")


def test_data_of_one_rank_makes_others_wait_for_it():
    facts = mesh(dp=2)
    one = only(window_of(rank_window(0, {"straggler": 0.03}), rank_window(1, {"data": 0.03})), facts)
    assert (one.kind, one.rank) == ("data_starved", 1)


def test_late_data_is_no_bubble():
    facts = mesh(pp=2)
    ranks = [rank_window(0, {"data": 0.05}), rank_window(1, {"bubble": 0.055}, bubble_ratio=0.9)]
    stages = [StageSeconds(0.01, 0.02)]
    ranks = [replace(rank, stages={rank.rank: stages[0]}) for rank in ranks]
    one = only(window_of(*ranks), facts)
    assert (one.kind, one.rank) == ("data_starved", 0)


def test_checkpoint_stalls():
    facts = mesh(dp=2)
    one = only(alike(facts, {"checkpoint": 0.03}), facts)
    assert (one.kind, one.severity, one.key) == ("checkpoint_stalls", Severity.HIGH, "runtime.run_dir")
    assert one.gain == pytest.approx(0.15)
    assert found(alike(facts, {"checkpoint": 0.005}), facts) == []


def test_saving_of_one_rank_is_no_bubble():
    facts = mesh(pp=2)
    ranks = [rank_window(0, {"checkpoint": 0.05}), rank_window(1, {"bubble": 0.055}, bubble_ratio=0.9)]
    ranks = [replace(rank, stages={rank.rank: StageSeconds(0.01, 0.02)}) for rank in ranks]
    assert only(window_of(*ranks), facts).kind == "checkpoint_stalls"


# The pipeline.


def test_uneven_stages():
    facts = mesh(dp=2, pp=2, microbatches=8, layers_per_stage=(2, 6), batch_size=32)
    one = only(piped(facts, [0.1, 0.3]), facts)
    assert (one.kind, one.rank, one.key, one.value) == ("uneven_stages", 1, "pipeline.layers_per_stage", "[4, 4]")
    assert one.evidence["pp_rank"] == 1
    before = 0.01 + 0.3 + 0.1 / 8
    assert one.gain == pytest.approx(1 - (0.01 + 0.2 * 9 / 8) / before)


def test_uneven_stages_whose_layers_only_the_ranks_know():
    facts = mesh(pp=2, microbatches=8)
    one = only(piped(facts, [0.1, 0.3]), facts)
    assert (one.kind, one.rank, one.value) == ("uneven_stages", 1, "profile")
    assert one.gain == pytest.approx(1 - (0.01 + 0.2 * 9 / 8) / (0.01 + 0.3 + 0.1 / 8))


def test_uneven_stages_that_no_cut_makes_even():
    facts = mesh(pp=2, microbatches=16, layers_per_stage=(1, 1))
    every = found(piped(facts, [0.1, 0.2]), facts)
    assert [each.kind for each in every] == [], "a quarter idle: nothing to do, and not below 70 %"
    assert [each.kind for each in found(piped(facts, [0.1, 0.4]), facts)] == ["pipeline_utilization"]


def test_uneven_stages_without_a_planner():
    facts = mesh(pp=2, microbatches=8)
    (one,) = find_bottlenecks(piped(facts, [0.1, 0.3]), facts, ranks_of(facts))
    assert (one.kind, one.rank, one.value, one.gain) == ("uneven_stages", 1, "profile", None)


@pytest.mark.parametrize("stages", [[0.1, 0.1], [0.1, 0.14], [0.1, 0.3]])
def test_too_few_microbatches(stages):
    facts = mesh(pp=2, microbatches=1, batch_size=16, layers_per_stage=(4, 4))
    one = only(piped(facts, stages), facts)
    assert (one.kind, one.axis, one.key, one.value) == ("too_few_microbatches", "pp", "pipeline.microbatches", "8")
    after = max(stages) + min(stages) / 8
    assert one.gain == pytest.approx(1 - (0.01 + after) / (0.01 + sum(stages)))
    assert f"none where {duration(float(one.evidence['break_even_seconds']))} of each stay" in one.remedy


@pytest.mark.parametrize(("pp", "now", "then"), [(2, 1, 8), (2, 2, 8), (4, 4, 16)])
def test_more_microbatches_gain_nothing_if_so_much_of_each_is_fixed(pp, now, then):
    facts = mesh(pp=pp, microbatches=now, batch_size=16)
    one = only(piped(facts, [0.1] * pp), facts)
    assert (one.kind, one.value) == ("too_few_microbatches", str(then))
    fixed = float(one.evidence["break_even_seconds"])
    more = piped(mesh(pp=pp, microbatches=then, batch_size=16), [0.1 + (then - now) * fixed] * pp)
    assert more.seconds == pytest.approx(piped(facts, [0.1] * pp).seconds)


def test_too_few_samples_for_more_microbatches():
    facts = mesh(dp=2, pp=4, microbatches=2, batch_size=4)
    one = only(piped(facts, [0.1] * 4), facts)
    assert (one.kind, one.key, one.value) == ("too_few_microbatches", "train.batch_size", "32")
    assert one.gain == pytest.approx(1 - (0.01 + 0.1 * 19 / 16) / (0.01 + 0.1 * 5 / 2)), "a sample"
    assert "break_even_seconds" not in one.evidence, "microbatches stay as they are"


def test_too_few_microbatches_for_the_schedule():
    facts = mesh(pp=4, microbatches=4, schedule="interleaved", virtual_stages=2, batch_size=20)
    window = piped(facts, [0.1] * 8)
    one = only(idling(window, 0.4), facts)
    assert (one.kind, one.value) == ("too_few_microbatches", "20"), "10 and 5 are no multiples of 4 ranks"


def test_too_few_microbatches_without_a_planner():
    facts = mesh(pp=4, microbatches=4, batch_size=16)
    (one,) = find_bottlenecks(piped(facts, [0.1] * 4), facts, ranks_of(facts))
    assert (one.kind, one.value, one.gain) == ("too_few_microbatches", "16", None)
    enough = mesh(pp=4, microbatches=16, batch_size=16)
    assert find_bottlenecks(piped(enough, [0.1] * 4), enough, ranks_of(enough)) == []


def test_pipeline_utilization():
    """Microbatches enough, layers alike, and yet more waiting than the schedule has."""
    facts = mesh(pp=8, microbatches=32, batch_size=32, layers_per_stage=(2,) * 8)
    window = piped(facts, [0.1] * 8)
    one = only(idling(window, 0.35), facts)
    assert (one.kind, one.key) == ("pipeline_utilization", "pipeline.schedule")
    assert one.value in SCHEDULES
    assert one.gain is not None
    assert 0.05 < one.gain < 0.35


def test_a_pipeline_that_no_schedule_helps():
    facts = mesh(pp=2, microbatches=64, batch_size=64, layers_per_stage=(1, 1))
    window = piped(facts, [0.1, 0.1])
    one = only(idling(window, 0.31), facts)
    assert (one.kind, one.key, one.value, one.gain) == ("pipeline_utilization", "parallel.pp", "1", None)
    assert found(idling(window, 0.299), facts) == []


def test_messages_between_stages_explain_idle_ranks():
    facts = mesh(pp=2, microbatches=16, batch_size=16)
    ranks = [rank_window(rank, {"pp_comm": 0.05, "bubble": 0.028}, bubble_ratio=0.31) for rank in (0, 1)]
    assert only(window_of(*ranks), facts).kind == "pp_comm"


def test_a_pipeline_that_takes_little_of_a_step():
    """Ranks idle in it, but hardly any time is lost."""
    facts = mesh(pp=2, microbatches=64, batch_size=64, layers_per_stage=(1, 1))
    ranks = [rank_window(rank, {"bubble": 0.004}, bubble_ratio=0.5) for rank in (0, 1)]
    assert found(window_of(*ranks), facts) == []
    ranks = [rank_window(rank, {"bubble": 0.006}, bubble_ratio=0.5) for rank in (0, 1)]
    assert only(window_of(*ranks), facts).kind == "pipeline_utilization"


# Memory.


@pytest.mark.parametrize(
    ("used", "severity"), [(0.9, None), (0.92, "low"), (0.95, "medium"), (0.99, "high"), (1.2, "critical")]
)
def test_memory_pressure(used, severity):
    facts = mesh(dp=2, memory_budget=1000, batch_size=2)
    window = window_of(rank_window(0, memory=850), rank_window(1, memory=int(1000 * used)))
    every = found(window, facts)
    expected = [("memory_pressure", severity, 1, "optimizer.shard")] if severity else []
    assert [(each.kind, each.severity, each.rank, each.key) for each in every] == expected


@pytest.mark.parametrize(
    ("facts", "key", "value"),
    [
        (mesh(batch_size=8, microbatches=2, memory_budget=1 << 30), "pipeline.microbatches", "4"),
        (mesh(batch_size=1, memory_budget=1 << 30), "parallel.tp", "2"),
        (mesh(dp=2, batch_size=2, memory_budget=1 << 30), "optimizer.shard", "true"),
        (mesh(dp=2, batch_size=2, memory_budget=1 << 30, shards_optimizer=True), "parallel.tp", "2"),
    ],
)
def test_less_memory(facts, key, value):
    one = only(alike(facts), facts)
    assert (one.kind, one.key, one.value, one.gain) == ("memory_pressure", key, value, None)


def test_no_remedy_takes_back_another():
    """Who has too much tensor parallelism is not told to save memory by more of it."""
    facts = mesh(tp=4, batch_size=1, memory_budget=1 << 30)
    every = {each.kind: (each.key, each.value) for each in found(alike(facts, {"tp_comm": 0.05}), facts)}
    assert every == {"tp_comm": ("parallel.tp", "2"), "memory_pressure": ("parallel.pp", "2")}


@pytest.mark.parametrize(
    "facts", [mesh(tp=2, memory_budget=1000), mesh(dp=2, memory_budget=1000, shards_optimizer=True)]
)
def test_memory_imbalance_where_there_is_nothing_to_shard(facts):
    one = only(window_of(rank_window(0, memory=300), rank_window(1, memory=900)), facts)
    assert (one.kind, one.rank, one.key, one.value) == ("memory_imbalance", 1, "memory.budget", None)
    assert one.remedy.startswith("Look for tensors that only this rank keeps")


def test_memory_imbalance():
    facts = mesh(dp=2, memory_budget=1000)
    one = only(window_of(rank_window(0, memory=300), rank_window(1, memory=900)), facts)
    assert (one.kind, one.rank, one.key, one.value) == ("memory_imbalance", 1, "optimizer.shard", "true")
    assert one.severity is Severity.LOW
    facts = mesh(pp=2, memory_budget=1000)
    one = only(window_of(rank_window(0, memory=970), rank_window(1, memory=400)), facts)
    assert (one.rank, one.key, one.value) == (0, "pipeline.layers_per_stage", "parameters")
    assert one.severity is Severity.HIGH, "as severe as the pressure that it explains"
    assert found(window_of(rank_window(0, memory=100), rank_window(1, memory=500)), facts) == [], "room enough"


def test_imbalance_does_not_explain_what_all_ranks_lack():
    facts = mesh(dp=4, memory_budget=1000)
    used = {0: 2200, 1: 950, 2: 950, 3: 950}
    every = found(window_of(*(rank_window(rank, memory=memory) for rank, memory in used.items())), facts)
    assert sorted(each.kind for each in every) == ["memory_imbalance", "memory_pressure"]


def test_uneven_stages_explain_memory_imbalance():
    facts = mesh(pp=2, microbatches=8, layers_per_stage=(1, 7), memory_budget=1000)
    window = piped(facts, [0.05, 0.35])
    ranks = {number: replace(rank, memory=(200, 800)[number]) for number, rank in window.ranks.items()}
    assert only(replace(window, ranks=ranks), facts).kind == "uneven_stages"


# All of them.


def test_the_most_severe_comes_first():
    facts = mesh(dp=2, memory_budget=1000)
    window = window_of(*(rank_window(rank, {"data": 0.012, "dp_comm": 0.05}, memory=2000) for rank in (0, 1)))
    every = found(window, facts)
    assert [each.kind for each in every] == ["memory_pressure", "dp_comm", "data_starved"]


def keys_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        found.add(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= keys_of(field.annotation, f"{prefix}{name}.")
    return found


def test_every_key_is_one_of_the_configuration():
    named, sections = set(), "|".join(RunConfig.model_fields)
    for path in (ROOT / "monitoring" / "analysis" / "rules").glob("*.py"):
        text = path.read_text()
        assert re.findall(rf'key="(?:{sections})"', text) == [], "a section alone is nothing to set"
        named |= set(re.findall(rf'"((?:{sections})\.[a-z_]+)"', text))
    assert len(named) > 10
    assert named <= keys_of(RunConfig)


def test_every_kind_has_its_section_and_levels():
    page = (ROOT / "docs" / "bottlenecks.md").read_text()
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == list(KINDS)
    rows = {
        row[0]: row[1:]
        for row in re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    }
    assert rows == {kind: tuple(map(str, map(_as_written, levels))) for kind, levels in LEVELS.items()}
    hidden = dict(re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \|$", page, re.MULTILINE))
    assert hidden == {kind: ", ".join(f"`{each}`" for each in causes) for kind, causes in HIDDEN_BY.items()}


def _as_written(level: float) -> str:
    return f"{level:.2f}"


SECONDS = (0.0, 1e-9, 0.001, 0.02, 0.1, 0.3, 7.0)


def any_rank(number: int, some: Random) -> RankWindow:
    def seconds() -> float:
        return some.choice(SECONDS)

    return RankWindow(
        number,
        seconds=seconds(),
        parts=TimeParts(tuple(seconds() for _ in PARTS)),
        remainder=-seconds(),
        compute_wall=seconds(),
        compute_cpu=seconds(),
        core_wait=seconds(),
        bubble_ratio=some.random(),
        score=some.choice([None, 0.5, 1.0]),
        stages={stage: StageSeconds(seconds(), seconds(), seconds()) for stage in range(some.randrange(6))},
        memory=some.choice([None, 0, 500, 950, 3000]),
    )


def any_window(facts: RunFacts, some: Random) -> Window:
    lag = LagHistogram([some.randrange(9) for _ in BOUNDS], some.choice(SECONDS), some.choice(SECONDS))
    late = [
        Straggler(some.randrange(9), some.choice([0.0, 0.6, 1.0, 1.5]), how, 3, some.choice([None, "node0"]))
        for how in ("peers", "itself", "processor", "arrival")
    ]
    numbers = range(some.randrange(facts.world_size + 1))
    return Window(
        num_steps=some.randrange(6),
        seconds=some.choice(SECONDS),
        ranks={number: any_rank(number, some) for number in numbers},
        parts=TimeParts(tuple(some.choice(SECONDS) for _ in PARTS)),
        traffic=tuple(
            AxisTraffic("all_reduce", axis, some.choice(SECONDS), some.choice([0, 1e6]), 1.0) for axis in ("dp", "tp")
        ),
        stragglers=tuple(some.sample(late, some.choice([0, 0, 1, 2]))),
        lag=some.choice([{}, {0: lag}, {1: lag, 8: lag}]),
        queue={number: some.choice([0.0, 1.0]) for number in numbers},
    )


def any_facts(some: Random) -> RunFacts:
    sizes = [some.randrange(1, 4) for _ in range(3)]
    return mesh(
        *sizes,
        microbatches=some.randrange(1, 9),
        batch_size=some.randrange(1, 65),
        schedule=some.choice(SCHEDULES),
        virtual_stages=some.choice([1, 2]),
        bucket_bytes=some.choice([1, 4096, 25 * MIB]),
        memory_budget=some.choice([0, 1000]),
        layers_per_stage=some.choice([(), (3,) * sizes[2], tuple(range(1, sizes[2] + 1)), (1,) * 2 * sizes[2]]),
    )


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32))
def test_nothing_raises_and_gains_are_shares(seed):
    """Whatever numbers there are, also such as contradict each other."""
    some = Random(seed)
    facts = any_facts(some)
    window = any_window(facts, some)
    known = ranks_of(facts, num_cores=some.randrange(4), hosts=some.randrange(1, 3))
    ranks = {number: rank for number, rank in known.items() if number < some.choice([1, 99])}
    every = found(window, facts, ranks)
    assert window.num_steps >= 3 or every == []
    for each in every:
        assert each.kind in KINDS
        assert each.gain is None or 0 <= each.gain < 1
        assert each.message.endswith(".")
        assert each.remedy.endswith(".")
    kinds = [each.kind for each in every]
    assert all(not set(HIDDEN_BY.get(kind, ())) & set(kinds) for kind in kinds)
    assert find_bottlenecks(window, facts, ranks) is not None


def test_values_are_accepted_by_the_configuration(tmp_path):
    """What a rule advises can be written into the file."""
    text = "parallel: {pp: 2}\npipeline: {microbatches: 8, layers_per_stage: [4, 4]}\ncomm: {bucket_size: 25 MiB}\n"
    (tmp_path / "run.yaml").write_text(text + "model: {args: {layers: 8}}\noptimizer: {shard: true}\n")
    config = load_config(tmp_path / "run.yaml", environ={})
    assert config.comm.bucket_size == 25 * MIB
    assert config.pipeline.layers_per_stage == (4, 4)
