"""A rank's program, derived from literal tables."""

from __future__ import annotations

import pytest

from parallel3d.pipeline.program import RankProgram, rank_program
from parallel3d.pipeline.schedules.actions import Action, parse_actions
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.simulation import ScheduleDeadlock
from runtime.errors import InvalidCall


def actions(text: str) -> tuple[Action, ...]:
    return tuple(parse_actions(word)[0] for word in text.split())


def programs(schedule: str, ranks: int, microbatches: int) -> list[RankProgram]:
    table = build(schedule, ranks, microbatches)
    return [rank_program(table, table.stages_of_rank(rank), rank) for rank in range(ranks)]


def test_the_middle_of_a_pipeline():
    _, middle, _ = programs("1f1b", 3, 4)
    assert middle.actions[:6] == actions("1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1")
    assert middle.num_forward == 6
    assert not middle.is_forward_only
    assert middle.peers == (0, 2)
    assert middle.incoming == {
        0: actions("1RECV_F0 1RECV_F1 1RECV_F2 1RECV_F3"),
        2: actions("1RECV_B0 1RECV_B1 1RECV_B2 1RECV_B3"),
    }
    assert middle.other_ends[actions("1SEND_B2")[0]] == (0, actions("0RECV_B2")[0])
    assert middle.last_backwards == {*actions("1B3")}
    assert middle.mergeable == {1: {0, 1}}, "the last two have their own turn"
    assert middle.loss_sends == {*actions("2SEND_B3 1SEND_B3")}


def test_both_stages_of_a_v():
    first, second = programs("zbv", 2, 4)
    assert first.peers == (1,)
    assert first.last_backwards == {*actions("0W3 3W3")}
    assert second.last_backwards == {*actions("1W3 2W3")}
    assert set(first.mergeable) == {0, 3}


def test_the_processors_clock_is_read_after_what_computes_and_before_it():
    program = programs("gpipe", 2, 1)[0]
    assert program.actions == actions("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD")
    assert program.has_cpu_time == (True, False, True, True, False)
    assert program.reads_cpu_clock == (True, False, True, True, True)


def test_forward_only():
    program = rank_program(build("1f1b", 2, 3).forward_only(), [1], 1)
    assert program.is_forward_only
    assert program.last_backwards == program.loss_sends == frozenset()


def test_what_has_no_program():
    table = build("1f1b", 2, 2)
    with pytest.raises(InvalidCall, match=r"^pipeline rank 1 has the stages \[1\], but modules for \[0, 1\] are given"):
        rank_program(table, [1, 0], 1)
    stuck = type(table)("mine", 2, 2, (actions("0F0 0B0 0F1 0B1"), actions("1F0 1F1 1B0 1B1")))
    with pytest.raises(ScheduleDeadlock):
        rank_program(stuck, [0], 0)
