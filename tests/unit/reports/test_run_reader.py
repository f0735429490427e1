"""A run's folder read back: whole, of an older form, cut off, and full of nonsense."""

from __future__ import annotations

import gzip
import json
import os
import time
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel3d.reports.html import to_page
from parallel3d.reports.run_reader import last_measured_step, read_run
from parallel3d.reports.snapshot import thinned
from runtime.errors import InvalidCall
from tests.support.run_folders import (
    BOTTLENECK,
    RUN_ID,
    STARTED,
    events,
    kill,
    metrics,
    parts_of,
    shown,
    write_events,
    write_run,
)


def test_the_snapshot_of_a_whole_run(tmp_path):
    found = shown(write_run(tmp_path / "run"))
    assert found["run"] == {
        "run_id": RUN_ID,
        "status": "completed",
        "started": STARTED,
        "world_size": 4,
        "mesh": {"dp": 2, "tp": 1, "pp": 2},
        "model": "gpt",
        "parameters": 2003,
        "schedule": "1f1b",
        "microbatches": 2,
        "steps": 9,
        "error": None,
    }
    assert found["totals"] == {
        "steps": 5,
        "tokens": 500,
        "tokens_per_second": 200.0,
        "step_seconds": 0.5,
        "mfu": None,
        "final_loss": 3.0,
    }
    assert found["steps"][3] == {
        "step": 3,
        "loss": 3.5,
        "grad_norm": 2.0,
        "learning_rate": 3e-4,
        "tokens": 100,
        "seconds": 0.5,
        "parts": pytest.approx(parts_of(0.5)),
    }
    assert found["ranks"] == metrics()["ranks"]
    assert found["bottlenecks"] == [BOTTLENECK]
    said = {"level": "warning", "event": "disk is slow", "rank": 1, "coords": "dp=0 tp=0 pp=1", "step": 3}
    assert found["log"] == [{"time": STARTED + 6, **said}]


def test_the_last_steps_pipeline(tmp_path):
    pipeline = shown(write_run(tmp_path))["pipeline"]
    assert (pipeline["step"], pipeline["schedule"], pipeline["stages"], pipeline["microbatches"]) == (4, "1f1b", 2, 2)
    assert [[each["action"] for each in lane] for lane in pipeline["measured"]] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]
    assert pipeline["measured"][1][0] == {"action": "1F0", "start": pytest.approx(0.1), "end": pytest.approx(0.2)}
    assert [len(lane) for lane in pipeline["planned"]] == [4, 4]
    assert pipeline["bubble_ratio"]["measured"] == pytest.approx(1 / 3)
    assert 0 < pipeline["bubble_ratio"]["planned"] < 1


def test_it_is_json(tmp_path):
    json.dumps(shown(write_run(tmp_path)), allow_nan=False)


def test_a_run_that_was_killed_tells_what_it_had(tmp_path):
    found = shown(kill(write_run(tmp_path)))
    assert (found["run"]["status"], found["run"]["run_id"]) == ("killed", RUN_ID)
    assert (found["run"]["mesh"], found["totals"]["steps"]) == ({"dp": 2, "tp": 1, "pp": 2}, 5)
    assert found["bottlenecks"] == [BOTTLENECK], "the other one has gone again"
    assert (found["ranks"], found["pipeline"]) == ([], None)
    assert found["steps"][4]["parts"]["compute"] == 0.25


def test_a_run_that_still_goes_on(tmp_path):
    kill(write_run(tmp_path))
    (tmp_path / "endpoints.json").write_text(json.dumps({"run_id": RUN_ID, "pid": os.getpid()}))
    assert shown(tmp_path)["run"]["status"] == "killed", "this process is younger than the run"
    write_events(tmp_path, [{"time": time.time(), "kind": "started"}])
    assert shown(tmp_path)["run"]["status"] == "running"


def test_a_run_that_failed(tmp_path):
    failed = {"message": "rank 1 failed", "rank": 1, "coords": None, "step": 3, "traceback": "Traceback"}
    kill(write_run(tmp_path))
    write_events(tmp_path, [*events(ended=False), {"time": STARTED, "kind": "failed", **failed}])
    assert shown(tmp_path)["run"]["error"] == {**failed, "notes": []}, "as runs did before they kept notes"
    noted = {**failed, "notes": ["Layer 3.", 7]}
    write_events(tmp_path, [*events(ended=False), {"time": STARTED, "kind": "failed", **noted}])
    assert shown(tmp_path)["run"]["error"] == {**failed, "notes": ["Layer 3."]}


def test_a_folder_of_before_these_things_were_noted(tmp_path):
    write_run(tmp_path)
    old = metrics()
    del old["bottlenecks"]
    for rank in old["ranks"]:
        for key in ("host", "straggler_score", "remainder_seconds", "compute_cpu_seconds", "core_wait_seconds"):
            del rank[key]
    (tmp_path / "metrics.json").write_text(json.dumps(old))
    write_events(tmp_path, [line for line in events() if line["kind"] in ("started", "step", "ended")])
    found = shown(tmp_path)
    assert found["ranks"][0]["straggler_score"] is None
    assert found["steps"][0]["parts"] is None
    assert (found["bottlenecks"], found["log"]) == ([], [])
    assert found["totals"]["tokens_per_second"] == 200.0


def test_steps_of_a_folder_whose_events_are_lost(tmp_path):
    write_run(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    found = shown(tmp_path)
    assert [step["loss"] for step in found["steps"]] == [5.0, 4.5, 4.0, 3.5, 3.0]
    assert found["steps"][0]["tokens"] is None
    assert found["run"]["started"] is None


@pytest.mark.parametrize("prepare", ["nothing", "a file", "empty", "other files"])
def test_what_is_no_run(tmp_path, prepare):
    folder = tmp_path / "x"
    if prepare == "a file":
        folder.touch()
    elif prepare != "nothing":
        folder.mkdir()
    if prepare == "other files":
        (folder / "config.yaml").write_text("{}")
    with pytest.raises(InvalidCall, match="is no run's folder: "):
        shown(folder)


def test_many_steps_are_thinned_evenly():
    rows = [{"step": step} for step in range(10_000)]
    steps = [row["step"] for row in thinned(rows, 2000)]
    assert (len(steps), steps[0], steps[-1]) == (2000, 0, 9999)
    assert {after - before for before, after in pairwise(steps)} == {5, 6}
    assert thinned(rows[:2000], 2000) == rows[:2000]


def test_only_the_latest_log_lines_are_kept(tmp_path):
    write_run(tmp_path)
    write_events(tmp_path, [{"kind": "log", "event": str(number)} for number in range(1500)])
    log = shown(tmp_path)["log"]
    assert (len(log), log[0]["event"], log[-1]["event"]) == (1000, "500", "1499")


SCALAR = (
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["", "x", "<b>", "\x1b", "\ud800"])
)
ANYTHING = SCALAR | st.lists(SCALAR, max_size=2) | st.fixed_dictionaries({"message": SCALAR, "dp": SCALAR})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.data())
def test_nonsense_is_left_out_and_still_drawn(tmp_path, data):
    """Any one value of metrics.json, of its ranks or of an event may be anything."""
    write_run(tmp_path)
    document, lines = metrics(), events()
    target = data.draw(st.sampled_from([document, *document["ranks"], *document["bottlenecks"], *lines]))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(ANYTHING)
    (tmp_path / "metrics.json").write_text(json.dumps(document))
    write_events(tmp_path, lines)
    found = read_run(tmp_path)
    to_page(found).encode()
    json.dumps(found.report().to_json())


def test_rubbish_for_files(tmp_path):
    write_run(tmp_path)
    for name in ("config.yaml", "metrics.json", "events.jsonl", "trace.json.gz", "endpoints.json"):
        (tmp_path / name).write_bytes(b"\xff{[" * 100)
    found = shown(tmp_path)
    assert (found["run"]["status"], found["steps"], found["ranks"]) == ("killed", [], [])


# A folder that somebody made to do harm.


@pytest.mark.parametrize("name", ["config.yaml", "metrics.json", "events.jsonl", "trace.json.gz", "endpoints.json"])
@pytest.mark.parametrize("kind", ["a pipe that nobody writes", "a device without an end"])
def test_only_files_are_read(tmp_path, name, kind):
    write_run(tmp_path)
    (tmp_path / name).unlink()
    if kind.startswith("a pipe"):
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    assert shown(tmp_path)["totals"]["steps"] == 5


def test_a_small_file_that_unzips_to_a_large_one_is_left_out(tmp_path, monkeypatch):
    write_run(tmp_path)
    assert shown(tmp_path)["pipeline"] is not None
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(b" " * (3 << 20)))
    monkeypatch.setattr("parallel3d.reports.run_reader._MOST_TRACE_BYTES", 1 << 20)
    with pytest.raises(InvalidCall, match="holds more than 1 MiB"):
        last_measured_step(tmp_path)
    assert shown(tmp_path)["pipeline"] is None


def test_a_file_that_is_too_large_is_left_out(tmp_path, monkeypatch):
    write_run(tmp_path)
    monkeypatch.setattr("parallel3d.reports.run_reader._MOST_BYTES", 100)
    assert shown(tmp_path)["ranks"] == []


def test_a_configuration_of_a_billion_values_has_none(tmp_path):
    write_run(tmp_path)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    (tmp_path / "config.yaml").write_text("\n".join([*lines, "model: {factory: *a9}", "pipeline: {schedule: *a9}"]))
    run = shown(tmp_path)["run"]
    assert (run["model"], run["schedule"]) == (None, None)
    (tmp_path / "config.yaml").write_text("model: {factory: [gpt]}\npipeline: {schedule: {a: 1}, microbatches: true}\n")
    run = shown(tmp_path)["run"]
    assert (run["model"], run["schedule"], run["microbatches"]) == (None, None, None)


def test_numbers_that_no_sum_can_hold_and_lines_without_an_end(tmp_path, monkeypatch):
    write_run(tmp_path)
    huge = {"kind": "step", "step": 5, "loss": 10**400, "tokens": 10**310, "seconds": 1e308}
    write_events(tmp_path, [*events(), huge])
    found = shown(tmp_path)
    assert (found["steps"][5]["loss"], found["steps"][5]["tokens"], found["steps"][5]["seconds"]) == (None, None, None)
    monkeypatch.setattr("parallel3d.reports.run_reader._LONGEST_LINE", 1000)
    write_events(tmp_path, [{"kind": "log", "event": "x" * 5000}, *events()])
    found = shown(tmp_path)
    assert ([line["event"] for line in found["log"]], found["totals"]["steps"]) == (["disk is slow"], 5)
