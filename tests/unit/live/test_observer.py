"""All that is known of a run follows from its ranks' messages, whatever they send."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.analysis.facts import Place, RunFacts
from monitoring.analysis.observations import AxisTraffic, Bottleneck, Severity, StageSeconds
from monitoring.analysis.traffic import BOUNDS as CALL_BOUNDS
from monitoring.analysis.traffic import CallTotals, Traffic
from monitoring.analysis.window import RecentLag
from monitoring.events.collectives import CollectiveRecorder
from monitoring.events.events import STRATEGIES, Axis, What
from monitoring.events.loop_lag import BOUNDS, LagHistogram
from monitoring.events.time_parts import PARTS
from monitoring.live.observer import Observer
from monitoring.messages import KINDS
from tests.support.observed import Told, encoded, events_message, report


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def observer_of(dp: int = 2, **more) -> Observer:
    """Whose ranks are in their mesh."""
    observer = Observer(RunFacts(world_size=dp, dp=dp), **{"now": Clock(), "clock": Clock(), **more})
    for rank in range(dp):
        report(observer, rank, {"kind": "mesh", "coords": [rank, 0, 0]})
    return observer


def step_message(step: int, **more) -> dict[str, Any]:
    told = {"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 100, "seconds": 0.5, "bandwidth": None}
    return {"kind": "step", "step": step, **told, **more}


def told(step: int, compute: float = 0.3, reduce: float = 0.1, start: float | None = None) -> Told:
    begin = 100.0 + step if start is None else start
    return Told(step, begin).add(What.F, compute, 0, 0).add(What.REDUCE, reduce).add(What.OPTIMIZER, 0.05)


def make_step(observer: Observer, step: int, computes: tuple[float, ...] = (0.3, 0.3)) -> None:
    """All ranks end it together."""
    for rank, compute in enumerate(computes):
        reduce = max(computes) - compute + 0.1
        report(observer, rank, events_message(told(step, compute, reduce).done()))


def test_ranks_introduce_themselves_in_any_order():
    observer = Observer(RunFacts(world_size=2, dp=2))
    ready = {"device": "cpu", "parameters": 7, "host": "a", "num_cores": 8}
    report(observer, 0, {"kind": "ready", **ready})
    assert observer.state.ranks == {}
    for rank in (0, 1):
        report(observer, rank, {"kind": "mesh", "coords": [rank, 0, 0]})
    report(observer, 1, {"kind": "ready", "device": "NVIDIA A100", "parameters": 9})
    first, second = observer.state.ranks[0], observer.state.ranks[1]
    assert (first.place, first.host, first.num_cores) == (Place(0, 0, 0), "a", 8)
    assert first.is_cpu
    assert (second.place, second.device, second.parameters, second.is_cpu) == (Place(1, 0, 0), "NVIDIA A100", 9, False)


def test_steps_and_their_parts():
    observer, changes = observer_of(), []
    observer.changes.subscribe(lambda kind, payload: changes.append((kind, payload)))
    report(observer, 1, step_message(0))  # rank 0 speaks for all
    report(observer, 0, step_message(0))
    assert [change[0] for change in changes] == ["step"]
    assert changes[0][1]["parts"] is None
    make_step(observer, 0, (0.3, 0.2))
    [(kind, payload)] = changes[1:]
    assert kind == "parts"
    assert payload["step"] == 0
    assert payload["seconds"] == pytest.approx(0.45)
    assert payload["stragglers"] == []
    mean = {"compute": 0.25, "dp_comm": 0.1, "straggler": 0.05, "optimizer": 0.05}
    assert payload["parts"] == pytest.approx(dict.fromkeys(PARTS, 0.0) | mean)
    assert observer.state.parts[0].to_json() == payload["parts"]
    make_step(observer, 1)  # its events may come before rank 0's word
    report(observer, 0, step_message(1))
    assert observer.state.parts[1]["compute"] == pytest.approx(0.3)
    assert changes[-1][1]["parts"]["compute"] == pytest.approx(0.3)
    assert (observer.state.num_steps, observer.state.num_tokens, observer.state.step_seconds) == (2, 200, 1.0)
    assert observer.analysis.latest.step == 1
    assert {rank: [e.action for e in events] for rank, events in observer.analysis.last_pipeline.items()} == {
        0: ["0F0"], 1: ["0F0"],
    }  # fmt: skip
    assert (observer.analysis.incomplete, observer.state.malformed, observer.state.dropped) == (0, 0, {0: 0, 1: 0})


def test_totals_are_of_all_steps_and_of_those_that_count():
    observer = observer_of()
    for step, compute in enumerate((0.9, 0.6, 0.3, 0.3, 0.3)):
        make_step(observer, step, (compute, compute))
        counted = observer.analysis.totals[0].counted
        assert counted.num_steps == max(1, step - 1)
        assert counted.parts["compute"] == pytest.approx(compute * counted.num_steps)
    totals = observer.analysis.totals[1]
    assert (totals.all.num_steps, totals.counted.num_steps) == (5, 3)
    assert totals.all.parts["compute"] == pytest.approx(2.4)
    assert totals.all.seconds == pytest.approx(totals.all.parts.total + totals.all.remainder)
    window = observer.analysis.window()
    assert (window.num_steps, window.first_step, window.last_step) == (3, 2, 4)
    assert window.seconds == pytest.approx(0.45)
    assert window.ranks[1].stages == {0: StageSeconds(pytest.approx(0.3), 0.0, 0.0)}
    assert observer.analysis.window() is window, "nothing has changed"
    assert observer.analysis.bubble_by_stage == {0: 0.0}
    assert observer.analysis.bubble == 0.0


def test_the_window_is_of_the_latest_twenty():
    observer = observer_of()
    for step in range(40):
        make_step(observer, step, (0.3 if step < 20 else 0.1,) * 2)
    assert (observer.analysis.window().num_steps, observer.analysis.window().first_step) == (20, 20)
    assert observer.analysis.window().ranks[0].parts["compute"] == pytest.approx(0.1)


def test_before_any_step_there_is_an_empty_window():
    observer = observer_of()
    assert (observer.analysis.window().num_steps, observer.analysis.bubble, observer.analysis.bubble_by_stage) == (
        0,
        None,
        {},
    )
    assert observer.summary()["ranks"][0]["steps"] == 0
    json.dumps(observer.summary(), allow_nan=False)


def test_a_slow_rank_is_told_of_once():
    observer, changes = observer_of(), []
    observer.changes.subscribe(lambda kind, payload: changes.append(payload) if kind == "stragglers" else None)
    for step in range(8):
        make_step(observer, step, (0.3, 0.6))
    assert changes == [[
        {"state": "found", "rank": 1, "score": pytest.approx(0.5), "compared_with": "peers", "since_step": 2,
         "host": None},
    ]]  # fmt: skip
    assert observer.analysis.scores == {0: 1.0, 1: pytest.approx(0.5)}
    assert observer.summary()["ranks"][1]["straggler_score"] == pytest.approx(0.5)
    for step in range(8, 12):
        make_step(observer, step, (0.3, 0.3))
    assert [each["state"] for each in changes[1]] == ["gone"]
    assert observer.analysis.stragglers == ()


def bottleneck(kind: str, rank: int | None = None, share: float = 0.5) -> Bottleneck:
    return Bottleneck(kind, Severity.HIGH, f"{kind}!", {"share": share}, "do it", "data.prefetch", rank=rank)


def test_rules_are_asked_once_a_second_and_changes_told():
    clock, answers, changes = Clock(), [], []

    def find(window, facts, ranks, planner):
        answers.append((window.num_steps, planner))
        return [bottleneck("data_starved", share=len(answers))] if len(answers) < 3 else [bottleneck("straggler", 1)]

    observer = observer_of(clock=clock, planner="a plan", find=find)
    observer.changes.subscribe(lambda kind, payload: changes.append(payload) if kind == "bottlenecks" else None)
    for step in range(10):
        make_step(observer, step)
    assert answers == [(0, "a plan")]
    clock.now += 1.5
    make_step(observer, 10)
    make_step(observer, 11)
    assert answers[1:] == [(9, "a plan")]
    assert [[(each["state"], each["kind"]) for each in change] for change in changes] == [[("found", "data_starved")]]
    assert observer.analysis.bottlenecks[0].evidence == {"share": 2}, "the latest numbers"
    observer.finish()
    assert [(each["state"], each["kind"], each["rank"]) for each in changes[1]] == [
        ("found", "straggler", 1), ("gone", "data_starved", None),
    ]  # fmt: skip
    assert observer.summary()["bottlenecks"] == [bottleneck("straggler", 1).to_json()]


def test_the_summary_has_what_metrics_json_needs():
    observer = observer_of()
    report(observer, 0, {"kind": "memory", "bytes": 500, "kinds": {"weights": 100}})
    report(observer, 0, {"kind": "memory", "bytes": 400, "kinds": {"weights": 120}})
    for step in range(4):
        make_step(observer, step, (0.3, 0.2))
    found = json.loads(json.dumps(observer.summary(), allow_nan=False))
    assert sum(found["parts"].values()) == pytest.approx(1.0)
    rank = found["ranks"]["0"]
    assert rank["seconds"] == pytest.approx(
        dict.fromkeys(PARTS, 0.0) | {"compute": 0.6, "dp_comm": 0.2, "optimizer": 0.1}
    )
    assert (rank["memory_bytes"], rank["memory_kinds"]) == (500, {"process": 400, "weights": 120})
    assert (rank["remainder_seconds"], rank["core_wait_seconds"]) == (pytest.approx(0), pytest.approx(0))
    assert (rank["compute_cpu_seconds"], rank["bubble"], rank["steps"]) == (pytest.approx(0.6), 0.0, 2)
    assert observer.state.memory[0] == {"process": 400, "weights": 120}


def test_clocks_of_two_hosts_are_put_together():
    """Rank 1's clock is 50 s behind; it arrives 0.1 s after rank 0 all the same."""
    observer = observer_of()
    report(observer, 1, {"kind": "clock", "offset": 50.0})
    report(observer, 0, events_message(told(0, compute=0.3, reduce=0.2, start=100.0).done()))
    report(observer, 1, events_message(told(0, compute=0.4, reduce=0.1, start=50.0).done()))
    assert observer.analysis.latest.ranks[0].parts["straggler"] == pytest.approx(0.1)
    assert observer.analysis.last_pipeline[1][0].start == pytest.approx(100.0)


def test_steps_of_which_events_were_dropped_are_left_out():
    observer = observer_of()
    for step in range(3):
        report(observer, 0, events_message(told(step).done()))
    report(observer, 1, events_message(told(0).done()))
    report(observer, 1, events_message(told(1).done()[1:], dropped=1))
    assert (observer.analysis.incomplete, observer.analysis.latest.step) == (1, 0)
    report(observer, 1, events_message(told(2).done(), dropped=1))
    assert (observer.analysis.incomplete, observer.analysis.latest.step) == (1, 2)
    report(observer, 0, events_message(told(3).done()))
    observer.finish()
    assert observer.analysis.incomplete == 2, "rank 1 never told of the last one"


def test_steps_of_ranks_that_nobody_knows_are_counted():
    observer = Observer(RunFacts(world_size=1))
    report(observer, 0, events_message(told(0).done(), dropped=5))
    assert (observer.analysis.incomplete, observer.analysis.latest, observer.state.dropped) == (1, None, {0: 5})


def test_queue_log_lag_and_last_words():
    clock = Clock()
    observer, logs = observer_of(now=clock), []
    observer.changes.subscribe(lambda kind, payload: logs.append((kind, payload)))
    report(observer, 1, {"kind": "log", "level": "info", "event": "<b>hello", "rank": 7, "step": 3})
    assert list(observer.state.logs) == [{"level": "info", "event": "<b>hello", "rank": 1, "step": 3}]
    assert logs == [("log", observer.state.logs[0])]
    for depth in (2, 1.0):
        report(observer, 0, {"kind": "queue", "mean": depth, "capacity": 2})
    assert (list(observer.state.queue[0]), observer.state.queue_capacity) == ([2.0, 1.0], 2)
    for step in range(3):
        make_step(observer, step)
    assert observer.analysis.window().queue == {0: 1.5}
    for rank in (0, 1):
        report(observer, rank, {"kind": "nonfinite", "step": 4})
    assert observer.state.nonfinite == 1
    clock.now += 5
    report(observer, 1, {"kind": "heartbeat"})
    assert observer.state.last_seen == {0: 1000.0, 1: 1005.0}


def test_lag_of_the_window_leaves_out_what_was_before():
    def totals(*lags: float) -> LagHistogram:
        histogram = LagHistogram()
        for lag in lags:
            histogram.observe(lag)
        return histogram

    recent = RecentLag(10.0)
    recent.take(0, totals(0.9), now=0.0)  # setting up
    assert recent.histograms(0.0) == {}
    recent.take(0, totals(0.9, 0.0001), now=1.0)
    recent.take(1, totals(0.8), now=1.0)
    recent.take(1, totals(0.8, 0.03, 0.003), now=2.0)
    found = recent.histograms(2.0)
    assert [sum(each.counts) for each in found.values()] == [1, 2]
    assert found[1].total == pytest.approx(0.033)
    assert found[1].worst == pytest.approx(0.031), "what the total allows: no rank tells more"
    assert recent.histograms(11.5).keys() == {1}, "ten seconds after the first"
    assert recent.histograms(20.0) == {}
    recent.take(0, totals(), now=20.0)  # a rank that began anew
    assert recent.histograms(20.0) == {}
    recent.take(1, totals(0.8, 0.03, 0.003, 1.5), now=20.0)
    assert recent.histograms(20.0)[1].worst == 1.5, "the worst of all is told"
    recent.take(1, totals(0.8, 0.03, 0.003, 1.5, 1.1, 1.1), now=31.0)
    assert recent.histograms(31.0)[1].worst == pytest.approx(1.2), "and is no more, once it is long ago"


# Traffic.

SIZES = {"world": 4, "dp": 2, "tp": 2, "pp": 1}


def test_traffic_of_events():
    traffic = Traffic(SIZES)
    told = Told().beside(0.0, 0.002, axis=Axis.DP, num_bytes=1000).beside(0.0, 0.5, axis=Axis.TP, calls=10, waited=0.01)
    told.beside(0.1, 0.104, axis=Axis.DP, num_bytes=3000, strategy=STRATEGIES.index("ring")).add(What.F, 1.0, 0, 0)
    for rank in (0, 1):
        traffic.take_events(rank, told.done())
    totals = traffic.totals()
    assert totals["all_reduce", "dp"].num_bytes == 8000
    tensor = totals["all_reduce", "tp"]
    assert (tensor.calls, tensor.num_bytes, tensor.seconds) == (20, 0, pytest.approx(0.02))
    assert tensor.counts[CALL_BOUNDS.index(1e-3)] == 20, "each took a millisecond, on average"
    assert traffic.bandwidths() == {
        ("all_reduce", "dp", "default"): pytest.approx(500_000),
        ("all_reduce", "dp", "ring"): pytest.approx(750_000),
    }


def test_traffic_of_totals_counts_where_no_events_come():
    traffic, recorder = Traffic(SIZES), CollectiveRecorder()
    for seconds in (0.1, 0.3):
        recorder.record("dp", "all_reduce", "ring", "adaptive", 1000, 2, seconds, 0.0)
        recorder.record("mine", "barrier", "default", "default", 0, 2, 0.002, 0.0)
        traffic.take_totals(0, 0, recorder.totals())
    totals = traffic.totals()
    assert list(totals) == [("all_reduce", "dp"), ("barrier", "world")]
    assert (totals["all_reduce", "dp"].calls, totals["all_reduce", "dp"].num_bytes) == (2, 2000)
    assert [count for count in totals["all_reduce", "dp"].counts if count] == [1, 1]
    assert traffic.bandwidths() == {("all_reduce", "dp", "ring"): pytest.approx(1000 / 0.3)}, "the latest report's"
    traffic.take_totals(0, 1, recorder.totals())
    assert traffic.totals()["all_reduce", "dp"].calls == 4, "another mesh of the same rank"
    traffic.take_events(0, Told().beside(0.0, 0.1, axis=Axis.DP, num_bytes=10).done())
    assert {where: each.calls for where, each in traffic.totals().items()} == {("all_reduce", "dp"): 1}


def test_messages_between_stages_are_sends_on_pp_unless_their_group_tells_of_them():
    traffic = Traffic(SIZES)
    told = Told().add(What.SEND_F, 0.002, 0, 0, num_bytes=1000).add(What.SEND_B, 0.002, 1, 0, num_bytes=500)
    told.add(What.RECV_F, 0.1, 1, 0, num_bytes=1000).add(What.SEND_F, 0.002, 0, 1, num_bytes=1000, calls=0)
    traffic.take_events(0, told.done())
    ((where, total),) = traffic.totals().items()
    assert where == ("send", "pp")
    assert (total.calls, total.num_bytes, total.seconds) == (2, 1500, pytest.approx(0.004))
    assert traffic.bandwidths() == {}, "a send ends when the message is handed over, not when it has arrived"


def test_calls_that_never_were_add_nothing():
    totals = CallTotals()
    totals.add(0, 10, 1.0)
    assert totals == CallTotals()


def test_traffic_in_the_observer():
    observer = observer_of()
    for step in range(4):
        for rank in (0, 1):
            each = told(step).beside(0.0, 0.2, axis=Axis.DP, num_bytes=1 << 20)
            report(observer, rank, events_message(each.done()))
    assert observer.state.traffic.totals()["all_reduce", "dp"].num_bytes == 8 << 20
    assert observer.analysis.window().traffic == (AxisTraffic("all_reduce", "dp", 2.0, 2 << 20, pytest.approx(0.4)),)
    recorder = CollectiveRecorder()
    recorder.record("dp", "all_reduce", "ring", "ring", 1000, 2, 0.1, 0.0)
    report(observer, 0, {"kind": "collectives", "mesh": 0, **recorder.to_wire()})
    assert list(observer.state.traffic.bandwidths()) == [("all_reduce", "dp", "default")]


# What does not fit.


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "mesh", "coords": [0, 0]},
        {"kind": "mesh", "coords": [0, -1, 0]},
        {"kind": "ready", "device": 3, "parameters": 1},
        step_message(0, loss="low"),
        step_message(-1),
        step_message(0, seconds=math.nan),
        {"kind": "step"},
        {"kind": "events", "data": "!", "dropped": 0},
        {"kind": "events", "data": "AAAA", "dropped": 0},
        {"kind": "events", "data": encoded(told(0).done()), "dropped": -1},
        {"kind": "events", "data": 5, "dropped": 0},
        {"kind": "memory", "bytes": 1, "kinds": {"weights": "much"}},
        {"kind": "memory", "bytes": 1, "kinds": 7},
        {"kind": "queue", "mean": 1.0},
        {"kind": "loop_lag", "counts": [1]},
        {"kind": "collectives", "mesh": 0, "totals": 3},
        {"kind": "clock", "offset": math.inf},
        {"kind": "nonfinite"},
    ],
)
def test_a_message_that_does_not_fit_is_counted(message):
    observer = observer_of()
    report(observer, 0, message)
    assert observer.state.malformed == 1
    assert (observer.state.num_steps, observer.analysis.latest, observer.state.memory, observer.state.queue) == (
        0,
        None,
        {},
        {},
    )


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("coords", "device", "parameters", "step", "loss", "data", "dropped", "bytes", "kinds", "mean", "capacity",
          "counts", "mesh", "totals", "offset", "seconds", "tokens")  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(FIELDS), values))
def test_nothing_that_a_rank_sends_raises(kind, fields):
    observer = observer_of()
    report(observer, 0, {"kind": kind, **fields})
    observer.finish()
    observer.summary()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=500))
def test_bytes_that_are_no_events(data):
    observer = observer_of(1)
    report(observer, 0, {"kind": "events", "data": base64.b64encode(data).decode(), "dropped": 0})
    assert observer.state.malformed <= 1
    last = 2**32 - 1
    report(observer, 0, events_message(told(last, start=100.0).done()))
    assert observer.analysis.latest.step == last


def test_lag_bounds_are_those_of_the_wire():
    observer = observer_of()
    lag = LagHistogram()
    lag.observe(0.003)
    report(observer, 0, {"kind": "loop_lag", **lag.to_wire()})
    assert observer.state.lag[0].counts == [int(bound == 0.005) for bound in BOUNDS]
