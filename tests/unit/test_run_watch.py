"""The end of a run that is watched: the folder is complete whatever comes between, and then nobody is answered."""

from __future__ import annotations

import asyncio
import threading

import pytest

from parallel3d.config import load_config
from parallel3d.run_folder import RunFolder
from parallel3d.run_record import RunRecord, Status
from parallel3d.run_watch import RunWatch, complete


class Slow:
    """Settles when it is told to."""

    bubble = None

    def __init__(self, record: RunRecord) -> None:
        self.go_on, self.began, self.closed = asyncio.Event(), asyncio.Event(), False
        self._record = record

    def take(self, rank, message):
        pass

    async def settle(self) -> None:
        self.began.set()
        await self.go_on.wait()

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(None, environ={})
    return RunFolder.create(config, "id"), RunRecord(config, status=Status.COMPLETED)


async def test_who_is_cancelled_meanwhile_waits_for_the_folder(run):
    folder, record = run
    watch = Slow(record)
    ending = asyncio.create_task(complete(folder, record, watch))
    await watch.began.wait()
    ending.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not ending.done()
    watch.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert (folder.path / "metrics.json").exists()
    assert (folder.path / "report.html").exists()
    assert watch.closed


async def test_a_folder_that_cannot_be_written_is_told_and_nobody_is_answered(run, monkeypatch):
    folder, record = run
    watch = Slow(record)
    watch.go_on.set()

    def full(name, content, mode=0o666):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        await complete(folder, record, watch)
    assert watch.closed


async def test_a_rule_that_fails_does_not_cost_the_folder(run, monkeypatch, capfd):
    folder, record = run
    watch = RunWatch(record, folder, None)

    def fail(self):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("monitoring.observer.Observer.finish", fail)
    await complete(folder, record, watch)
    assert (folder.path / "metrics.json").exists()
    assert (folder.path / "report.html").exists()
    assert capfd.readouterr().err.count("ZeroDivisionError: a bug of ours") == 1
    assert "parallel3d-station" not in [thread.name for thread in threading.enumerate()]
