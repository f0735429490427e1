"""A run that goes on, as its page is told of it: the observer's own numbers, in the form that folders are read in."""

from __future__ import annotations

import asyncio
import json

import pytest

from monitoring.analysis.facts import RunFacts
from monitoring.events.events import What
from monitoring.live.cpu_budget import CpuBudget
from monitoring.live.monitor_thread import MonitorThread
from monitoring.live.observer import Observer
from parallel3d.reports.live_page import RunView, page_of
from parallel3d.reports.snapshot import MOST_STEPS
from tests.support.observed import Told, events_message, report
from tests.support.run_folders import shown, write_run

FACTS = RunFacts(
    run_id="20250610-142233-kfzq", world_size=2, pp=2, model="gpt", parameters=2003, schedule="1f1b", microbatches=2,
    steps=9, started=1.0,
)  # fmt: skip


def told_step(step: int, seconds: float = 0.5, loss: float = 2.0) -> dict[str, object]:
    fields = {"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 100, "seconds": seconds}
    return {"kind": "step", **fields, "bandwidth": None}


def pipeline_of(step: int, slow: float = 0.0) -> tuple[list, list]:
    """Two stages, two microbatches, 1f1b, in tenths of a second; `slow` more for the second stage's first forward."""
    start = 100.0 + step
    first, second = Told(step, start), Told(step, start)
    for microbatch in (0, 1):
        first.add(What.F, 0.1, 0, microbatch).add(What.SEND_F, 0.001, 0, microbatch)
    second.add(What.RECV_F, 0.101, 1, 0).add(What.F, 0.1 + slow, 1, 0).add(What.B, 0.2, 1, 0)
    second.add(What.SEND_B, 0.001, 1, 0).add(What.RECV_F, 0.001, 1, 1).add(What.F, 0.1, 1, 1).add(What.B, 0.2, 1, 1)
    second.add(What.SEND_B, 0.001, 1, 1)
    first.add(What.RECV_B, 0.2 + slow, 0, 0).add(What.B, 0.2, 0, 0).add(What.RECV_B, 0.102, 0, 1).add(What.B, 0.2, 0, 1)
    return first.done(), second.done()


@pytest.fixture
def observer():
    observer = Observer(FACTS)
    for rank in (0, 1):
        report(observer, rank, {"kind": "mesh", "coords": [0, 0, rank]})
        report(
            observer, rank, {"kind": "ready", "device": "cpu", "parameters": 1000 + rank, "host": "a", "num_cores": 4}
        )
    return observer


def make_steps(observer: Observer, first: int, count: int) -> None:
    for step in range(first, first + count):
        report(observer, 0, told_step(step, seconds=5.0 if step < 2 else 0.5))
        for rank, events in enumerate(pipeline_of(step)):
            report(observer, rank, events_message(events))


def test_it_has_the_form_of_a_finished_run(observer, tmp_path):
    make_steps(observer, 0, 5)
    live, finished = RunView(observer).snapshot(), shown(write_run(tmp_path / "run"))
    assert live.keys() == finished.keys()
    for key in ("run", "totals"):
        assert live[key].keys() == finished[key].keys()
    for key in ("steps", "ranks"):
        assert live[key][0].keys() == finished[key][0].keys()
    assert live["pipeline"].keys() == finished["pipeline"].keys()


async def test_totals_leave_out_the_warm_up_whenever_it_was_told(observer):
    view = RunView(observer)
    assert view.snapshot()["totals"]["tokens_per_second"] == 0.0
    make_steps(observer, 0, 1)
    assert view.snapshot()["totals"]["step_seconds"] == 5.0  # one always counts
    make_steps(observer, 1, 4)
    for each in (view, RunView(observer)):
        totals = each.snapshot()["totals"]
        assert (totals["steps"], totals["tokens"]) == (5, 500)
        assert totals["tokens_per_second"] == pytest.approx(200.0)
        assert totals["step_seconds"] == pytest.approx(0.5)
        assert (totals["final_loss"], totals["mfu"]) == (2.0, None)


def test_ranks_and_steps_are_the_observers(observer):
    make_steps(observer, 0, 4)
    report(observer, 1, {"kind": "memory", "bytes": 1 << 20, "kinds": {}})
    told = RunView(observer).snapshot()
    assert [rank["coords"] for rank in told["ranks"]] == [{"dp": 0, "tp": 0, "pp": 0}, {"dp": 0, "tp": 0, "pp": 1}]
    assert [rank["memory_bytes"] for rank in told["ranks"]] == [None, 1 << 20]
    for rank in told["ranks"]:
        assert rank["seconds"] == observer.analysis.totals[rank["rank"]].counted.parts.to_json()
        assert rank["straggler_score"] == observer.analysis.scores.get(rank["rank"])
    assert [step["step"] for step in told["steps"]] == [0, 1, 2, 3]
    assert told["steps"][-1]["parts"] == observer.state.parts[3].to_json()


def test_before_anything_is_known(observer):
    told = RunView(Observer(FACTS)).snapshot()
    assert (told["ranks"], told["steps"], told["pipeline"], told["log"]) == ([], [], None, [])
    assert RunView(observer).snapshot()["ranks"][0]["seconds"] is None


def test_the_pipeline_is_the_latest_steps_as_measured(observer):
    make_steps(observer, 0, 3)
    for rank, events in enumerate(pipeline_of(3, slow=0.05)):
        report(observer, rank, events_message(events))
    pipeline = RunView(observer).snapshot()["pipeline"]
    assert (pipeline["step"], pipeline["stages"], pipeline["microbatches"]) == (3, 2, 2)
    first, second = pipeline["measured"]
    assert [each["action"] for each in first] == ["0F0", "0F1", "0B0", "0B1"]
    assert [each["action"] for each in second] == ["1F0", "1B0", "1F1", "1B1"]
    assert second[0]["end"] - second[0]["start"] == pytest.approx(0.15)
    assert [[each["action"] for each in lane] for lane in pipeline["planned"]] == [
        [each["action"] for each in lane] for lane in pipeline["measured"]
    ]


def test_a_dear_pipeline_is_drawn_less_often(observer):
    now, used = [0.0], iter([0.0, 0.1, 0.1, 0.2])
    view = RunView(observer, CpuBudget(0.05, clock=lambda: now[0], processor=lambda: next(used)))
    make_steps(observer, 0, 1)
    assert view.state()["pipeline"]["step"] == 0
    make_steps(observer, 1, 1)
    now[0] = 1.9
    assert view.state()["pipeline"]["step"] == 0
    now[0] = 2.1
    assert view.state()["pipeline"]["step"] == 1


def test_the_same_step_is_not_drawn_again(observer, monkeypatch):
    view, drawn = RunView(observer, CpuBudget(float("inf"))), []
    monkeypatch.setattr(
        "parallel3d.reports.live_page.pipeline_view", lambda step, *_: drawn.append(step) or {"step": step}
    )
    for step in range(2):
        make_steps(observer, step, 1)
        for _ in range(3):
            assert view.state()["pipeline"] == {"step": step}
    assert drawn == [0, 1]


async def test_what_changes_goes_into_the_feed(observer):
    view = RunView(observer)
    start = view.feed.last_id
    make_steps(observer, 0, 1)
    report(observer, 1, {"kind": "log", "time": 1.0, "level": "info", "event": "hello"})
    view.set_status("failed", "rank 1 was killed")
    view.close()
    text = "".join([block async for block in view.feed.blocks(start)])
    told = [block.split("\n") for block in text.split("\n\n") if block.startswith("event")]
    assert [lines[0] for lines in told] == [f"event: {kind}" for kind in ("step", "parts", "log", "state", "end")]
    assert json.loads(told[1][-1].removeprefix("data: "))["step"] == 0
    run = json.loads(told[3][-1].removeprefix("data: "))["run"]
    assert (run["status"], run["error"]) == ("failed", {"message": "rank 1 was killed"})
    assert not view.is_live


def test_long_runs_are_thinned(observer):
    for step in range(MOST_STEPS + 500):
        report(observer, 0, told_step(step))
    told = [step["step"] for step in RunView(observer).snapshot()["steps"]]
    assert len(told) == MOST_STEPS
    assert (told[0], told[-1]) == (0, MOST_STEPS + 499)


async def test_the_monitor_ends_streams_before_its_server(observer):
    monitor = MonitorThread(observer)
    try:
        routes = page_of(monitor, observer)
        assert {route.path for route in routes} == {"/", "/static/{name}", "/api/run", "/api/stream"}
        monitor.set_status("completed")
        await monitor.settle(lambda: None)
        view = routes[-1].handler.__self__._source
        assert view.is_live
        assert view.state()["run"]["status"] == "completed"
    finally:
        await asyncio.to_thread(monitor.close_now)
    assert not view.is_live
