"""Planned beside measured, with steps whose times are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.pipeline.schedules.actions import Action, Kind, parse_actions
from parallel3d.pipeline.schedules.build import SCHEDULES, build
from parallel3d.pipeline.simulation import Costs, simulate
from parallel3d.pipeline.simulation.measured import Late, Measured, Why, compare

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
