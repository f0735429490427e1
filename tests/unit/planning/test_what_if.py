"""Predictions of other pipelines, beside steps that really were such pipelines, if only on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from monitoring.analysis.observations import Window
from parallel3d.config import load_config
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.simulation import Costs, simulate
from parallel3d.planning.what_if import PipelinePlan, PipelinePlanner
from tests.support.windows import mesh, piped


def plan_of(stages: list[float], *, alike: bool = False, **known: Any) -> PipelinePlan:
    facts = mesh(pp=known.pop("pp", 2), batch_size=32, **known)
    planner = replace(PipelinePlanner.of_facts(facts), layers_are_alike=alike)
    plan = planner.plan(piped(facts, stages))
    assert plan is not None
    return plan


def seconds_of(stages: list[float], **known: Any) -> float:
    return piped(mesh(pp=known.pop("pp", 2), batch_size=32, **known), stages).seconds


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_as_it_is(schedule):
    plan = plan_of([0.1, 0.2], schedule=schedule, microbatches=4)
    assert plan.step_seconds() == pytest.approx(seconds_of([0.1, 0.2], schedule=schedule, microbatches=4))


@pytest.mark.parametrize("microbatches", [1, 2, 8, 32])
def test_other_microbatches(microbatches):
    plan = plan_of([0.1, 0.2], microbatches=4)
    expected = seconds_of([0.1, 0.2], microbatches=microbatches)
    assert plan.step_seconds(microbatches=microbatches) == pytest.approx(expected)


def test_another_schedule():
    plan = plan_of([0.1] * 4, pp=4, microbatches=8)
    better = plan.step_seconds(schedule="zero-bubble")
    assert better == pytest.approx(seconds_of([0.1] * 4, pp=4, microbatches=8, schedule="zero-bubble"))
    assert better < seconds_of([0.1] * 4, pp=4, microbatches=8)


def test_other_layers():
    plan = plan_of([0.1, 0.3], microbatches=8, layers_per_stage=(2, 6))
    assert plan.best_layers() == (4, 4)
    assert plan.step_seconds(layers_per_stage=(4, 4)) == pytest.approx(seconds_of([0.2, 0.2], microbatches=8))
    assert plan.balanced_seconds() == pytest.approx(seconds_of([0.2, 0.2], microbatches=8))
    for none_such in ((4, 5), (8,), (8, 0)):
        assert plan.step_seconds(layers_per_stage=none_such) is None


def test_the_ends_of_a_model_stay_where_they_are():
    """A head as dear as four of the eight layers: it is no use to spread it over the last stage's layers."""
    plan = plan_of([0.4, 0.8], alike=True, microbatches=8, layers_per_stage=(4, 4))
    assert plan.best_layers() == (6, 2)
    assert plan.step_seconds(layers_per_stage=(6, 2)) == pytest.approx(seconds_of([0.6, 0.6], microbatches=8))
    assert plan.step_seconds(layers_per_stage=(5, 3)) == pytest.approx(seconds_of([0.5, 0.7], microbatches=8))


def test_virtual_stages():
    plan = plan_of([0.1, 0.1], microbatches=4, layers_per_stage=(4, 4))
    expected = seconds_of([0.05] * 4, microbatches=4, schedule="interleaved", virtual_stages=2)
    assert plan.step_seconds(schedule="interleaved", virtual_stages=2) == pytest.approx(expected)
    assert plan.step_seconds(schedule="interleaved", virtual_stages=8) is None, "more stages than layers"
    unknown = plan_of([0.1, 0.1], microbatches=4)
    assert unknown.step_seconds(schedule="interleaved", virtual_stages=2) is None
    assert unknown.best_layers() is None


def test_a_cut_for_ranks_with_several_stages():
    """Rank 0 has stages 0 and 2, rank 1 has 1 and 3."""
    plan = plan_of(
        [0.1, 0.4, 0.1, 0.4], schedule="interleaved", virtual_stages=2, microbatches=4, layers_per_stage=(1, 4, 1, 4)
    )
    layers = plan.best_layers()
    assert layers is not None
    assert layers[0] + layers[2] == layers[1] + layers[3] == 5


def test_no_such_pipeline():
    plan = plan_of([0.1, 0.1], microbatches=4)
    assert plan.step_seconds(schedule="interleaved", microbatches=3, virtual_stages=2) is None
    assert plan.step_seconds(schedule="no such schedule") is None
    assert plan.step_seconds(schedule="csv:/no/such/file") is None


def test_tensor_parallel_exchanges_and_messages_are_part_of_the_pipeline():
    facts = mesh(pp=2, microbatches=1, batch_size=8)
    window = piped(facts, [0.1, 0.1])
    with_tp = {}
    for number, rank in window.ranks.items():
        seconds = [*rank.parts.seconds]
        seconds[1], seconds[2] = 0.05, 0.01  # tp_comm, pp_comm
        with_tp[number] = replace(rank, parts=replace(rank.parts, seconds=tuple(seconds)))
    window = replace(window, ranks=with_tp, seconds=0.33)
    plan = PipelinePlanner.of_facts(facts).plan(window)
    assert plan is not None
    # 0.15 s a stage, 0.01 s a message, there and back; then an eighth of each.
    now, each = 2 * 0.15 + 2 * 0.01, 0.15 / 3 / 8
    then = simulate(build("1f1b", 2, 8), Costs(2, each, each, each, transfer=0.01 / 8)).makespan
    assert plan.step_seconds(microbatches=8) == pytest.approx(0.33 - now + then)


def test_a_window_that_does_not_tell():
    facts = mesh(pp=2)
    planner = PipelinePlanner.of_facts(facts)
    assert planner.plan(Window()) is None
    window = piped(facts, [0.1, 0.1])
    only_one = {0: window.ranks[0]}
    assert planner.plan(replace(window, ranks=only_one)) is None
    assert replace(planner, schedule="csv:/no/such/file").plan(window) is None


@pytest.mark.parametrize(
    ("text", "layers", "alike"),
    [
        ("model: {args: {layers: 8}}\nparallel: {pp: 2}", (4, 4), True),
        ("model: {factory: llama, args: {layers: 7}}\nparallel: {pp: 2}", (4, 3), True),
        ("model: {args: {layers: 8}}\nparallel: {pp: 2}\npipeline: {layers_per_stage: [1, 7]}", (1, 7), True),
        ("model: {args: {layers: 8}}\nparallel: {pp: 2}\npipeline: {layers_per_stage: profile}", (), True),
        ('model: {factory: "tests.support.user_models:regression"}\nparallel: {pp: 2}', (), False),
        ("model: {args: {layers: 8}}\nparallel: {pp: 2}\npipeline: {schedule: zbv}", (2, 2, 2, 2), True),
    ],
)
def test_from_a_configuration(tmp_path, text, layers, alike):
    (tmp_path / "run.yaml").write_text(text)
    planner = PipelinePlanner.of_config(load_config(tmp_path / "run.yaml", environ={}))
    assert (planner.layers_per_stage, planner.layers_are_alike) == (layers, alike)
    assert planner.pp == 2
