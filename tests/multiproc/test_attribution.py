"""Where the time of real runs went: the parts add up on every mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monitoring.events.time_parts import PARTS
from tests.support.processes import Started

GPT = """
model: {factory: gpt, args: {layers: 2, width: 64, heads: 2, vocabulary: 256, sequence: 32}}
comm: {timeout: 30}
runtime: {threads: 1}
train: {steps: 12, batch_size: 8}
"""
MESHES = {
    "dp2": (["parallel.dp=2"], {"dp_comm"}),
    "tp2": (["parallel.tp=2"], {"tp_comm"}),
    "pp2": (["parallel.pp=2", "pipeline.microbatches=4"], {"pp_comm", "bubble"}),
    "2x2x2": (
        ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "pipeline.microbatches=2"],
        {"dp_comm", "tp_comm", "pp_comm", "bubble"},
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(GPT)
    return tmp_path


def run(folder: Path, *settings: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Its metrics and events."""
    words = [word for each in settings for word in ("--set", each)]
    with Started("-m", "parallel3d", "run", "run.yaml", *words, "--run-dir", "out", cwd=folder) as started:
        assert started.finish(100) == 0, started.stderr.text
    lines = (folder / "out" / "events.jsonl").read_text().splitlines()
    return json.loads((folder / "out" / "metrics.json").read_text()), [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=[] if mesh == "pp2" else pytest.mark.exhaustive) for mesh in MESHES],
)
def test_the_parts_add_up(folder, mesh):
    settings, expected = MESHES[mesh]
    metrics, events = run(folder, *settings)
    assert (metrics["events_dropped"], metrics["incomplete_steps"]) == (0, 0)
    told = [event for event in events if event["kind"] == "parts"]
    assert [event["step"] for event in told] == list(range(12))
    for event in told:
        assert sum(event["parts"].values()) == pytest.approx(event["seconds"], rel=0.02)
    for rank in metrics["ranks"]:
        assert rank["steps"] == 10
        assert sum(rank["seconds"].values()) == pytest.approx(rank["total_seconds"], rel=0.02)
        assert rank["remainder_seconds"] == pytest.approx(0.0, abs=0.02 * rank["total_seconds"])
        assert rank["seconds"]["compute"] > 0
        assert rank["core_wait_seconds"] <= rank["seconds"]["other"]
    # The steps that a run tells of are rank 0's; others may begin and end theirs at other moments.
    assert metrics["ranks"][0]["total_seconds"] == pytest.approx(sum(metrics["step_seconds"][2:]), rel=1e-3)
    took = {part for part in PARTS if metrics["parts"][part] > 0}
    assert took & {"dp_comm", "tp_comm", "pp_comm", "bubble"} >= expected
    absent = {"tp_comm", "pp_comm", "bubble"} - expected
    assert not took & absent
    assert sum(metrics["parts"].values()) == pytest.approx(1.0)
