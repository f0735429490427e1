"""The end of a run that is watched: the folder is complete whatever comes between, and then nobody is answered."""

from __future__ import annotations

import asyncio
import gc
import threading
import urllib.request
from contextlib import suppress

import pytest

from monitoring.analysis.facts import Status
from monitoring.http.endpoint import Endpoint
from monitoring.messages import Ready
from parallel3d.config import load_config
from parallel3d.runs.folder import RunFolder
from parallel3d.runs.monitor import RunWatch, complete
from parallel3d.runs.record import RunRecord
from tests.support.processes import SECONDS


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

    async def linger(self, hurry) -> None:
        pass

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

    monkeypatch.setattr("monitoring.live.observer.Observer.finish", fail)
    await complete(folder, record, watch)
    assert (folder.path / "metrics.json").exists()
    assert (folder.path / "report.html").exists()
    assert capfd.readouterr().err.count("ZeroDivisionError: a bug of ours") == 1
    assert "parallel3d-monitor" not in [thread.name for thread in threading.enumerate()]


async def test_what_lives_when_ranks_are_ready_is_looked_through_again_only_after_the_run(run):
    folder, record = run
    watch = RunWatch(record, folder, None)
    watch.take(1, Ready("a", "cpu", 1, 1))
    assert gc.get_freeze_count() == 0
    watch.take(0, Ready("a", "cpu", 1, 1))
    assert gc.get_freeze_count() > 0
    await complete(folder, record, watch)
    assert gc.get_freeze_count() == 0


async def scraped(endpoint: Endpoint) -> str:
    def ask() -> str:
        with urllib.request.urlopen(endpoint.url("/metrics"), timeout=SECONDS) as answer:
            return answer.read().decode()

    return await asyncio.to_thread(ask)


@pytest.fixture
def watched(run, monkeypatch):
    """A run that is under way, and at its end waits for long if it waits at all, and shows each scrape the latest."""
    monkeypatch.setattr("monitoring.http.server.RENDER_SECONDS", 0.0)
    folder, record = run
    record.config = load_config(None, overrides={"monitoring.linger_seconds": 600}, environ={})
    record.status = Status.RUNNING
    endpoint = Endpoint.open("127.0.0.1", None)
    return folder, record, endpoint, RunWatch(record, folder, endpoint)


async def test_a_run_that_failed_is_scraped_once_more(watched):
    folder, record, endpoint, watch = watched
    assert 'steps_total{outcome="failed"} 0.0' in await scraped(endpoint)
    record.status = Status.FAILED
    lingering, linger = asyncio.Event(), watch.linger

    async def note(hurry: asyncio.Event) -> None:
        lingering.set()
        await linger(hurry)

    watch.linger = note
    ending = asyncio.create_task(complete(folder, record, watch))
    await lingering.wait()
    assert (folder.path / "report.html").exists(), "nobody waits for the folder"
    while not ending.done():
        with suppress(OSError):  # it has closed meanwhile
            last = await scraped(endpoint)
    assert 'steps_total{outcome="failed"} 1.0' in last


@pytest.mark.parametrize("why", ["nobody scrapes it", "it ended well", "its owner is cancelled"])
async def test_a_run_that_waits_for_no_scrape(watched, why):
    folder, record, endpoint, watch = watched
    if why != "nobody scrapes it":
        await scraped(endpoint)
    record.status = Status.COMPLETED if why == "it ended well" else Status.FAILED
    ending = asyncio.create_task(complete(folder, record, watch))
    if why == "its owner is cancelled":
        await asyncio.sleep(0)
        ending.cancel()
    assert await asyncio.wait_for(asyncio.wait([ending]), SECONDS)
    assert ending.cancelled() == (why == "its owner is cancelled")
