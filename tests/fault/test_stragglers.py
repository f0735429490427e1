"""A rank that becomes slow is named soon, whatever made it slow; where nothing disturbs, none is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from monitoring.analysis.stragglers import IN_A_ROW
from monitoring.analysis.totals import WARM_UP
from parallel3d.config import load_config
from parallel3d.runs.supervised import Run
from tests.support.tools import CPU_QUOTA, ROOT_USER, needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [each for each in found if each["kind"] == kind]


async def finished(folder: Path, given: dict[str, Any]) -> Path:
    async with started(folder, given) as run:
        await run.summary()
    return folder


def started(folder: Path, given: dict[str, Any]) -> Run:
    return parallel3d.start(load_config(None, overrides={"runtime.run_dir": str(folder), **given}))


SLOW, FIRST = 1, 10
SPANS = 4
"""A step of each rank: forward and backward, of both halves or of both microbatches."""
MESHES = pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=["dp2", "tp2", "pp2"],
)


def held(own: Path, mesh: dict[str, int], steps: int, seconds: float = 0.0) -> dict[str, Any]:
    """Two ranks that compute for some ten milliseconds a step; one sleeps so long in each of its forwards, from a step
    on."""
    microbatches = 2 if "pp" in mesh else 1
    return {
        "model": {
            "factory": "tests.support.slow_models:held",
            "args": {
                "folder": str(own),
                "rank": SLOW,
                "first_step": FIRST * microbatches,
                "seconds": seconds / 2,  # for each rank sleeps twice: in both halves, or for both microbatches
            },
            "loss": "mse",
        },
        "data.factory": "tests.support.slow_models:Numbers",
        "parallel": mesh,
        "pipeline.microbatches": microbatches,
        "train": {"steps": steps, "batch_size": 32},
        "runtime.threads": 1,
    }


def named(folder: Path) -> dict[int, list[int]]:
    """The ranks that are named, by step."""
    return {each["step"]: each["stragglers"] for each in lines(folder, "parts")}


def named_without_cause(own: Path, by_step: dict[int, list[int]]) -> list[tuple[int, int]]:
    """Steps and ranks that begin to be named there though they had not computed slowly for three steps on end, or still
    are though they have not for six: by the model's own clock, so that a core which is taken away from a rank for a
    while is no mistake of who names it."""
    found = []
    for rank in range(2):
        spans = [float(line) for line in (own / f"{rank}.seconds").read_text().split()]
        assert len(spans) == SPANS * len(by_step)
        computing = [sum(spans[at : at + SPANS]) for at in range(0, len(spans), SPANS)]
        limit = 1.25 * sorted(computing)[len(computing) // 4]
        for step in (step for step, ranks in by_step.items() if rank in ranks):
            begins = rank not in by_step[step - 1]
            if (begins and min(computing[step - IN_A_ROW + 1 : step + 1]) < limit) or max(
                computing[max(0, step - 2 * IN_A_ROW + 1) : step + 1]
            ) < limit:
                found.append((step, rank))
    return found


async def usual_computing(folder: Path, mesh: dict[str, int]) -> float:
    """Seconds a step, of the rank that is going to be slow."""
    await finished(folder, held(folder.parent, mesh, steps=12))
    metrics = json.loads((folder / "metrics.json").read_text())
    own = metrics["ranks"][SLOW]
    return (own["seconds"]["compute"] + own["core_wait_seconds"]) / (metrics["steps"] - WARM_UP)


@MESHES
async def test_a_rank_that_becomes_twice_as_slow_is_named_within_three_steps(tmp_path, mesh):
    """It sleeps as long as it computes."""
    computing = await usual_computing(tmp_path / "usual", mesh)
    folder = await finished(tmp_path / "run", held(tmp_path, mesh, steps=20, seconds=1.2 * computing))
    by_step = named(folder)
    assert by_step.keys() == set(range(20))
    assert all(SLOW in ranks for step, ranks in by_step.items() if step >= FIRST + 2), by_step
    assert named_without_cause(tmp_path, by_step) == []


@contextmanager
def half_a_core() -> Iterator[Path]:
    """A control group whose processes have a core for half of the time: of each 2 ms, or a stage that computes for some
    milliseconds and then waits would hardly notice."""
    group = Path(f"/sys/fs/cgroup/cpu/parallel3d-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("2000")
        (group / "cpu.cfs_quota_us").write_text("1000")
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


@needs(ROOT_USER, CPU_QUOTA)
@MESHES
async def test_a_rank_with_half_a_core_is_named_within_three_steps(tmp_path, mesh):
    with half_a_core() as group:
        async with started(tmp_path / "run", held(tmp_path, mesh, steps=400)) as run:
            async for step in run:
                if step.step == FIRST:
                    (group / "cgroup.procs").write_text((tmp_path / f"{SLOW}.pid").read_text())
                    limited = run.record.steps[-1].step + 1  # the step that was under way counts as well
                if step.step > FIRST and step.step >= limited + 5:
                    await run.stop()
            await run.summary()
    by_step = named(tmp_path / "run")
    assert SLOW in by_step[limited + 3], (limited, by_step)
    assert named_without_cause(tmp_path, by_step) == []


@MESHES
async def test_nobody_is_named_where_nothing_is_wrong(tmp_path, mesh):
    assert len(os.sched_getaffinity(0)) >= 2
    folder = await finished(tmp_path / "run", held(tmp_path, mesh, steps=200))
    by_step = named(folder)
    assert by_step.keys() == set(range(200))
    assert named_without_cause(tmp_path, by_step) == []
