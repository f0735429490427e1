"""The supervisor's decisions, event by event."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from runtime.errors import Coords
from runtime.launch.failures import Report, find_root, render, render_interrupted
from runtime.launch.supervisor import (
    KILL_SECONDS,
    SETTLE_SECONDS,
    STOP_GRACE_SECONDS,
    Finish,
    Fork,
    Interrupted,
    Phase,
    RankEnded,
    RankFailed,
    RankPlaced,
    RankStarted,
    ServerReady,
    SetTimer,
    Signal,
    Supervisor,
    TimerFired,
)

ERROR = Report(time=1.0, type="ValueError", message="bad", traceback="Traceback ...\nValueError: bad\n")
PEER_LOST = Report(time=0.5, type="PeerLost", message="rank 1 left", traceback="PeerLost\n", is_consequence=True)


def running(num_ranks: int) -> Supervisor:
    machine = Supervisor(num_ranks, interrupt_grace=7.0)
    machine.handle(ServerReady(), 0.0)
    for rank in range(num_ranks):
        machine.handle(RankStarted(rank), 0.0)
    return machine


def end_all(machine: Supervisor, codes: dict[int, int], now: float = 9.0) -> None:
    for rank, code in codes.items():
        machine.handle(RankEnded(rank, code, now), now)
    assert machine.phase is Phase.DONE


def test_ranks_are_forked_one_after_the_other():
    machine = Supervisor(3)
    assert machine.handle(ServerReady(), 0.0) == [Fork(0)]
    assert machine.handle(RankStarted(0), 0.0) == [Fork(1)]
    assert machine.handle(RankStarted(1), 0.0) == [Fork(2)]
    assert machine.handle(RankStarted(2), 0.0) == []


def test_all_well_ends_with_zero():
    machine = running(2)
    assert machine.handle(RankEnded(0, 0, 1.0), 1.0) == []
    assert machine.handle(RankEnded(1, 0, 2.0), 2.0) == [Finish()]
    assert machine.exit_code() == 0
    assert machine.failures() == []


def test_a_rank_that_is_done_before_the_last_is_forked_does_not_end_the_launch():
    machine = Supervisor(2)
    machine.handle(ServerReady(), 0.0)
    assert machine.handle(RankEnded(0, 0, 1.0), 1.0) == []
    assert machine.handle(RankStarted(0), 1.0) == [Fork(1)]


def test_the_first_failure_stops_the_others_with_their_children():
    machine = running(3)
    assert machine.handle(RankEnded(1, 3, 1.0), 1.0) == [
        Signal((0, 2), signal.SIGTERM, whole_group=True),
        SetTimer(1, STOP_GRACE_SECONDS),
    ]
    assert machine.handle(RankEnded(0, -signal.SIGTERM, 1.1), 1.1) == []
    assert machine.handle(TimerFired(1), 6.0) == [
        Signal((2,), signal.SIGKILL, whole_group=True),
        SetTimer(2, KILL_SECONDS),
    ]
    assert machine.handle(RankEnded(2, -signal.SIGKILL, 6.1), 6.1) == [Finish()]
    assert machine.exit_code() == 3
    assert [failure.was_stopped for failure in machine.failures()] == [True, False, True]


def test_a_failure_before_all_are_forked_forks_no_more():
    machine = Supervisor(3)
    machine.handle(ServerReady(), 0.0)
    assert machine.handle(RankEnded(0, 1, 1.0), 1.0)[-1] == Finish()
    assert machine.handle(RankStarted(0), 1.0) == []


def test_a_report_stops_the_others_without_waiting_for_the_end_and_lets_the_rank_finish():
    machine = running(2)
    assert machine.handle(RankFailed(0, ERROR), 1.0)[0] == Signal((1,), signal.SIGTERM, whole_group=True)
    assert machine.handle(RankEnded(1, -signal.SIGTERM, 1.1), 1.1) == []
    assert machine.handle(TimerFired(1), 6.0)[0] == Signal((0,), signal.SIGKILL, whole_group=True)
    end_all(machine, {0: -signal.SIGKILL})
    assert machine.exit_code() == 1, "it failed by its exception; that it hung later is our business"


def test_a_consequence_waits_for_its_cause():
    machine = running(2)
    assert machine.handle(RankFailed(0, PEER_LOST), 0.6) == [SetTimer(1, SETTLE_SECONDS)]
    assert machine.handle(RankEnded(0, 1, 0.7), 0.7) == []
    assert machine.handle(RankFailed(1, ERROR), 1.0) == [SetTimer(2, STOP_GRACE_SECONDS)]
    end_all(machine, {1: 1})
    root = find_root(machine.failures())
    assert root is not None
    assert root.rank == 1


def test_a_consequence_does_not_keep_the_rest_from_starting():
    machine = Supervisor(2)
    machine.handle(ServerReady(), 0.0)
    machine.handle(RankFailed(0, PEER_LOST), 0.6)
    assert machine.handle(RankEnded(0, 1, 0.7), 0.7) == []
    assert machine.handle(RankStarted(0), 0.7) == [Fork(1)]


def test_a_cause_that_never_speaks_is_stopped_and_the_consequence_is_shown():
    machine = running(2)
    machine.handle(RankFailed(0, PEER_LOST), 0.6)
    assert machine.handle(TimerFired(1), 1.6)[0] == Signal((1,), signal.SIGTERM, whole_group=True)
    end_all(machine, {0: 1, 1: -signal.SIGTERM})
    root = find_root(machine.failures())
    assert root is not None
    assert root.rank == 0
    assert machine.exit_code() == 1


def test_a_rank_that_dies_of_a_signal_we_did_not_send_is_the_root_even_when_found_late():
    machine = running(2)
    machine.handle(RankFailed(0, PEER_LOST), 0.6)
    machine.handle(TimerFired(1), 1.6)
    end_all(machine, {0: 1, 1: -signal.SIGSEGV})
    assert machine.exit_code() == 128 + signal.SIGSEGV


def test_the_root_is_the_earliest_by_its_own_clock_not_by_arrival():
    machine = running(2)
    machine.handle(RankFailed(0, replace(ERROR, time=2.0)), 2.1)
    machine.handle(RankFailed(1, replace(ERROR, time=1.9, type="KeyError")), 2.2)
    end_all(machine, {0: 1, 1: 1})
    root = find_root(machine.failures())
    assert root is not None
    assert root.rank == 1


def test_what_a_rank_says_after_it_was_told_to_stop_is_a_consequence():
    machine = running(2)
    machine.handle(RankEnded(0, -signal.SIGKILL, 5.0), 5.0)
    machine.handle(RankFailed(1, replace(ERROR, time=5.1)), 5.2)
    end_all(machine, {1: 1})
    assert [failure.is_consequence for failure in machine.failures()] == [False, True]
    assert machine.exit_code() == 137


def test_a_rank_that_ends_with_a_code_of_its_own_is_listed_and_not_counted_as_stopped():
    machine = running(4)
    machine.handle(RankEnded(0, 3, 5.0), 5.0)
    end_all(machine, {1: 7, 2: -signal.SIGTERM, 3: 128 + signal.SIGTERM})
    failures = machine.failures()
    assert render(failures[0], failures) == (
        "parallel3d: rank 0 failed first: exited with code 3\n"
        "parallel3d: rank 1: exited with code 7\n"
        "parallel3d: 2 other ranks were stopped.\n"
    )


def test_ctrl_c_once_asks_each_rank_and_waits_for_the_grace():
    machine = running(2)
    assert machine.handle(Interrupted(signal.SIGINT), 1.0) == [
        Signal((0, 1), signal.SIGINT, whole_group=False),
        SetTimer(1, 7.0),
    ]
    assert machine.handle(RankEnded(0, -signal.SIGINT, 1.1), 1.1) == []
    assert machine.handle(TimerFired(1), 8.0)[0] == Signal((1,), signal.SIGKILL, whole_group=True)
    end_all(machine, {1: -signal.SIGKILL})
    assert machine.exit_code() == 130


def test_ctrl_c_twice_kills_at_once():
    machine = running(2)
    machine.handle(Interrupted(signal.SIGINT), 1.0)
    assert machine.handle(Interrupted(signal.SIGINT), 1.1)[0] == Signal((0, 1), signal.SIGKILL, whole_group=True)


def test_a_hang_up_that_comes_twice_is_still_orderly():
    machine = running(1)
    machine.handle(Interrupted(signal.SIGHUP), 1.0)
    assert machine.handle(Interrupted(signal.SIGHUP), 1.0) == []
    end_all(machine, {0: -signal.SIGINT})
    assert machine.exit_code() == 129


def test_interrupted_before_any_rank_exists_ends_at_once():
    machine = Supervisor(2)
    assert machine.handle(Interrupted(signal.SIGTERM), 0.1)[-1] == Finish()
    assert machine.exit_code() == 143


def test_a_rank_that_outlives_sigkill_is_not_waited_for_for_ever():
    machine = running(1)
    machine.handle(Interrupted(signal.SIGINT), 1.0)
    machine.handle(Interrupted(signal.SIGINT), 1.1)
    assert machine.handle(TimerFired(2), 12.0) == [Finish()]


def test_an_old_timer_means_nothing():
    machine = running(2)
    machine.handle(RankFailed(0, PEER_LOST), 0.6)
    machine.handle(RankFailed(1, ERROR), 1.0)
    assert machine.handle(TimerFired(1), 1.6) == []


def test_the_report_names_the_root_with_its_coordinates_first_and_counts_the_stopped():
    machine = running(4)
    machine.handle(RankPlaced(1, Coords(0, 0, 1)), 0.1)
    machine.handle(RankFailed(2, PEER_LOST), 0.6)
    machine.handle(RankFailed(1, ERROR), 1.0)
    end_all(machine, {0: -15, 1: 1, 2: 1, 3: -15})
    failures = machine.failures()
    root = find_root(failures)
    assert root is not None
    assert render(root, failures) == (
        "parallel3d: rank 1 (dp=0 tp=0 pp=1) failed first: ValueError: bad\n"
        "Traceback ...\nValueError: bad\n"
        "parallel3d: rank 2: PeerLost: rank 1 left\n"
        "parallel3d: 2 other ranks were stopped.\n"
    )


def test_after_ctrl_c_only_what_went_wrong_is_told():
    machine = running(3)
    machine.handle(Interrupted(signal.SIGINT), 1.0)
    machine.handle(RankFailed(0, replace(ERROR, time=1.1, type="KeyboardInterrupt")), 1.1)
    machine.handle(RankFailed(1, replace(ERROR, time=1.1)), 1.1)
    end_all(machine, {0: -2, 1: 1, 2: -2})
    assert render_interrupted(signal.SIGINT, machine.failures()) == (
        "parallel3d: interrupted by SIGINT; all ranks have ended.\n"
        "parallel3d: rank 1 failed: ValueError: bad\n"
        "Traceback ...\nValueError: bad\n"
    )


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"time": "x", "type": "A", "message": "", "traceback": ""},
        {"time": 1.0, "type": 3, "message": "", "traceback": ""},
        {"time": 1.0, "type": "A", "message": None, "traceback": ""},
    ],
)
def test_a_malformed_report_is_none(message):
    assert Report.from_message(message, rank=0) is None


@pytest.mark.parametrize(
    ("notes", "kept"), [(["Layer 3.", None], ("Layer 3.",)), ([], ()), (None, ()), ("Layer 3.", ()), ({"a": 1}, ())]
)
def test_notes_are_kept_as_far_as_they_are_text(notes, kept):
    fields = {"time": 1, "type": "A", "message": "m", "traceback": "t", "notes": notes}
    report = Report.from_message(fields, rank=0)
    assert report is not None
    assert report.notes == kept


@pytest.mark.parametrize("error", [None, 3, {}, {"kind": ["PeerLost"]}, {"kind": "Mismatch"}])
def test_only_the_known_kinds_are_consequences(error):
    fields = {"time": 1, "type": "A", "message": "m", "traceback": "t", "error": error}
    report = Report.from_message(fields, rank=0)
    assert report is not None
    assert not report.is_consequence


def test_what_every_rank_raises_is_told_by_the_rank_that_it_blames():
    fields = {"time": 1, "type": "NonFiniteGradient", "message": "m", "traceback": "t", "culprit": 1}
    machine = running(2)
    for rank, when in ((0, 1.0), (1, 1.1)):
        report = Report.from_message({**fields, "time": when}, rank)
        assert report is not None
        machine.handle(RankFailed(rank, report), when)
    end_all(machine, {0: 1, 1: 1})
    root = find_root(machine.failures())
    assert root is not None
    assert root.rank == 1
