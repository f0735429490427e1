"""`parallel3d run` with real models on real ranks: that it trains, and what it says of bad input."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import parallel3d
from tests.support.processes import ROOT, SECONDS, Started, write_script
from tests.support.ranks import slurm_variables, torch_variables

FILES = ["config.yaml", "endpoints.json", "events.jsonl", "metrics.json", "report.html", "trace.json.gz"]
GPT = """
model: {factory: gpt, args: {layers: 2, width: 32, heads: 2, vocabulary: 256, sequence: 16}}
optimizer: {lr: 1.0e-2}
comm: {timeout: 20}
runtime: {threads: 1}
train: {steps: 12, batch_size: 8}
"""
# A model of the user's own, and data for it; what goes wrong is in the environment.
OWN = """
import os
import torch
from torch import nn

trouble = os.environ.get("TROUBLE", "")

class Doubtful(nn.Module):
    def forward(self, x):
        rank = os.environ.get("RANK")
        if trouble == "raise" and rank == "1":
            raise ArithmeticError("this layer does not feel like it")
        if trouble == "nan" and rank == "1":
            return x * float("nan")
        return x

def build(width=4):
    print("building")
    if trouble == "factory":
        raise RuntimeError("no model today")
    if trouble == "no module":
        return [1, 2, 3]
    return nn.Sequential(nn.Linear(width, width), Doubtful(), nn.Linear(width, 1))

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        width = 5 if trouble == "shape" and os.environ.get("RANK") == "1" else 4
        x = torch.full((width,), index / 64)
        if trouble == "nan input" and index == 0:
            x[0] = float("nan")
        return x, torch.ones(1)
"""
OWN_YAML = """
model: {factory: "own:build", loss: mse}
data: {factory: "own:Data", shuffle: false}
parallel: {dp: 2}
comm: {timeout: 20}
runtime: {threads: 1}
train: {steps: 3, batch_size: 4}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(GPT)
    (tmp_path / "own.yaml").write_text(OWN_YAML)
    write_script(tmp_path, OWN, "own.py")
    return tmp_path


def run(folder: Path, *words: str, **environment: str) -> Started:
    return Started("-m", "parallel3d", "run", *words, "--run-dir", "out", cwd=folder, **environment)


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "metrics.json").read_text())


def settings(**values: Any) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def test_a_small_gpt_learns(folder):
    with run(folder, "run.yaml") as started:
        assert started.finish(60) == 0, started.stderr.text
    found = metrics(folder)
    assert found["losses"][-1] < found["losses"][0] - 1
    assert found["parameters"] == found["ranks"][0]["parameters"] > 30_000
    assert found["ddp_metrics"]["allreduce_bandwidth_gbps"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"parallel__dp": 2, "optimizer__shard": "true"},
        pytest.param({"parallel__tp": 2, "parallel__pp": 2, "pipeline__microbatches": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=["dp", "tp-pp"],
)
def test_a_mesh_learns_the_same_and_its_steps_are_traced(folder, mesh):
    alone = Path(folder / "alone")
    alone.mkdir()
    with Started("-m", "parallel3d", "run", "run.yaml", "--run-dir", "alone", cwd=folder) as started:
        assert started.finish(60) == 0, started.stderr.text
    with run(folder, "run.yaml", *settings(**mesh)) as started:
        assert started.finish(60) == 0, started.stderr.text
    found, expected = metrics(folder), json.loads((alone / "metrics.json").read_text())
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-3)
    assert found["parameters"] == expected["parameters"]
    bandwidths = found["ddp_metrics"]["allreduce_bandwidth_gbps"]
    assert len(bandwidths) == 12
    assert min(bandwidths) > 0
    totals = [sum(rank["seconds"].values()) for rank in found["ranks"]]
    assert totals[0] == pytest.approx(sum(found["step_seconds"][2:]), rel=0.01)
    assert min(totals) > 0
    events = json.loads(gzip.decompress((folder / "out" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == set(range(found["world_size"]))
    sent = sorted(event["id"] for event in events if event["ph"] == "s")
    assert sent == sorted(event["id"] for event in events if event["ph"] == "f")
    assert len(sent) == (2 * 2 * 2 * 3 if "parallel__pp" in mesh else 0), "ways, microbatches, pipelines, steps"


@pytest.mark.slow
def test_a_model_of_the_users_own(folder):
    with run(folder, "own.yaml", "--json", *settings(train__steps=20, optimizer__lr=0.05)) as started:
        assert started.finish(60) == 0, started.stderr.text
        assert json.loads(started.stdout.text) == metrics(folder), "what the factory prints is not our data"
        assert "[1] building" in started.stderr.text
    found = metrics(folder)
    assert found["final_loss"] < found["losses"][0] / 2
    assert found["parameters"] == 25


@pytest.mark.parametrize(
    ("trouble", "words", "error"),
    [
        ("factory", (), ["model.factory", "own:build", "RuntimeError: no model today (own.py:"]),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                ("no module", (), ["model.factory", "list", "nn.Module"]),
                ("", ("model__factory", "own:bild"), ["model.factory", "own:bild", "Did you mean build?"]),
                ("", ("data__factory", "own:Date"), ["data.factory", "own:Date", "Did you mean Data?"]),
                ("", ("model__loss", "own:lose"), ["model.loss", "own:lose"]),
            )
        ),
        ("", ("parallel__tensor_plan", "{blocks.*.up: column}"), ["parallel.tensor_plan", "blocks.*.up"]),
    ],
)
@pytest.mark.slow
def test_what_is_refused_before_a_rank_starts(folder, trouble, words, error):
    with run(folder, "own.yaml", *(settings(**dict([words])) if words else []), TROUBLE=trouble) as started:
        assert started.finish(60) == 3, started.stderr.text
        for each in error:
            assert each in started.stderr.text
        assert "Traceback" not in started.stderr.text
    assert not (folder / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "rank", "error"),
    [
        pytest.param("raise", 1, "ArithmeticError: this layer does not feel like it", marks=pytest.mark.exhaustive),
        ("nan", 1, "NonFiniteGradient: the norm of the gradients is nan: those of rank 1 (dp=1 tp=0 pp=0) are not"),
        pytest.param(
            "shape", 1, "RuntimeError: mat1 and mat2 shapes cannot be multiplied", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "nan input",
            0,
            "InvalidCall: the batch's inputs on rank 0 (dp=0 tp=0 pp=0) have NaN or infinity",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_fails_after_the_start_is_told_by_its_rank(folder, trouble, rank, error):
    with run(folder, "own.yaml", TROUBLE=trouble) as started:
        assert started.finish(60) == 4, started.stderr.text
        assert f"rank {rank} (dp={rank} tp=0 pp=0) failed first: {error}" in started.stderr.text
    assert sorted(os.listdir(folder / "out")) == FILES
    found = metrics(folder)
    assert (found["status"], found["losses"]) == ("failed", [])
    assert found["error"]["rank"] == rank
    assert error in found["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [torch_variables(2), pytest.param(slurm_variables(2), marks=pytest.mark.exhaustive)],
    ids=["torchrun", "slurm"],
)
def test_under_a_starter_of_ranks_rank_0_writes_the_folder(folder, variables):
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                run(folder, "run.yaml", "--json", *settings(parallel__dp=2), TMPDIR=str(folder), **each)
            )
            for each in variables
        ]
        for rank in ranks:
            assert rank.finish(60) == 0, rank.stderr.text
        assert json.loads(ranks[0].stdout.text) == metrics(folder)
        assert (ranks[1].stdout.text, ranks[1].stderr.text) == ("", "")
        assert "step 12/12" in ranks[0].stderr.text
    assert sorted(os.listdir(folder / "out")) == FILES
    found = metrics(folder)
    assert [rank["coords"]["dp"] for rank in found["ranks"]] == [0, 1]
    assert found["losses"][-1] < found["losses"][0] - 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_under_a_starter_what_all_hosts_tell_is_gathered_while_they_train(folder):
    """Enough steps for some gatherings, over two hosts, whose clock is really one."""
    places = [{**each, "PARALLEL3D_HOST": f"host-{rank}"} for rank, each in enumerate(torch_variables(2))]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(run(folder, "run.yaml", *settings(parallel__dp=2, train__steps=400), **each))
            for each in places
        ]
        ranks[0].stderr.wait_for("page: http://127.0.0.1:")
        url = json.loads((folder / "out" / "endpoints.json").read_text())["metrics"]
        computed, deadline = 'parallel3d_phase_seconds_total{phase="compute",rank="1"} ', time.monotonic() + SECONDS
        while computed not in (page := urllib.request.urlopen(url, timeout=SECONDS).read().decode()):
            assert time.monotonic() < deadline, page
        for rank in ranks:
            assert rank.finish(120) == 0, rank.stderr.text
    found = metrics(folder)
    assert found["steps"] == 400
    assert all(rank["memory_bytes"] and rank["seconds"]["compute"] for rank in found["ranks"])
    trace = json.loads(gzip.decompress((folder / "out" / "trace.json.gz").read_bytes()))["traceEvents"]
    ends = [
        [each["ts"] + each["dur"] for each in trace if each["name"].startswith("step ") and each["pid"] == rank]
        for rank in (0, 1)
    ]
    assert len(ends[0]) == len(ends[1]) == 3
    # All ranks meet at the end of each step.
    assert ends[0] == pytest.approx(ends[1], abs=0.2e6)


@pytest.mark.slow
def test_under_a_starter_a_failure_is_written_too(folder):
    with ExitStack() as stack:
        ranks = [stack.enter_context(run(folder, "own.yaml", TROUBLE="raise", **each)) for each in torch_variables(2)]
        assert [rank.finish(60) for rank in ranks] == [4, 4]
        assert "ArithmeticError" in ranks[1].stderr.text
    assert sorted(os.listdir(folder / "out")) == FILES
    found = metrics(folder)
    assert (found["status"], found["error"]["rank"]) == ("failed", 1)
    assert "this layer does not feel like it" in found["error"]["message"]


@pytest.mark.slow
def test_under_a_starter_bad_input_is_told_once(folder):
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(run(folder, "run.yaml", "--set", "parallel.dp=3", **each))
            for each in torch_variables(2)
        ]
        assert [rank.finish(60) for rank in ranks] == [3, 3]
        assert "dp(3) x tp(1) x pp(1) = 3 ranks, but 2 were started." in ranks[0].stderr.text
        assert ranks[1].stderr.text == ""
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_under_a_starter_each_host_tells_what_it_lacks(folder):
    _, other = torch_variables(2, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    changes = settings(parallel__dp=2, data__path="nothing.txt")
    with run(folder, "run.yaml", *changes, **other) as rank:
        assert rank.finish(60) == 3
        assert "data.path" in rank.stderr.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["pp", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("dp", "tp", "mesh-2x2x2", "llama"))]
)
def test_configurations_run(tmp_path, name):
    file = ROOT / "configs" / f"{name}.yaml"
    with run(tmp_path, str(file), "--set", "train.steps=2") as started:
        assert started.finish(100) == 0, started.stderr.text
    assert metrics(tmp_path)["steps"] == 2


async def test_from_an_async_app(folder, monkeypatch):
    monkeypatch.chdir(folder)
    async with asyncio.timeout(60), parallel3d.start("run.yaml", overrides={"train.steps": 4, "parallel.tp": 2}) as run:
        losses = [step.loss async for step in run]
        summary = await run.summary()
    assert summary.losses == tuple(losses)
    assert (summary.status, len(losses), summary.metrics["parameters"] > 30_000) == ("completed", 4, True)
    assert sorted(os.listdir(summary.folder)) == FILES
    assert summary.folder.parent == Path("runs")


async def test_an_app_is_told_what_is_wrong_before_a_rank_starts(folder, monkeypatch):
    monkeypatch.chdir(folder)
    wrong = {"parallel.tensor_plan": {"nothing.*": "column"}, "parallel.tp": 2}
    with pytest.raises(
        parallel3d.ConfigError, match=r"^overrides parallel.tensor_plan  parallel.tensor_plan\[\"nothing"
    ):
        await parallel3d.start("run.yaml", overrides=wrong).__aenter__()
    assert sorted(os.listdir(folder)) == ["own.py", "own.yaml", "run.yaml"]
