"""Planned beside measured, with steps whose times are made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from monitoring.events.trace import Span, chrome_trace, to_bytes
from parallel3d.pipeline.schedules.actions import Action, Kind, parse_actions
from parallel3d.pipeline.schedules.build import SCHEDULES, build
from parallel3d.pipeline.simulation import Costs, simulate
from parallel3d.pipeline.simulation.measured import Late, Measured, Why, compare
from runtime.errors import InvalidCall

COSTS = Costs(2, forward=[0.01, 0.02], input_backward=[0.01, 0.02], weight_backward=[0.01, 0.02], transfer=0.001)
TABLE = build("1f1b", 2, 4).with_communication()


def action(text: str) -> Action:
    return parse_actions(text)[0]


def as_planned(slower: dict[str, float] | None = None) -> Measured:
    """The step of a simulation in which some actions begin so much later, and all that follows on their rank too; a
    receive is waited for from the end of what comes before it."""
    planned = simulate(TABLE, COSTS)
    times = []
    for column, starts, ends in zip(TABLE.columns, planned.starts, planned.ends, strict=True):
        shift, free, row = 0.0, 0.0, []
        for each, start, end in zip(column, starts, ends, strict=True):
            shift += (slower or {}).get(str(each), 0.0)
            begin = free if each.kind in (Kind.RECV_F, Kind.RECV_B) else start + shift
            row.append((100 + begin, 100 + end + shift, 0.0, 0.0))
            free = end + shift
        times.append(row)
    return Measured.of(TABLE, times)


def test_a_step_that_went_as_planned():
    measured = as_planned()
    planned = simulate(TABLE, COSTS)
    assert measured.makespan == pytest.approx(planned.makespan)
    assert measured.busy == pytest.approx(planned.busy)
    assert measured.bubble_ratio == pytest.approx(planned.bubble_ratio)
    assert measured.rank_bubble_ratios == pytest.approx(planned.rank_bubble_ratios)
    found = compare(measured)
    assert found.first_late is None
    assert found.planned.makespan == pytest.approx(planned.makespan)


def test_costs_are_what_actions_took():
    costs = as_planned().costs()
    assert costs.forward == pytest.approx([0.01, 0.02])
    assert costs.input_backward == pytest.approx([0.02, 0.04]), "a backward that is not split"
    assert costs.weight_backward == (0, 0)
    assert costs.transfer == pytest.approx([0.001])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_costs_lead_back_to_the_step(schedule):
    """Also where a stage has whole backwards and split ones."""
    table = build(schedule, 2, 4, 2 if schedule in ("interleaved", "round-robin", "zbv", "dualpipe-v") else None)
    table = table.with_communication()
    planned = simulate(table, Costs.uniform(table.stages, transfer=0.0))
    times = [
        [(start, end, 0.0, 0.0) for start, end in zip(*each, strict=True)]
        for each in zip(planned.starts, planned.ends, strict=True)
    ]
    assert compare(Measured.of(table, times)).planned.makespan == pytest.approx(planned.makespan)


def test_what_was_worked_off_in_a_receive_is_no_bubble():
    table = build("zero-bubble", 2, 3).with_communication()
    times: list[list[tuple[float, ...]]] = []
    for column in table.columns:
        now, rows = 0.0, []
        for each in column:
            # While 1F1 was waited for, all of 1W0 was computed.
            length = 1.0 if each == action("1RECV_F1") or (each.is_compute and each != action("1W0")) else 0.0
            rows.append((now, now + length, 0.0, length))
            now += length
        times.append(rows)
    measured = Measured.of(table, times)
    assert measured.busy == (9.0, 9.0)
    assert measured.bubble_ratio == 0.0
    assert measured.costs().weight_backward == pytest.approx([1.0, 1.0])
    assert measured.stage_bubble_ratios == (0.0, 0.0)
    assert measured.in_milliseconds().busy == (9000.0, 9000.0)


@pytest.mark.parametrize(
    ("slower", "late"),
    [
        ({"1RECV_F1": 0.005}, Late(1, action("1F1"), 0.005, Why.LATE_RECEIVE, action("1RECV_F1"))),
        ({"0F1": 0.007}, Late(0, action("0F1"), 0.007, Why.HELD_UP, action("0F0"))),
    ],
)
def test_what_came_late_first(slower, late):
    found = compare(as_planned(slower), COSTS).first_late
    assert found.seconds == pytest.approx(late.seconds)
    assert replace(found, seconds=late.seconds) == late


@pytest.mark.parametrize(("waited", "why"), [(0.0, Why.SLOW_COMPUTE), (0.005, Why.COLLECTIVE)])
def test_a_slow_action_makes_the_next_one_late(waited, why):
    measured = as_planned()
    starts, ends, waits = (
        [list(column) for column in columns] for columns in (measured.starts, measured.ends, measured.waits)
    )
    at = TABLE.columns[1].index(action("1F0"))
    ends[1][at] += 0.006
    for i in range(at + 1, len(ends[1])):
        starts[1][i] += 0.006
        ends[1][i] += 0.006
    waits[1][at] = waited
    slow = Measured(TABLE, *(tuple(map(tuple, columns)) for columns in (starts, ends, waits, measured.worked_off)))
    found = compare(slow, COSTS)
    assert (found.first_late.action, found.first_late.why) == (action("1B0"), why)
    assert found.first_late.because_of == action("1F0")
    assert found.to_json()["first_late"] == {
        "rank": 1,
        "seconds": pytest.approx(0.006),
        "action": "1B0",
        "why": why,
        "because_of": "1F0",
    }
    assert str(found.first_late) == f"rank 1: 1B0 came 6.0 ms late: {why} (1F0)"


def test_what_is_shown():
    text = str(compare(as_planned(), COSTS)).splitlines()
    assert text[0] == "step 272.0 ms, planned 272.0 ms"
    assert text[1] == "rank  bubble planned  measured"
    assert text[2] == "   0          55.9 %    55.9 %"
    assert text[-1] == "nothing came late"


def test_where_ranks_have_several_stages_the_bubble_of_each_is_shown():
    table = build("zbv", 2, 4).with_communication()
    planned = simulate(table, Costs(4, [1.0, 2.0, 1.0, 1.0], 1.0, 1.0, transfer=0.0))
    times = [
        [(start, end, 0.0, 0.0) for start, end in zip(*each, strict=True)]
        for each in zip(planned.starts, planned.ends, strict=True)
    ]
    found = compare(Measured.of(table, times))
    assert found.measured.stage_bubble_ratios == pytest.approx(planned.stage_bubble_ratios)
    lines = str(found).splitlines()
    assert lines[4] == "stage  bubble planned  measured"
    ratio = 100 * planned.stage_bubble_ratios[3]
    assert lines[8] == f"    3  {ratio:12.1f} %  {ratio:6.1f} %"
    assert found.to_json()["stage_bubble_ratios"]["measured"] == list(found.measured.stage_bubble_ratios)


def test_files(tmp_path):
    measured, path = as_planned(), tmp_path / "step.json"
    path.write_text(json.dumps(measured.to_json()))
    assert Measured.load(path) == measured
    path.write_text(json.dumps({**measured.to_json(), "starts": [[0.0]]}))
    with pytest.raises(InvalidCall, match=r"step\.json holds no measured step: a measured step has one start, one end"):
        Measured.load(path)
    path.write_text("[]")
    with pytest.raises(InvalidCall, match=r"step\.json holds no measured step"):
        Measured.load(path)


def test_the_last_step_of_a_run(tmp_path):
    """From its trace: of several replicas, tensor-parallel ranks and steps, one pipeline in one step."""
    names = {1: "rank 1 (dp=0 tp=0 pp=0)", 0: "rank 0 (dp=0 tp=0 pp=1)", 2: "rank 2 (dp=1 tp=0 pp=0)"}
    details = {"waited": 0.001, "cpu": 0.002}
    ranks = {
        rank: [
            Span(1, str(each), each.kind, step + 0.01 * at, step + 0.01 * at + 0.008, {"step": step, **details})
            for step in (3, 4)
            for at, each in enumerate(TABLE.columns[column])
        ]
        for rank, column in ((1, 0), (0, 1), (2, 0))
    }
    (tmp_path / "trace.json.gz").write_bytes(to_bytes(chrome_trace(ranks, names)))
    found = Measured.load(tmp_path)
    assert found.table.columns == TABLE.columns
    assert (found.table.stages, found.table.microbatches) == (TABLE.stages, TABLE.microbatches)
    assert found.makespan == pytest.approx(0.01 * max(map(len, TABLE.columns)) - 0.002, abs=1e-6)
    assert {waited for column in found.waits for waited in column} == {0.001}
    for column, worked_off in zip(TABLE.columns, found.worked_off, strict=True):
        assert [bool(seconds) for seconds in worked_off] == ["RECV" in each.kind for each in column]


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(InvalidCall, match=r"holds no measured step: .*trace\.json\.gz"):
        Measured.load(tmp_path)
    (tmp_path / "trace.json.gz").write_bytes(to_bytes({"traceEvents": []}))
    with pytest.raises(InvalidCall, match=r"it has no actions of a pipeline"):
        Measured.load(tmp_path)
