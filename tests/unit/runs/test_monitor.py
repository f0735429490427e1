"""The end of a monitored run: the folder is complete whatever comes between, and then no request is answered."""

from __future__ import annotations

import asyncio
import gc
import threading
import urllib.request
from contextlib import suppress
from typing import Any

import pytest

from monitoring.analysis.facts import Status
from monitoring.http.endpoint import Endpoint
from monitoring.messages import Ready
from parallel3d.config import load_config
from parallel3d.runs.lifecycle import RunLifecycle
from tests.support.processes import SECONDS


class Slow:
    """Settles when it is told to."""

    bubble = None

    def __init__(self) -> None:
        self.go_on, self.began, self.closed = asyncio.Event(), asyncio.Event(), False

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
def run(tmp_path, monkeypatch) -> RunLifecycle:
    """Has ended well."""
    monkeypatch.chdir(tmp_path)
    return lifecycle_of({}, Status.COMPLETED)


def lifecycle_of(overrides: dict[str, Any], status: Status) -> RunLifecycle:
    lifecycle = RunLifecycle(load_config(None, overrides=overrides, environ={}))
    lifecycle.record.status = status
    lifecycle.create_folder()
    return lifecycle


async def test_who_is_cancelled_meanwhile_waits_for_the_folder(run):
    folder, run._monitor = run.folder, Slow()
    watch = run._monitor
    ending = asyncio.create_task(run.finish())
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
    folder, run._monitor = run.folder, Slow()
    watch = run._monitor
    watch.go_on.set()

    def full(name, content, mode=0o666):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        await run.finish()
    assert watch.closed


async def test_a_rule_that_fails_does_not_cost_the_folder(run, monkeypatch, capfd):
    folder = run.folder
    run.start_monitor()

    def fail(self):
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("monitoring.live.observer.Observer.finish", fail)
    await run.finish()
    assert (folder.path / "metrics.json").exists()
    assert (folder.path / "report.html").exists()
    assert capfd.readouterr().err.count("ZeroDivisionError: a bug of ours") == 1
    assert "parallel3d-monitor" not in [thread.name for thread in threading.enumerate()]


async def test_what_lives_when_ranks_are_ready_is_looked_through_again_only_after_the_run(run):
    run.start_monitor()
    watch = run._monitor
    watch.take(1, Ready("a", "cpu", 1, 1))
    assert gc.get_freeze_count() == 0
    watch.take(0, Ready("a", "cpu", 1, 1))
    assert gc.get_freeze_count() > 0
    await run.finish()
    assert gc.get_freeze_count() == 0


async def scraped(endpoint: Endpoint) -> str:
    def ask() -> str:
        with urllib.request.urlopen(endpoint.url("/metrics"), timeout=SECONDS) as answer:
            return answer.read().decode()

    return await asyncio.to_thread(ask)


@pytest.fixture
def watched(tmp_path, monkeypatch) -> RunLifecycle:
    """A run that is under way, waits long for a scrape if it waits at all, and renders every scrape anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("monitoring.http.server.RENDER_SECONDS", 0.0)
    run = lifecycle_of({"monitoring.linger_seconds": 600}, Status.RUNNING)
    run.open_endpoint()
    run.start_monitor()
    return run


async def test_a_run_that_failed_is_scraped_once_more(watched):
    run, endpoint, watch = watched, watched._endpoint, watched._monitor
    assert 'steps_total{outcome="failed"} 0.0' in await scraped(endpoint)
    run.record.status = Status.FAILED
    lingering, linger = asyncio.Event(), watch.linger

    async def note(hurry: asyncio.Event) -> None:
        lingering.set()
        await linger(hurry)

    watch.linger = note
    ending = asyncio.create_task(run.finish())
    await lingering.wait()
    assert (run.folder.path / "report.html").exists(), "nobody waits for the folder"
    while not ending.done():
        with suppress(OSError):  # it has closed meanwhile
            last = await scraped(endpoint)
    assert 'steps_total{outcome="failed"} 1.0' in last


@pytest.mark.parametrize("why", ["nobody scrapes it", "it ended well", "its caller is cancelled"])
async def test_a_run_that_waits_for_no_scrape(watched, why):
    run, endpoint = watched, watched._endpoint
    if why != "nobody scrapes it":
        await scraped(endpoint)
    run.record.status = Status.COMPLETED if why == "it ended well" else Status.FAILED
    ending = asyncio.create_task(run.finish())
    if why == "its caller is cancelled":
        await asyncio.sleep(0)
        ending.cancel()
    assert await asyncio.wait_for(asyncio.wait([ending]), SECONDS)
    assert ending.cancelled() == (why == "its caller is cancelled")
