"""What real runs leave is what they logged, what is reported of them, and what gates judge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.made_once import made_once
from tests.support.processes import Started, write_script
from tests.support.run_folders import shown

OWN = """
import torch
from torch import nn

import parallel3d

class Talkative(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled():
            parallel3d.logger("model").info("forward", rows=len(x))
        return x

def build():
    return nn.Sequential(nn.Linear(4, 4), Talkative(), nn.Linear(4, 1))

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        parallel3d.logger("data").info("sample", index=index)
        return torch.full((4,), index / 64), torch.ones(1)
"""
YAML = """
model: {factory: "own:build", loss: mse}
data: {factory: "own:Data", shuffle: false}
comm: {timeout: 20}
runtime: {threads: 1}
train: {steps: 4, batch_size: 4}
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """One rank in `one`, two replicas in `two`."""
    return made_once(tmp_path_factory, "reported-runs", make_runs)


def make_runs(folder: Path) -> None:
    (folder / "own.yaml").write_text(YAML)
    write_script(folder, OWN, "own.py")
    for name, dp in (("one", 1), ("two", 2)):
        words = ("run", "own.yaml", "--run-dir", name, "--set", f"parallel.dp={dp}")
        with Started("-m", "parallel3d", *words, cwd=folder) as started:
            assert started.finish(60) == 0, started.stderr.text
            (folder / f"{name}.stderr").write_text(started.stderr.text)


def parallel3d(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallel3d", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_ranks_lines_are_in_the_folder_with_their_place(runs):
    log = [line for line in shown(runs / "two")["log"] if line.get("logger") == "model"]
    found = {(line["rank"], line["coords"]["dp"], line["step"]) for line in log}
    assert found == {(rank, rank, step) for rank in (0, 1) for step in range(4)}
    assert {(line["event"], line["level"], line["rows"]) for line in log} == {("forward", "info", 2)}


def test_data_is_of_the_step_that_it_is_loaded_for(runs):
    log = [line for line in shown(runs / "two")["log"] if line.get("logger") == "data" and "step" in line]
    assert {line["step"] for line in log} == set(range(4)), "also one sample before the first step, of none"
    # Step k's batch is samples 4k to 4k + 3, and replica r has two of them.
    assert {line["index"] // 4 - line["step"] for line in log} == {0}
    assert {line["index"] % 4 // 2 - line["rank"] for line in log} == {0}


def test_stderr_has_them_as_json_where_it_is_no_terminal(runs):
    lines = (runs / "two.stderr").read_text().splitlines()
    shown = [json.loads(line[4:]) for line in lines if line.startswith("[1] {")]
    assert {line["step"] for line in shown if line["event"] == "forward"} == set(range(4))
    assert {line["rank"] for line in shown} == {1}


def test_the_run_logs_its_own_beginning_and_end(runs):
    said = [line["event"] for line in shown(runs / "one")["log"] if "rank" not in line]
    assert said[0] == "the run started"
    assert "the run ended" in said


def test_the_report_says_what_metrics_say(runs):
    metrics = json.loads((runs / "two" / "metrics.json").read_text())
    found = json.loads(parallel3d(runs, "report", "two", "--json").stdout)
    assert found["overall"]["tokens_per_second"] == pytest.approx(metrics["tokens_per_sec"])
    assert found["overall"]["final_loss"] == metrics["final_loss"]
    assert found["statistics"]["steps"] == 2
    assert sum(found["parts"].values()) == pytest.approx(1)
    assert 0 < found["efficiency"]["dp"] <= 1
    text = parallel3d(runs, "report", "two")
    assert (text.returncode, text.stderr) == (0, "")
    assert "rank 1 (dp=1 tp=0 pp=0)" in text.stdout


def test_the_report_is_the_page_that_the_run_wrote(runs):
    again = parallel3d(runs, "report", "two", "--html", "-").stdout
    assert again == (runs / "two" / "report.html").read_text()


def test_real_runs_pass_the_gates_that_they_should(runs):
    given = ("verify", "--baseline", "one", "--candidate", "two", "--world-size", "2", "--json")
    done = parallel3d(runs, *given, "--scaling-floor", "0.000001")
    gates = {gate["gate"]: gate["outcome"] for gate in json.loads(done.stdout)["gates"]}
    assert gates == {"scaling_efficiency": "ok", "loss": "ok", "allreduce_bandwidth": "ok"}
    assert (done.returncode, done.stderr) == (0, "")
    # The other way round nothing is all-reduced, and that run is of another size.
    wrong = parallel3d(runs, "verify", "--baseline", "two", "--candidate", "one", "--world-size", "2")
    assert wrong.returncode == 5
    assert "empty_array" in wrong.stdout
    assert "two/metrics.json: world_size is 2, not 1" in wrong.stderr
