"""The run's folder: what is in it, when it is refused, and that it is written whatever happens."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import threading
from pathlib import Path

import pytest

from monitoring.analysis.facts import Status
from monitoring.events.trace import ACTIONS, Span
from parallel3d.config import load_config
from parallel3d.runs.folder import RunFolder, check_run_dir, new_run_id, take_span_files, write_span_file
from parallel3d.runs.record import RunRecord
from runtime.errors import ConfigError
from tests.support.observed import report
from tests.support.processes import SECONDS
from tests.unit.runs.test_record import step_message


def config_of(run_dir: Path | None = None, **overrides):
    given = {} if run_dir is None else {"runtime.run_dir": str(run_dir)}
    return load_config(None, overrides={"train.steps": 9, **given, **overrides}, environ={})


def test_run_ids_sort_by_time_and_differ():
    ids = {new_run_id() for _ in range(50)}
    assert len(ids) > 45
    assert all(re.fullmatch(r"\d{8}-\d{6}-[a-z]{4}", each) for each in ids)


async def test_what_a_run_leaves(here):
    config = config_of()
    folder = RunFolder.create(config, "20250102-030405-abcd")
    assert folder.path == Path("runs/20250102-030405-abcd")
    assert load_config(folder.config, environ={}) == config
    folder.event("started", world_size=1)
    folder.event("odd", value=Path("x"))
    record = RunRecord(config, status=Status.COMPLETED)
    for step in range(3):
        report(record, 0, step_message(step))
    write_span_file(folder.path, 0, [Span(ACTIONS, "0F0", "F", 1.0, 2.0)])
    await folder.complete(record)
    assert sorted(os.listdir(folder.path)) == [
        "config.yaml", "endpoints.json", "events.jsonl", "metrics.json", "report.html", "trace.json.gz",
    ]  # fmt: skip
    lines = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["started", "odd"]
    assert all(isinstance(line["time"], float) for line in lines)
    metrics = json.loads((folder.path / "metrics.json").read_text())
    assert (metrics["run_id"], metrics["losses"]) == ("20250102-030405-abcd", [1.0] * 3)
    assert json.loads((folder.path / "endpoints.json").read_text())["pid"] == os.getpid()
    trace = json.loads(gzip.decompress((folder.path / "trace.json.gz").read_bytes()))
    assert "0F0" in {event["name"] for event in trace["traceEvents"]}


async def test_a_disk_that_does_not_come_along_costs_log_lines_only(here, monkeypatch):
    monkeypatch.setattr("parallel3d.runs.folder._MOST_WAITING", 10)
    folder, go_on = RunFolder.create(config_of(), "id"), threading.Event()
    append = folder._append
    monkeypatch.setattr(folder, "_append", lambda: go_on.wait(SECONDS) and append())
    for number in range(50):
        folder.note("log", {"event": "a line", "number": number})
    folder.note("parts", {"step": 0, "seconds": 0.5, "parts": {}, "stragglers": []})
    go_on.set()
    await folder.complete(RunRecord(config_of()))
    lines = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["log"] * 10 + ["parts"]
    assert folder.num_left_out == 40


async def test_lines_of_several_threads_are_written_once_each(here, monkeypatch):
    monkeypatch.setattr("parallel3d.runs.folder._GATHER_SECONDS", 0.0)
    folder = RunFolder.create(config_of(), "id")

    def write(thread):
        for number in range(500):
            folder.event("line", thread=thread, number=number)

    await asyncio.gather(*(asyncio.to_thread(write, thread) for thread in range(4)))
    await folder.complete(RunRecord(config_of()))
    lines = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    for thread in range(4):
        assert [line["number"] for line in lines if line["thread"] == thread] == list(range(500))


async def test_lines_are_written_while_the_run_goes_on(here):
    folder = RunFolder.create(config_of(), "id")
    folder.event("started")
    async with asyncio.timeout(SECONDS):
        while not (folder.path / "events.jsonl").read_text():  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(0.01)
    await folder.complete(RunRecord(config_of()))


async def test_what_an_observer_sees_is_written(here):
    folder = RunFolder.create(config_of(), "id")
    folder.note("step", {"step": 0})  # which whoever supervises writes
    folder.note("parts", {"step": 0, "seconds": 0.5, "parts": {"compute": 0.5}, "stragglers": []})
    folder.note("log", {"time": 5.0, "event": "hello", "kind": "odd", "self": 1, "loss": float("nan")})
    straggler = {"rank": 1, "score": 0.5, "compared_with": "peers", "since_step": 3, "host": None}
    folder.note("stragglers", [{"state": "found", **straggler}])
    bottleneck = {"kind": "data_starved", "severity": "high", "rank": 1}
    folder.note("bottlenecks", [{"state": "gone", **bottleneck}])
    observed = {
        "parts": {"compute": 1.0},
        "ranks": {0: {"steps": 1, "seconds": {"compute": 0.5}}},
        "bottlenecks": [bottleneck],
    }
    record = RunRecord(config_of(), observed=observed)
    report(record, 0, {"kind": "mesh", "coords": [0, 0, 0]})
    await folder.complete(record)
    lines = [json.loads(line) for line in (folder.path / "events.jsonl").read_text().splitlines()]
    assert [line.pop("kind") for line in lines] == ["parts", "log", "straggler", "bottleneck"]
    times = [line.pop("time") for line in lines]
    assert times[1] == 5.0, "when the rank said it"
    assert lines == [
        {"step": 0, "seconds": 0.5, "parts": {"compute": 0.5}, "stragglers": []},
        {"event": "hello", "self": 1, "loss": None},
        {"state": "found", **straggler},
        {"state": "gone", "bottleneck": bottleneck},
    ]
    metrics = json.loads((folder.path / "metrics.json").read_text())
    assert (metrics["parts"], metrics["bottlenecks"]) == ({"compute": 1.0}, [bottleneck])
    assert metrics["ranks"][0]["seconds"] == {"compute": 0.5}


def test_the_configuration_it_keeps_can_be_run_again(here):
    config = config_of(Path("mine"))
    kept = load_config(RunFolder.create(config, "id").config, environ={})
    check_run_dir(kept, "config.yaml")
    assert kept == config_of()


async def test_spans_that_were_gathered_otherwise(here):
    folder = RunFolder.create(config_of(), "id")
    await folder.complete(RunRecord(config_of()), {3: [Span(ACTIONS, "3F0", "F", 1.0, 2.0)]})
    trace = json.loads(gzip.decompress((folder.path / "trace.json.gz").read_bytes()))
    assert {event["pid"] for event in trace["traceEvents"]} == {3}


def test_half_a_span_file_is_no_trouble(here):
    write_span_file(here, 0, [Span(ACTIONS, "0F0", "F", 1.0, 2.0)])
    (here / ".spans-1.json").write_text('[[1, "a"')
    (here / ".spans-2.new").write_text("[")
    assert list(take_span_files(here, 4)) == [0]
    assert os.listdir(here) == []


def test_an_empty_folder_is_taken(here):
    (here / "mine").mkdir()
    check_run_dir(config_of(here / "mine"), "run.yaml")
    check_run_dir(config_of(here / "new" / "one"), "run.yaml")
    assert RunFolder.create(config_of(here / "new" / "one"), "id").path.is_dir()


def test_a_folder_with_something_in_it_is_refused(here):
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError) as error:
        check_run_dir(config_of(Path("mine")), "--run-dir")
    assert str(error.value) == (
        '--run-dir  runtime.run_dir = "mine": not empty, and a run does not write over another (there is thesis.tex).\n'
        "           Give a new or empty folder, or leave it out for runs/<run_id>."
    )


def test_a_file_is_no_folder(here):
    (here / "mine").touch()
    with pytest.raises(ConfigError, match="can't be a run's folder: Not a directory"):
        check_run_dir(config_of(Path("mine")), "run.yaml")
    with pytest.raises(ConfigError, match="can't be written: Not a directory"):
        RunFolder.create(config_of(Path("mine/inside")), "id")


async def test_a_full_disk_is_told_at_the_end(here):
    folder = RunFolder.create(config_of(), "id")
    os.close(folder._events)
    folder._events = os.open("/dev/full", os.O_WRONLY)
    folder.event("started")
    with pytest.raises(OSError, match="No space left"):
        await folder.complete(RunRecord(config_of()))
    assert (folder.path / "metrics.json").exists()
