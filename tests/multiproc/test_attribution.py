"""Where the time of real runs went: the parts add up on every mesh, and a rank that becomes slow is named soon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monitoring.time_parts import PARTS
from tests.processes import Started, write_script

GPT = """
model: {factory: gpt, args: {layers: 2, width: 64, heads: 2, vocabulary: 256, sequence: 32}}
comm: {timeout: 30}
runtime: {threads: 1}
train: {steps: 12, batch_size: 8}
"""
# Each layer computes for some milliseconds; from its fourteenth forward on, one of rank 1's takes four times as long.
OWN = """
import os
import time
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, sleeps):
        super().__init__()
        self.linear, self.sleeps, self.calls = nn.Linear(8, 8), sleeps, 0
    def forward(self, x):
        start, end = time.monotonic(), time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        self.calls += 1
        if self.sleeps and self.calls >= 14 and os.environ.get("RANK") == "1":
            time.sleep(3 * (time.monotonic() - start))
        return self.linear(x)

def build(sleeps=False):
    return nn.Sequential(Layer(False), Layer(sleeps))

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((8,), index / 64), torch.ones(8)
"""
OWN_YAML = """
model: {factory: "own:build", loss: mse, args: {sleeps: true}}
data: {factory: "own:Data"}
comm: {timeout: 30}
runtime: {threads: 1}
train: {steps: 20, batch_size: 4}
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
    (tmp_path / "own.yaml").write_text(OWN_YAML)
    write_script(tmp_path, OWN, "own.py")
    return tmp_path


def run(folder: Path, file: str, *settings: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Its metrics and events."""
    words = [word for each in settings for word in ("--set", each)]
    with Started("-m", "parallel3d", "run", file, *words, "--run-dir", "out", cwd=folder) as started:
        assert started.finish(100) == 0, started.stderr.text
    lines = (folder / "out" / "events.jsonl").read_text().splitlines()
    return json.loads((folder / "out" / "metrics.json").read_text()), [json.loads(line) for line in lines]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_parts_add_up(folder, mesh):
    settings, expected = MESHES[mesh]
    metrics, events = run(folder, "run.yaml", *settings)
    assert (metrics["events_dropped"], metrics["incomplete_steps"]) == (0, 0)
    told = [event for event in events if event["kind"] == "parts"]
    assert [event["step"] for event in told] == list(range(12))
    for event in told:
        assert sum(event["parts"].values()) == pytest.approx(event["seconds"], rel=0.02)
    for rank in metrics["ranks"]:
        assert rank["steps"] == 10
        assert sum(rank["seconds"].values()) == pytest.approx(rank["total_seconds"], rel=0.02)
        assert rank["remainder_seconds"] == pytest.approx(0.0, abs=0.02 * rank["total_seconds"])
        assert rank["total_seconds"] == pytest.approx(sum(metrics["step_seconds"][2:]), rel=0.05)
        assert rank["seconds"]["compute"] > 0
        assert rank["core_wait_seconds"] <= rank["seconds"]["other"]
    took = {part for part in PARTS if metrics["parts"][part] > 0}
    assert took & {"dp_comm", "tp_comm", "pp_comm", "bubble"} >= expected
    absent = {"tp_comm", "pp_comm", "bubble"} - expected
    assert not took & absent
    assert sum(metrics["parts"].values()) == pytest.approx(1.0)


def skip_if_disturbed(ranks: list[dict[str, Any]]) -> None:
    """Who has no core is slow, and says nothing of our judgement."""
    share = max(rank["core_wait_seconds"] / rank["total_seconds"] for rank in ranks)
    if share > 0.15:
        pytest.skip(f"something else had the cores for {100 * share:.0f} % of the time")


@pytest.mark.parametrize(("axis", "compared_with"), [("dp", {"peers", "itself"}), ("pp", {"itself", "processor"})])
def test_a_rank_that_becomes_slow_is_named_within_three_steps(folder, axis, compared_with):
    metrics, events = run(folder, "own.yaml", f"parallel.{axis}=2")
    skip_if_disturbed(metrics["ranks"][:1])
    named = {event["step"]: event["stragglers"] for event in events if event["kind"] == "parts"}
    assert all(named[step] == [1] for step in range(15, 20)), named
    assert not any(named[step] for step in range(12)), named
    [found] = [event for event in events if event["kind"] == "straggler"]
    assert (found["state"], found["rank"], found["host"]) == ("found", 1, None)
    assert found["compared_with"] in compared_with | {"processor"}
    assert metrics["ranks"][1]["straggler_score"] < 0.67
    assert metrics["ranks"][0]["straggler_score"] >= 0.67


@pytest.mark.slow
def test_no_rank_is_named_where_nothing_disturbs(folder):
    metrics, events = run(folder, "own.yaml", "parallel.dp=2", "model.args.sleeps=false", "train.steps=200")
    skip_if_disturbed(metrics["ranks"])
    assert [event for event in events if event["kind"] == "straggler"] == []
