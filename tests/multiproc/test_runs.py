"""`parallel3d.start` with real ranks and a coordinator that computes nothing: how runs live, stop and fail."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from monitoring.analysis.facts import Status
from parallel3d.config import RunConfig, load_config
from parallel3d.reports.run_reader import read_run
from parallel3d.reports.text import report_text
from parallel3d.runs.supervised import Run
from runtime.errors import ConfigError, Coords, InvalidCall, RunFailed
from runtime.launch.processes import descendants
from tests.support.processes import SECONDS
from tests.support.stand_in import STAND_IN, stand_in_run

FILES = ["config.yaml", "endpoints.json", "events.jsonl", "metrics.json", "report.html", "trace.json.gz"]
FOR_EVER = 1_000_000


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(descendants(os.getpid()))
    yield
    left = set(descendants(os.getpid())) - before
    assert not left


def config_of(folder: Path, steps: int = 6, **overrides: Any) -> RunConfig:
    given = {"parallel.dp": 2, "train.steps": steps, "runtime.run_dir": str(folder / "run"), "comm.timeout": 20}
    return load_config(None, overrides={**given, **overrides}, environ={})


def events(folder: Path) -> list[dict[str, Any]]:
    """Without what was observed, which comes when it comes."""
    told = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return [each for each in told if each["kind"] not in ("parts", "straggler", "bottleneck", "log")]


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "metrics.json").read_text())


async def follow(run: Run, losses: list[float]) -> None:
    async with asyncio.timeout(SECONDS), run:
        async for step in run:
            losses.append(step.loss)


async def test_a_run_from_its_first_step_to_its_summary(tmp_path):
    config = config_of(tmp_path)
    async with asyncio.timeout(SECONDS), stand_in_run(config) as run:
        steps = [step async for step in run]
        summary = await run.summary()
    assert [step.step for step in steps] == list(range(6))
    assert [step.loss for step in steps] == list(summary.losses) == [10.0, 9.0, 8.0, 7.0, 6.0, 5.0]
    assert all(step.tokens_per_second == step.tokens / step.seconds for step in steps)
    assert (summary.status, summary.steps, summary.final_loss) == (Status.COMPLETED, 6, 5.0)
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    kept = load_config(folder / "config.yaml", overrides={"runtime.run_dir": str(folder)}, environ={})
    assert kept == config
    assert metrics(tmp_path) == json.loads(json.dumps(summary.metrics))
    found = metrics(tmp_path)
    assert found["world_size"] == 2
    assert len(found["step_seconds"]) == len(found["ddp_metrics"]["allreduce_bandwidth_gbps"]) == 6
    assert found["warm_up_steps"] == 2
    counted = found["step_seconds"][2:]
    assert found["tokens_per_sec"] == pytest.approx(4 * 128 / sum(counted))
    assert [rank["coords"]["dp"] for rank in found["ranks"]] == [0, 1]
    assert all(rank["memory_bytes"] > 1 << 20 for rank in found["ranks"])
    totals = [sum(rank["seconds"].values()) for rank in found["ranks"]]
    assert totals[0] == pytest.approx(sum(counted))
    assert totals[1] > 0
    assert [each["kind"] for each in events(tmp_path)] == ["started", *["step"] * 6, "ended"]
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1}
    assert {"0F0", "0B0", "all_reduce dp", "step 5"} <= {event["name"] for event in trace}


@pytest.mark.slow
async def test_a_learning_rate_counts_from_one_step_on_for_all_ranks(tmp_path):
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path, FOR_EVER)) as run:
        first = await run.set_learning_rate(1e-5)
        again = await run.set_learning_rate(None)
        await run.stop()
        steps = [step async for step in run]
        assert await run.set_learning_rate(1.0) is None, "the run has ended"
        assert (await run.summary()).status is Status.STOPPED
    assert first is not None
    assert again is not None
    for step in steps:
        assert step.learning_rate == (1e-5 if first <= step.step < again else 3e-4)
    changes = [event for event in events(tmp_path) if event["kind"] == "learning_rate"]
    assert [(event["step"], event["learning_rate"]) for event in changes] == [(first, 1e-5), (again, None)]


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "fast"])
async def test_a_learning_rate_that_is_none(tmp_path, rate):
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path, 1)) as run:
        with pytest.raises(InvalidCall, match="give a number"):
            await run.set_learning_rate(rate)


@pytest.mark.slow
async def test_leaving_the_block_early_stops_the_ranks(tmp_path):
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path, FOR_EVER)) as run:
        async for step in run:
            if step.step == 3:
                break
        left = time.monotonic()
    assert time.monotonic() - left < 10
    assert metrics(tmp_path)["status"] == "stopped"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == FILES


@pytest.mark.slow
@pytest.mark.exhaustive
async def test_leaving_the_block_in_a_step_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setenv(STAND_IN, "hang 1 2")
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path, FOR_EVER)) as run:
        async for step in run:
            if step.step == 1:
                break
        left = time.monotonic()
    assert time.monotonic() - left < 12
    assert (metrics(tmp_path)["status"], metrics(tmp_path)["steps"]) == ("interrupted", 2)


async def test_leaving_before_ranks_are_there(tmp_path):
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path)) as run:
        pass
    assert run.record.status is Status.INTERRUPTED
    assert metrics(tmp_path)["final_loss"] is None


@pytest.mark.slow
async def test_cancelling_stops_the_ranks(tmp_path):
    begun = asyncio.Event()

    async def app() -> None:
        async with stand_in_run(config_of(tmp_path, FOR_EVER)) as run:
            async for _ in run:
                begun.set()

    task = asyncio.create_task(app())
    async with asyncio.timeout(SECONDS):
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert metrics(tmp_path)["status"] == "stopped"


@pytest.mark.slow
async def test_an_error_of_the_app_is_its_own(tmp_path):
    async def app() -> None:
        async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path, FOR_EVER)) as run:
            async for _ in run:
                raise KeyError("mine")

    with pytest.raises(KeyError):
        await app()
    assert metrics(tmp_path)["status"] == "stopped"


@pytest.mark.slow
@pytest.mark.exhaustive
async def test_two_runs_at_once(tmp_path):
    async def app(name: str) -> list[float]:
        (tmp_path / name).mkdir()
        async with stand_in_run(config_of(tmp_path / name, 4)) as run:
            return [step.loss async for step in run]

    async with asyncio.timeout(SECONDS):
        assert await asyncio.gather(app("one"), app("other")) == [[10.0, 9.0, 8.0, 7.0]] * 2


async def test_a_rank_that_raises(tmp_path, monkeypatch):
    monkeypatch.setenv(STAND_IN, "raise 1 2")
    run = stand_in_run(config_of(tmp_path))
    losses: list[float] = []
    with pytest.raises(RunFailed) as failed:
        await follow(run, losses)
    error = failed.value
    assert losses == [10.0, 9.0]
    assert (error.rank, error.coords, error.step, error.exit_code) == (1, Coords(1, 0, 0), 2, 4)
    assert str(error).startswith("rank 1 (dp=1 tp=0 pp=0) failed: ValueError: the model has an opinion")
    assert "in train_step" in error.traceback
    assert str(tmp_path / "run") in str(error)
    assert run.exit_code == 4
    found = metrics(tmp_path)
    assert (found["status"], found["losses"], found["error"]["rank"]) == ("failed", [10.0, 9.0], 1)
    assert found["error"]["notes"] == ["Layer 3 of the model has it."]
    told = report_text(read_run(tmp_path / "run").report())
    assert "opinion: <b>no</b>\n              Layer 3 of the model has it.\n" in told
    assert [event["kind"] for event in events(tmp_path)] == ["started", "step", "step", "failed", "ended"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "&lt;b&gt;no&lt;/b&gt;</p><p>Layer 3 of the model has it.</p>" in page
    trace = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert "step 1" in {event["name"] for event in trace}, "the last steps before it are shown"


@pytest.mark.slow
async def test_a_rank_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv(STAND_IN, "kill 1 3")
    run = stand_in_run(config_of(tmp_path))
    with pytest.raises(RunFailed, match=r"rank 1 \(dp=1 tp=0 pp=0\) failed: killed by SIGKILL") as failed:
        async with asyncio.timeout(SECONDS), run:
            await run.summary()
    assert (failed.value.rank, run.exit_code) == (1, 4)
    assert (metrics(tmp_path)["status"], metrics(tmp_path)["steps"]) == ("failed", 3)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == FILES


@pytest.mark.slow
async def test_a_hang_is_cut(tmp_path, monkeypatch):
    monkeypatch.setenv(STAND_IN, "hang 1 1")
    run = stand_in_run(config_of(tmp_path, **{"comm.timeout": 1}))
    with pytest.raises(RunFailed, match=r"DeadlineExceeded: .*rank 1 \(dp=1 tp=0 pp=0\) has not called it"):
        await follow(run, [])
    assert run.exit_code == 124
    assert (metrics(tmp_path)["status"], metrics(tmp_path)["steps"]) == ("hung", 1)


@pytest.mark.slow
async def test_a_failure_that_nobody_looked_for_is_raised_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv(STAND_IN, "raise 0 0")
    run = stand_in_run(config_of(tmp_path, 1))

    async def app() -> None:
        async with asyncio.timeout(SECONDS), run:
            assert await run.set_learning_rate(0.1) is None

    with pytest.raises(RunFailed):
        await app()


@pytest.mark.slow
async def test_an_interrupted_run_ends_after_its_step(tmp_path):
    async with asyncio.timeout(SECONDS), stand_in_run(config_of(tmp_path, FOR_EVER)) as run:
        async for step in run:
            if step.step == 2:
                run.interrupt(signal.SIGINT)
    assert (run.exit_code, metrics(tmp_path)["status"]) == (130, "interrupted")
    assert [event["kind"] for event in events(tmp_path)][-1] == "ended"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == FILES


async def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("precious")
    (tmp_path / "run.yaml").write_text(f"runtime: {{run_dir: {tmp_path / 'run'}}}\n")
    with pytest.raises(ConfigError, match=r"runtime.run_dir = .*not empty.*mine.txt"):
        parallel3d.start(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"^overrides runtime.run_dir  runtime.run_dir = .*not empty"):
        parallel3d.start(tmp_path / "run.yaml", overrides={"runtime.run_dir": str(tmp_path / "run")})


@pytest.mark.slow
async def test_a_run_has_to_be_entered_and_only_once(tmp_path):
    run = stand_in_run(config_of(tmp_path, 1))
    with pytest.raises(InvalidCall, match="not entered"):
        await run.stop()
    async with asyncio.timeout(SECONDS), run:
        await run.summary()
        with pytest.raises(InvalidCall, match="entered before"):
            await run.__aenter__()
