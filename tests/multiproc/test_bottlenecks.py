"""Real runs with one cause of lost time in each: exactly that one is named, with its rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Started, write_script

pytestmark = pytest.mark.slow

# A model and data of the user's own; what goes wrong is an argument. Layers compute, and do not sleep, unless they are
# the trouble.
OWN = """
import os
import time
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width, trouble):
        super().__init__()
        self.up, self.down, self.trouble = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), trouble
        self.kept = None
    def forward(self, x):
        rank = os.environ.get("RANK")
        if self.trouble == "sleeps" and rank == "1":
            time.sleep(0.1)
        if self.trouble == "keeps" and rank == "1" and self.kept is None:
            self.kept = torch.ones(100 << 20)
        if self.trouble == "holds the lock":
            pow(7, 1_500_000)
        return x + self.down(torch.tanh(self.up(x)))

def build(layers=4, width=192, trouble=""):
    return nn.Sequential(*(Layer(width, trouble if index == layers - 1 else "") for index in range(layers)))

class Data:
    def __init__(self, seconds=0.0, length=128):
        self.x, self.seconds = torch.randn(64, length, 192), seconds
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.x[index], self.x[index]

def slow_data():
    return Data(seconds=0.05)

def short_data():
    return Data(length=1)
"""
YAML = """
model: {factory: "own:build", loss: mse}
data: {factory: "own:Data"}
comm: {timeout: 20}
runtime: {threads: 1}
optimizer: {name: sgd, lr: 1.0e-4}
train: {steps: 14, batch_size: 16}
"""
GPT = """
model: {factory: gpt, args: {layers: 4, width: 16, heads: 2, vocabulary: 256, sequence: 4}}
runtime: {threads: 1}
train: {steps: 40, batch_size: 1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(YAML)
    write_script(tmp_path, OWN, "own.py")
    return tmp_path


def bottlenecks(folder: Path, *settings: str, cores: set[int] | None = None) -> list[dict[str, Any]]:
    """What a run with these keys names at its end."""
    words = [word for each in settings for word in ("--set", each)]
    out = folder / "out"
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        started = Started("-m", "parallel3d", "run", "run.yaml", *words, "--run-dir", str(out), cwd=folder)
    finally:
        os.sched_setaffinity(0, before)
    with started:
        assert started.finish(60) == 0, started.stderr.text
    return json.loads((out / "metrics.json").read_text())["bottlenecks"]


def only(folder: Path, *settings: str, cores: set[int] | None = None) -> dict[str, Any]:
    """The one that is named."""
    every = bottlenecks(folder, *settings, cores=cores)
    assert len(every) == 1, [each["message"] for each in every]
    assert every[0]["gain"] is None or 0 <= every[0]["gain"] < 1
    return every[0]


def test_data_that_comes_late(folder):
    one = only(folder, "parallel.dp=2", "data.factory=own:slow_data")
    assert (one["kind"], one["rank"], one["key"]) == ("data_starved", None, "data.factory")
    assert one["gain"] > 0.5


@pytest.mark.parametrize(
    "mesh",
    [
        ["parallel.dp=2"],
        pytest.param(["parallel.pp=2", "pipeline.microbatches=4"], marks=pytest.mark.exhaustive),
    ],
    ids=["dp", "pp"],
)
def test_a_rank_that_sleeps_in_its_forward(folder, mesh):
    one = only(folder, *mesh, "model.args.trouble=sleeps", "data.factory=own:short_data")
    assert (one["kind"], one["rank"]) == ("straggler", 1)
    assert one["gain"] > 0.1


@pytest.mark.exhaustive
def test_stages_that_differ(folder):
    one = only(
        folder, "parallel.pp=2", "model.args.layers=8", "pipeline.layers_per_stage=[1, 7]", "pipeline.microbatches=8"
    )
    assert (one["kind"], one["rank"], one["key"], one["value"]) == (
        "uneven_stages",
        1,
        "pipeline.layers_per_stage",
        "[4, 4]",
    )
    assert one["gain"] > 0.2


def test_one_microbatch(folder):
    one = only(folder, "parallel.pp=2", "pipeline.microbatches=1")
    assert (one["kind"], one["key"], one["value"]) == ("too_few_microbatches", "pipeline.microbatches", "8")
    assert one["gain"] > 0.2


def test_tiny_buckets(folder):
    one = only(folder, "parallel.dp=2", "comm.bucket_size=1 KiB", "model.args.layers=64", "data.factory=own:short_data")
    assert (one["kind"], one["axis"], one["key"]) == ("small_buckets", "dp", "comm.bucket_size")


@pytest.mark.exhaustive
def test_a_small_budget(folder):
    one = only(folder, "parallel.dp=2", "memory.budget=64 MiB")
    assert (one["kind"], one["key"]) == ("memory_pressure", "pipeline.microbatches")


@pytest.mark.exhaustive
def test_a_rank_that_keeps_much(folder):
    one = only(folder, "parallel.dp=2", "memory.budget=1 GiB", "model.args.trouble=keeps")
    assert (one["kind"], one["rank"]) == ("memory_imbalance", 1)


@pytest.mark.exhaustive
def test_an_event_loop_that_is_held_up(folder):
    one = only(folder, "parallel.dp=2", "model.args.trouble=holds the lock")
    assert one["kind"] == "event_loop_lag"


@pytest.mark.exhaustive
def test_two_ranks_on_one_core(folder):
    one = only(folder, "parallel.dp=2", cores={min(os.sched_getaffinity(0))})
    assert (one["kind"], one["key"], one["value"]) == ("oversubscribed_cores", "parallel.dp", "1")


@pytest.mark.exhaustive
def test_exchanges_that_take_longer_than_computing(folder):
    (folder / "run.yaml").write_text(GPT)
    one = only(folder, "parallel.tp=2", "comm.backend=gloo")
    assert (one["kind"], one["axis"], one["key"], one["value"]) == ("tp_comm", "tp", "parallel.tp", "1")


def test_nothing_is_wrong(folder):
    assert bottlenecks(folder, "parallel.dp=2", "train.batch_size=32") == []
