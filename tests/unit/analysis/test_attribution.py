"""Each second of a step has one name, and the names follow from all ranks' events."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.analysis.attribution import attribute
from monitoring.analysis.facts import Place, RankFacts
from monitoring.analysis.observations import AxisTraffic, StageSeconds, StepTimes
from monitoring.events.collectives import KINDS
from monitoring.events.events import OPS, Axis, Event, What
from monitoring.events.time_parts import PARTS
from tests.support.observed import Told, mesh_of

F, B, I, W = What.F, What.B, What.I, What.W  # noqa: E741
SEND_F, SEND_B, RECV_F, RECV_B = What.SEND_F, What.SEND_B, What.RECV_F, What.RECV_B
DATA, REDUCE_GRAD, REDUCE, MEET = What.DATA, What.REDUCE_GRAD, What.REDUCE, What.MEET
OPTIMIZER, CHECKPOINT, STEP = What.OPTIMIZER, What.CHECKPOINT, What.STEP


def parts_of(times: StepTimes, rank: int) -> dict[str, float]:
    """Those that are not 0, in milliseconds."""
    found = times.ranks[rank]
    assert found.rank == rank
    assert found.parts.total + found.remainder == pytest.approx(found.seconds)
    return {part: round(1e3 * seconds, 6) for part, seconds in found.parts.to_json().items() if seconds > 1e-12}


def check_sums(times: StepTimes) -> None:
    for each in times.ranks:
        assert abs(each.remainder) <= 1e-9


def test_one_rank():
    told = Told(7).add(DATA, 0.001).gap(0.002).add(F, 0.010, 0, 0).add(B, 0.020, 0, 0).add(REDUCE_GRAD, 0.0005, 0)
    told.gap(0.0005).add(OPTIMIZER, 0.003).add(CHECKPOINT, 0.004)
    times = attribute({0: told.done()}, mesh_of())
    assert (times.step, times.seconds) == (7, pytest.approx(0.041))
    assert parts_of(times, 0) == {
        "compute": 30, "dp_comm": 0.5, "data": 1, "optimizer": 3, "checkpoint": 4, "other": 2.5,
    }  # fmt: skip
    check_sums(times)
    assert times.ranks[0].stages == {0: StageSeconds(pytest.approx(0.01), pytest.approx(0.02), 0.0)}
    assert times.ranks[0].bubble_ratio == 0.0


def test_two_replicas_wait_for_the_slower_one():
    quick = Told().add(F, 0.010, 0, 0).add(B, 0.020, 0, 0).add(REDUCE, 0.025).add(MEET, 0.001).add(OPTIMIZER, 0.004)
    slow = Told().add(F, 0.020, 0, 0).add(B, 0.030, 0, 0).add(REDUCE, 0.005).add(MEET, 0.001).add(OPTIMIZER, 0.004)
    times = attribute({0: quick.done(), 1: slow.done()}, mesh_of(dp=2))
    assert parts_of(times, 0) == {"compute": 30, "straggler": 20, "dp_comm": 5, "optimizer": 5}
    assert parts_of(times, 1) == {"compute": 50, "dp_comm": 5, "optimizer": 5}
    check_sums(times)


def test_replicas_meet_before_they_compute_too():
    """They agree on the batch's weight; the one whose data came late is waited for there."""
    early = Told().add(DATA, 0.001).gap(0.001).add(REDUCE, 0.007).add(F, 0.030, 0, 0).add(REDUCE, 0.002)
    late = Told().add(DATA, 0.007).gap(0.0005).add(REDUCE, 0.0015).add(F, 0.030, 0, 0).add(REDUCE, 0.002)
    times = attribute({0: early.done(), 1: late.done()}, mesh_of(dp=2))
    assert parts_of(times, 0) == {"data": 1, "straggler": 5.5, "dp_comm": 3.5, "other": 1, "compute": 30}
    assert parts_of(times, 1) == {"data": 7, "dp_comm": 3.5, "other": 0.5, "compute": 30}
    check_sums(times)


def test_gradients_that_tensor_parallel_ranks_share_are_added_up_between_them():
    early = Told().add(B, 0.020, 0, 0).gap(0.001).add(REDUCE, 0.014, axis=Axis.TP)
    late = Told().add(B, 0.030, 0, 0).gap(0.001).add(REDUCE, 0.004, axis=Axis.TP)
    times = attribute({0: early.done(), 1: late.done()}, mesh_of(tp=2))
    assert parts_of(times, 0) == {"compute": 20, "straggler": 10, "tp_comm": 4, "other": 1}
    assert parts_of(times, 1) == {"compute": 30, "tp_comm": 4, "other": 1}
    check_sums(times)


def test_stages_that_share_a_weight_wait_for_each_other_as_the_schedule_has_it():
    """The last stage is done early; the one in between has no part in it, and the replicas come after."""
    last = Told().add(B, 0.010, 2, 0).add(REDUCE, 0.024, axis=Axis.PP).add(REDUCE, 0.002)
    middle = Told().add(B, 0.010, 1, 0).add(REDUCE, 0.001)
    first = Told().add(B, 0.030, 0, 0).add(REDUCE, 0.004, axis=Axis.PP).add(REDUCE, 0.002)
    told = {rank: each.done() for rank, each in enumerate((first, middle, last) * 2)}
    times = attribute(told, mesh_of(dp=2, pp=3))
    assert parts_of(times, 2) == {"compute": 10, "bubble": 20, "pp_comm": 4, "dp_comm": 2}
    assert parts_of(times, 1) == {"compute": 10, "dp_comm": 1}
    assert parts_of(times, 0) == {"compute": 30, "pp_comm": 4, "dp_comm": 2}
    check_sums(times)


def test_ranks_that_meet_twice_are_late_or_early_each_time():
    """As where passes are apart: first rank 1 is waited for, then rank 0."""
    a = Told().add(F, 0.010, 0, 0).add(MEET, 0.011).add(B, 0.030, 0, 0).add(MEET, 0.001)
    b = Told().add(F, 0.020, 1, 0).add(MEET, 0.001).add(B, 0.020, 1, 0).add(MEET, 0.011)
    times = attribute({0: a.done(), 1: b.done()}, mesh_of(pp=2))
    for rank in (0, 1):
        assert parts_of(times, rank) == {"compute": 40, "bubble": 10, "optimizer": 2}
    check_sums(times)


def test_what_overlaps_computing_is_in_no_part():
    told = Told().add(B, 0.030, 0, 0).add(REDUCE, 0.001)
    told.beside(0.005, 0.028, axis=Axis.DP, num_bytes=1 << 20).beside(0.006, 0.029, axis=Axis.DP, num_bytes=1 << 20)
    times = attribute({0: told.done()}, mesh_of())
    assert parts_of(times, 0) == {"compute": 30, "other": 1}, "a single replica reduces nothing"
    assert times.traffic == (AxisTraffic("all_reduce", "dp", 2, 2 << 20, pytest.approx(0.046)),)


def test_messages_between_stages_are_traffic_unless_their_group_tells_of_them():
    for calls, traffic in ((1, (AxisTraffic("send", "pp", 1, 80, pytest.approx(0.001)),)), (0, ())):
        told = Told().add(F, 0.010, 0, 0).add(SEND_F, 0.001, 0, 0, num_bytes=80, calls=calls)
        assert attribute({0: told.done()}, mesh_of()).traffic == traffic


def test_messages_that_their_group_tells_of_and_others_add_up():
    told = Told().add(F, 0.010, 0, 0).add(SEND_F, 0.001, 0, 0, num_bytes=80)
    told.beside(0.002, 0.005, op=OPS.index("send"), axis=Axis.PP, num_bytes=20)
    (found,) = attribute({0: told.done()}, mesh_of()).traffic
    assert found == AxisTraffic("send", "pp", 2, 100, pytest.approx(0.004))


def test_tensor_parallel_waits():
    """In the forward rank 1 comes last, in the backward rank 0: the other one waits for it."""
    a = Told().add(F, 0.010, 0, 0, waited=0.004).add(B, 0.020, 0, 0, waited=0.001)
    b = Told().add(F, 0.010, 0, 0, waited=0.001).add(B, 0.020, 0, 0, waited=0.003)
    times = attribute({0: a.done(), 1: b.done()}, mesh_of(tp=2))
    assert parts_of(times, 0) == {"compute": 25, "tp_comm": 2, "straggler": 3}
    assert parts_of(times, 1) == {"compute": 26, "tp_comm": 2, "straggler": 2}
    check_sums(times)
    assert times.ranks[0].compute_wall == pytest.approx(0.025)


def test_tensor_parallel_waits_of_which_some_were_lost():
    a = Told().add(F, 0.010, 0, 0, waited=0.004).add(B, 0.020, 0, 0, waited=0.001)
    b = Told().add(F, 0.010, 0, 0, waited=0.001)
    times = attribute({0: a.done(), 1: b.done()}, mesh_of(tp=2))
    assert parts_of(times, 0) == {"compute": 25, "tp_comm": 5}
    check_sums(times)


def pipeline_step(slow: float = 0.0, start: float = 100.0) -> list[list[Event]]:
    """Two stages, one microbatch; times in ms. `slow`: more for stage 1's forward.

    stage 0 | 0F0 10  SEND 1  RECV_B 34 …………………  0B0 20  MEET 1  OPT 2
    stage 1 | RECV_F 12 ……… 1F0 10  1B0 20  SEND 1  MEET 25 ……………  OPT 2
    """
    first = Told(start=start).add(F, 0.010, 0, 0).add(SEND_F, 0.001, 0, 0).add(RECV_B, 0.034 + slow, 0, 0)
    first.add(B, 0.020, 0, 0).add(MEET, 0.001).add(OPTIMIZER, 0.002)
    second = Told(start=start).add(RECV_F, 0.012, 1, 0).add(F, 0.010 + slow, 1, 0).add(B, 0.020, 1, 0)
    second.add(SEND_B, 0.001, 1, 0).add(MEET, 0.023).add(OPTIMIZER, 0.002)
    return [first.done(), second.done()]


def test_two_stages():
    times = attribute(dict(enumerate(pipeline_step())), mesh_of(pp=2))
    # Stage 0 receives from 11 to 45 what is sent at 42; stage 1 receives until 12 what is sent at 10.
    assert parts_of(times, 0) == {"compute": 30, "pp_comm": 4, "bubble": 31, "optimizer": 3}
    # Stage 1 comes to the meeting at 43, stage 0 at 65.
    assert parts_of(times, 1) == {"compute": 30, "pp_comm": 3, "bubble": 32, "optimizer": 3}
    check_sums(times)
    assert times.ranks[0].pipeline == pytest.approx(0.065)
    assert times.ranks[1].bubble_ratio == pytest.approx(32 / 65)
    assert times.ranks[1].stages == {1: StageSeconds(pytest.approx(0.01), pytest.approx(0.02), 0.0)}


def test_two_pipelines_one_of_them_slow():
    """Stage 1 of the second takes 15 ms longer than the other's: that is no bubble."""
    events = dict(enumerate(pipeline_step() + pipeline_step(slow=0.015)))
    for rank in (0, 1):  # the quick pipeline waits at the meeting
        *before, meet, optimizer, step = events[rank]
        late = [each._replace(start=each.start + 0.015, end=each.end + 0.015) for each in (optimizer, step)]
        events[rank] = [*before, meet._replace(end=meet.end + 0.015), late[0], step._replace(end=late[1].end)]
    times = attribute(events, mesh_of(dp=2, pp=2))
    assert parts_of(times, 2) == {"compute": 30, "pp_comm": 4, "bubble": 31, "straggler": 15, "optimizer": 3}
    assert parts_of(times, 3) == {"compute": 45, "pp_comm": 3, "bubble": 32, "optimizer": 3}
    # Their own pipeline is through: no schedule would help those who wait for the other one.
    assert parts_of(times, 0) == {"compute": 30, "pp_comm": 4, "bubble": 31, "straggler": 15, "optimizer": 3}
    check_sums(times)


def test_waiting_for_another_stages_reduction_is_no_bubble():
    """Stage 0 is the last to compute, and reduces its gradients for much longer than stage 1."""
    first = Told().add(RECV_B, 0.011, 0, 0).add(B, 0.010, 0, 0).add(REDUCE, 0.100).add(MEET, 0.001)
    second = Told().add(B, 0.010, 1, 0).add(SEND_B, 0.001, 1, 0).add(REDUCE, 0.005).add(MEET, 0.106)
    times = attribute({rank: each.done() for rank, each in enumerate([first, second] * 2)}, mesh_of(dp=2, pp=2))
    assert parts_of(times, 1) == {"compute": 10, "pp_comm": 1, "dp_comm": 105, "bubble": 5, "optimizer": 1}
    assert times.ranks[1].bubble_ratio == pytest.approx(5 / 21)
    alone = attribute({0: first.done(), 1: second.done()}, mesh_of(pp=2))
    assert parts_of(alone, 1) == {"compute": 10, "pp_comm": 1, "other": 5, "bubble": 5, "optimizer": 101}
    check_sums(times)
    check_sums(alone)


def late_at(*ranks: Told, pp: int = 1) -> list[float]:
    """In milliseconds, of replicas, or of replicated pipelines."""
    times = attribute({rank: told.done() for rank, told in enumerate(ranks)}, mesh_of(dp=len(ranks) // pp, pp=pp))
    return [round(1e3 * each.lateness, 6) for each in times.ranks]


def replica(before: float, wait: float, forward: float = 0.030, *, data: float = 0.0, reduce: float = 0.002) -> Told:
    told = Told().add(DATA, data).gap(before).add(REDUCE, wait).add(F, forward, 0, 0)
    return told.add(REDUCE, reduce).add(MEET, 0.001).add(OPTIMIZER, 0.002)


def test_a_rank_that_comes_late_for_no_known_reason():
    assert late_at(replica(0.0, 0.051), replica(0.050, 0.001)) == [0, 50]
    assert late_at(replica(0.0, 0.051), replica(0.0, 0.001, data=0.050)) == [0, 0], "its data"
    slow = replica(0.0, 0.001, forward=0.080)
    assert late_at(replica(0.0, 0.001, reduce=0.052), slow) == [0, 0], "its computing"
    assert late_at(replica(0.0, 0.051, forward=0.080), replica(0.050, 0.001, reduce=0.052)) == [0, 0], "each in turn"


def stages(
    idle: tuple[float, float] = (0.0, 0.0), forward: float = 0.010, transfer: float = 0.001, early: float = 0.0
) -> tuple[Told, Told]:
    """Of one pipeline with one microbatch.

    idle: each stage, before its forward. forward: of the first. early: how long both wait for their replicas.
    """
    first = (
        Told().gap(idle[0]).add(F, forward, 0, 0).add(SEND_F, 0.001, 0, 0).add(RECV_B, 0.029 + transfer + idle[1], 0, 0)
    )
    first.add(B, 0.020, 0, 0).add(REDUCE, 0.002 + early).add(MEET, 0.001)
    second = Told().add(RECV_F, idle[0] + forward + transfer, 1, 0).gap(idle[1]).add(F, 0.010, 1, 0).add(B, 0.020, 1, 0)
    return first, second.add(SEND_B, 0.001, 1, 0).add(REDUCE, 0.002 + early).add(MEET, 0.020)


def test_a_stage_that_is_held_up_by_its_pipeline_is_not_late():
    """Who idles is; who waits for that one, or whose messages are long on their way, is not."""
    assert late_at(*stages(early=0.100), *stages(transfer=0.051), pp=2) == [0, 0, 0, 0]
    assert late_at(*stages(early=0.050), *stages(idle=(0.050, 0.0)), pp=2) == [0, 0, 50, 0]
    assert late_at(*stages(early=0.050), *stages(idle=(0.0, 0.050)), pp=2) == [0, 0, 0, 50]
    both = stages(idle=(0.0, 0.050), forward=0.040)  # one computes longer, the other one waits for that and idles
    assert late_at(*stages(early=0.080), *both, pp=2) == [0, 0, 0, 50]


def test_a_stage_that_is_slow_to_send_is_late():
    """Nobody holds up a send."""
    late = Told().add(F, 0.010, 0, 0).add(SEND_F, 0.050, 0, 0).add(REDUCE, 0.002).add(MEET, 0.001)
    others = [Told().add(F, 0.010, stage, 0).add(REDUCE, 0.052).add(MEET, 0.001) for stage in (0, 1, 1)]
    assert late_at(others[0], others[1], late, others[2], pp=2) == [0, 0, 50, 0]


def test_weight_parts_that_were_computed_in_a_receive_explain_no_more_than_they_took():
    """Rank 3 computes 30 ms more than rank 1 while nothing comes, and idles for 50 ms."""
    one = Told().add(RECV_F, 0.040, 1, 0).add(W, 0.010, 1, 0).add(REDUCE, 0.082).add(MEET, 0.001)
    other = (
        Told().add(RECV_F, 0.070, 1, 0, cpu=0.030).gap(0.050).add(W, 0.010, 1, 0).add(REDUCE, 0.002).add(MEET, 0.001)
    )
    first = [Told().add(F, 0.010, 0, 0).add(REDUCE, 0.012).add(MEET, 0.001) for _ in range(2)]
    assert late_at(first[0], one, first[1], other, pp=2) == [0, 0, 0, 50]


def test_stages_that_wait_for_one_that_shares_their_weight_are_not_late():
    early, late = (
        Told().add(B, 0.020, 0, 0).add(REDUCE, wait, axis=Axis.PP).add(REDUCE, 0.001) for wait in (0.001, 0.051)
    )
    idle = Told().add(B, 0.020, 1, 0).gap(0.050).add(REDUCE, 0.001, axis=Axis.PP).add(REDUCE, 0.001)
    on_time = Told().add(B, 0.020, 1, 0).add(REDUCE, 0.001, axis=Axis.PP).add(REDUCE, 0.051)
    assert late_at(early, on_time, late, idle, pp=2) == [0, 0, 0, 50]


def test_a_rank_that_comes_late_to_its_tensor_parallel_peer_and_its_replica():
    """Rank 3 is; rank 1 waits for it, and so comes late to rank 0."""
    ranks, events = mesh_of(dp=2, tp=2), {}
    for rank in ranks:
        on_time = rank in (0, 2)
        told = Told().gap(0.050 if rank == 3 else 0.0).add(REDUCE, 0.051 if rank == 1 else 0.001)
        told.add(F, 0.081 if on_time else 0.031, 0, 0, waited=0.051 if on_time else 0.001)
        events[rank] = told.add(REDUCE, 0.001).add(MEET, 0.001).done()
    times = attribute(events, ranks)
    assert [round(1e3 * each.lateness, 6) for each in times.ranks] == [0, 0, 0, 50]
    assert [parts_of(times, rank).get("straggler", 0) for rank in ranks] == [50, 50, 50, 0]


def test_a_meeting_without_a_pipeline_waits_for_stragglers():
    a = Told().add(F, 0.010, 0, 0).add(MEET, 0.006).add(OPTIMIZER, 0.002)
    b = Told().add(F, 0.015, 0, 0).add(MEET, 0.001).add(OPTIMIZER, 0.002)
    times = attribute({0: a.done(), 1: b.done()}, mesh_of(tp=2))
    assert parts_of(times, 0) == {"compute": 10, "straggler": 5, "optimizer": 3}
    assert parts_of(times, 1) == {"compute": 15, "optimizer": 3}


def test_a_message_that_was_sent_before_it_was_waited_for():
    first = Told().add(F, 0.010, 0, 0).add(SEND_F, 0.001, 0, 0)
    second = Told().gap(0.015).add(RECV_F, 0.002, 1, 0).add(F, 0.010, 1, 0)
    times = attribute({0: first.done(), 1: second.done()}, mesh_of(pp=2))
    assert parts_of(times, 1) == {"compute": 10, "pp_comm": 2, "other": 15}


def test_a_message_whose_send_was_lost_is_waited_for_all_the_time():
    second = Told().add(RECV_F, 0.012, 1, 0).add(F, 0.010, 1, 0)
    times = attribute({0: Told().add(F, 0.01, 0, 0).done(), 1: second.done()}, mesh_of(pp=2))
    assert parts_of(times, 1) == {"compute": 10, "bubble": 12}


@pytest.mark.parametrize(("worked", "waited", "received"), [(0.0, 10, 2), (0.006, 4, 2), (0.010, 0, 2), (0.011, 0, 1)])
def test_weight_parts_that_are_computed_while_nothing_comes(worked, waited, received):
    first = Told().add(F, 0.010, 0, 0).add(SEND_F, 0.001, 0, 0)
    second = Told().add(RECV_F, 0.012, 1, 0, cpu=worked).add(W, 0.005, 1, 0)
    times = attribute({0: first.done(), 1: second.done()}, mesh_of(pp=2))
    want = {"compute": 5 + 1e3 * worked, "bubble": waited, "pp_comm": received}
    assert parts_of(times, 1) == {part: pytest.approx(value) for part, value in want.items() if value}
    assert times.ranks[1].compute_cpu == pytest.approx(0.005 + worked)
    assert times.ranks[1].stages[1].weight == pytest.approx(0.005 + worked)
    check_sums(times)


def test_split_backwards():
    told = Told().add(F, 0.01, 3, 0).add(I, 0.02, 3, 0).add(W, 0.03, 3, 0).add(F, 0.01, 4, 0).add(B, 0.05, 4, 0)
    times = attribute({0: told.done()}, mesh_of())
    approx = pytest.approx
    assert times.ranks[0].stages == {
        3: StageSeconds(approx(0.01), approx(0.02), approx(0.03)),
        4: StageSeconds(approx(0.01), approx(0.05), 0.0),
    }


def test_waiting_for_a_core_is_not_computing():
    told = Told().add(F, 0.010, 0, 0, cpu=0.004).add(B, 0.020, 0, 0, cpu=0.025)
    times = attribute({0: told.done()}, mesh_of())
    assert parts_of(times, 0) == {"compute": 24, "other": 6}
    found = times.ranks[0]
    assert (found.compute_wall, found.compute_cpu) == (pytest.approx(0.030), pytest.approx(0.029))
    assert found.core_wait == pytest.approx(0.006)
    on_gpu = {0: RankFacts(0, Place(0, 0, 0), device="NVIDIA A100")}
    assert parts_of(attribute({0: told.done()}, on_gpu), 0) == {"compute": 30}


def test_all_three_axes():
    """2x2x2: a pipeline for each of dp and tp, all in step; every axis takes its part."""
    events, ranks = {}, mesh_of(dp=2, tp=2, pp=2)
    for rank, facts in ranks.items():
        waited = 0.002 if facts.place.tp == 0 else 0.003
        if facts.place.pp == 0:
            told = Told().add(DATA, 0.001).add(F, 0.010, 0, 0, waited=waited).add(SEND_F, 0.001, 0, 0)
            told.add(RECV_B, 0.034, 0, 0).add(B, 0.020, 0, 0, waited=waited).add(REDUCE_GRAD, 0.0, 0)
            told.add(REDUCE, 0.003).add(MEET, 0.001)
        else:
            told = Told().add(DATA, 0.001).add(RECV_F, 0.012, 1, 0).add(F, 0.010, 1, 0, waited=waited)
            told.add(B, 0.020, 1, 0, waited=waited).add(SEND_B, 0.001, 1, 0).add(REDUCE_GRAD, 0.0, 1)
            told.add(REDUCE, 0.003).add(MEET, 0.023)
        events[rank] = told.add(OPTIMIZER, 0.002).done()
    times = attribute(events, ranks)
    check_sums(times)
    assert parts_of(times, 0) == {
        "compute": 26, "tp_comm": 4, "pp_comm": 4, "dp_comm": 3, "bubble": 29, "straggler": 2, "data": 1,
        "optimizer": 3,
    }  # fmt: skip
    # The ranks at tp=1 compute 2 ms less, so those at tp=0 are the late ones, and others wait for them.
    assert parts_of(times, 6) == {
        "compute": 24, "tp_comm": 4, "pp_comm": 4, "dp_comm": 3, "bubble": 31, "straggler": 2, "data": 1,
        "optimizer": 3,
    }  # fmt: skip
    assert (parts_of(times, 7)["bubble"], parts_of(times, 7)["dp_comm"]) == (29, 6), "stage 0 reduces while it waits"
    assert sum(times.parts.seconds) == pytest.approx(times.seconds)


def test_a_step_that_was_not_ended_is_refused():
    with pytest.raises(ValueError, match="rank 0 has not ended the step"):
        attribute({0: Told().add(F, 0.01, 0, 0).events}, mesh_of())


def test_events_that_overlap_leave_a_remainder():
    """Which should not be; if it is, it is shown and not hidden."""
    told = Told().add(F, 0.010, 0, 0)
    told.events.append(Event(OPTIMIZER, 0, 100.005, 100.015))
    told.now = 100.020
    found = attribute({0: told.done()}, mesh_of()).ranks[0]
    assert found.remainder == pytest.approx(-0.005)
    assert found.parts["other"] == pytest.approx(0.005)


KINDS_OF_WORK = [DATA, F, B, I, W, SEND_F, SEND_B, RECV_F, RECV_B, REDUCE_GRAD, REDUCE, MEET, OPTIMIZER, CHECKPOINT]
seconds = st.floats(0, 0.1)
pieces = st.lists(
    st.tuples(st.sampled_from(KINDS_OF_WORK), seconds, seconds, st.integers(0, 3), st.integers(0, 3), seconds, seconds),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]), st.data())
def test_whatever_ranks_tell_adds_up(mesh, data):
    ranks, events = mesh_of(*mesh), {}
    for rank in ranks:
        told = Told(start=100.0 + data.draw(seconds))
        for what, gap, length, stage, microbatch, waited, cpu in data.draw(pieces):
            told.gap(gap).add(what, length, stage, microbatch, waited=min(waited, length), cpu=cpu)
        told.beside(0.0, data.draw(seconds), axis=Axis(data.draw(st.integers(0, 3))), op=KINDS.index("barrier"))
        events[rank] = told.done()
    times = attribute(events, ranks)
    for each in times.ranks:
        assert abs(each.remainder) <= 1e-6
        assert min(each.parts.seconds) >= 0
        assert 0 <= each.core_wait <= each.parts["other"] + 1e-9
        assert 0 <= each.bubble_ratio <= 1 + 1e-9
        assert 0 <= each.lateness <= each.seconds + 1
    assert times.parts.total == pytest.approx(times.seconds, abs=1e-6)
    assert len(times.parts.seconds) == len(PARTS)


def test_an_event_costs_microseconds():
    """Far from a limit that a busy machine would miss; a way that is not linear would."""
    told = Told()
    for microbatch in range(2000):
        told.add(RECV_F, 0.001, 1, microbatch).add(F, 0.001, 1, microbatch).add(SEND_F, 0.001, 1, microbatch)
    events, ranks = {0: told.done(), 1: told.done()}, mesh_of(pp=2)
    began = time.thread_time()
    attribute(events, ranks)
    assert (time.thread_time() - began) / 12_000 < 50e-6
