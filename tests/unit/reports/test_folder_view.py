"""`parallel3d view` and what it shows: a folder, one that still grows, one whose run has a page of its own."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest
from typer.testing import CliRunner

from parallel3d.cli.main import make_app
from parallel3d.reports.folder_view import FolderView
from parallel3d.reports.snapshot import RunInfo, RunTotals, Snapshot
from tests.support.run_folders import shown, write_run


def view(*args: object):
    return CliRunner().invoke(make_app(("view",)), ["view", *map(str, args)])


def test_the_snapshot_is_the_folders(tmp_path):
    source = FolderView(write_run(tmp_path / "run"))
    assert source.snapshot() == shown(tmp_path / "run")
    assert not source.is_live
    assert set(source.snapshot()) - set(source.state()) == {"steps", "log"}


async def test_a_folder_that_grows_is_read_again_until_its_run_has_ended(tmp_path):
    runs = [_run("running", steps=1), _run("running", steps=1), _run("running", steps=2), _run("completed", steps=3)]
    source = FolderView(tmp_path, load=lambda folder: runs.pop(0) if len(runs) > 1 else runs[0])
    start = source.feed.last_id
    (tmp_path / "events.jsonl").write_text("{}\n")
    await source.watch(seconds=0.0)
    assert source.snapshot()["totals"]["steps"] == 3
    text = "".join([block async for block in source.feed.blocks(start)])
    assert text.count("event: reset") == 2  # nothing but the time of the file had changed, and then the status
    assert text.endswith("event: end\ndata: {}\n\n")


async def test_a_folder_that_takes_long_to_read_is_read_less_often(tmp_path, monkeypatch):
    moments = iter([0.0, 0.01, 10.0, 13.0, 100.0, 100.5])
    runs = [_run("running", steps=1)] * 3 + [_run("completed", steps=1)]
    source = FolderView(tmp_path, load=lambda folder: runs.pop(0), clock=lambda: next(moments))
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("parallel3d.reports.folder_view.asyncio.sleep", sleep)
    await source.watch(seconds=1.0)
    assert pauses == [1.0, 1.0, pytest.approx(60.0)]


async def test_nothing_is_told_where_nothing_changed(tmp_path):
    source = FolderView(tmp_path, load=lambda folder: _run("running", steps=1))
    before = source.feed.last_id
    await source.refresh()
    assert source.feed.last_id == before


def _run(status: str, steps: int) -> Snapshot:
    run = RunInfo("a-run", status, None, 1, {"dp": 1, "tp": 1, "pp": 1})
    return Snapshot(run, RunTotals(steps, 0, 0.0, None, None, None), [], [], None)


@pytest.mark.parametrize("name", ["nothing-here", "empty"])
def test_a_folder_that_is_no_runs(tmp_path, name):
    (tmp_path / "empty").mkdir()
    outcome = view(tmp_path / name)
    assert outcome.exit_code == 1
    assert outcome.stdout == ""
    assert outcome.stderr.startswith(f"parallel3d view: {tmp_path / name} is no run's folder")


def test_a_run_that_goes_on_has_a_page_of_its_own(tmp_path):
    address = "http://127.0.0.1:4242/?token=abc"
    outcome = view(_going_on(tmp_path, address))
    assert (outcome.exit_code, outcome.stdout) == (0, f"{address}\n")


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = view(write_run(tmp_path / "run"), "--port", port)
    assert outcome.exit_code == 1
    assert f"port {port} can't be listened on: Address already in use" in outcome.stderr


@pytest.mark.parametrize("address", ["javascript:alert(1)", "file:///etc/passwd", "http://a\x1b[31m", 7, None])
def test_an_address_that_is_none_is_not_followed(tmp_path, address):
    from parallel3d.cli.view import _live_page
    from parallel3d.reports.run_reader import read_run

    run = read_run(_going_on(tmp_path, address))
    assert run.status == "running"
    assert _live_page(run) is None


def _going_on(folder, address: object):
    """As if this very process were the run."""
    write_run(folder / "run")
    (folder / "run" / "metrics.json").unlink()
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    kept = [json.loads(line) | {"time": time.time()} for line in lines if '"ended"' not in line]
    (folder / "run" / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    endpoints = {"run_id": "x", "pid": os.getpid(), "page": address}
    (folder / "run" / "endpoints.json").write_text(json.dumps(endpoints))
    return folder / "run"
