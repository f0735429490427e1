"""`parallel3d validate` and `parallel3d schema`: what they print, where, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from parallel3d.cli.main import main
from parallel3d.config import load_config
from parallel3d.config.reference import json_schema, markdown

ROOT = Path(__file__).parents[3]
MESH = ROOT / "configs" / "mesh-2x2x2.yaml"


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def parallel3d(monkeypatch, capsys):
    """Runs the command in this process."""

    def run(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["parallel3d", *words])
        with pytest.raises(SystemExit) as exit:
            main()
        return Outcome(exit.value.code or 0, *capsys.readouterr())

    return run


def test_a_valid_file_gets_a_short_summary(parallel3d):
    assert parallel3d("validate", str(MESH), "--world", "8") == Outcome(
        0,
        f"{MESH} is valid.\n"
        "ranks     8 = dp 2 x tp 2 x pp 2, order auto\n"
        "model     gpt, 8 layers\n"
        "schedule  1f1b, 2 stages\n"
        "batch     16 samples a step = 2 replicas x 4 microbatches x 2 samples\n",
        "",
    )


def test_a_schedule_of_ones_own_is_not_read(parallel3d, here):
    """So nothing is said of its stages."""
    Path("run.yaml").write_text("parallel: {pp: 2}\npipeline: {schedule: 'csv:nowhere.csv', microbatches: 4}\n")
    code, stdout, stderr = parallel3d("validate", "run.yaml")
    assert (code, stderr) == (0, "")
    assert "schedule  csv:nowhere.csv, a file that is not read here\n" in stdout


def test_json_is_the_resolved_config(parallel3d):
    code, stdout, stderr = parallel3d(
        "validate", str(MESH), "--json", "--set", "train.steps=7", "--set", "train.seed=8"
    )
    overrides = {"train.steps": 7, "train.seed": 8}
    assert json.loads(stdout) == load_config(MESH, overrides=overrides, environ={}).model_dump(mode="json")
    assert (code, stderr) == (0, "")


def test_a_bad_file_exits_3_with_the_errors_on_stderr(parallel3d, here):
    Path("run.yaml").write_text("parallel:\n  dp: 2\n  tp: 2\n  pp: 3\n")
    assert parallel3d("validate", "run.yaml", "--world", "8", "--set", "train.steps=x") == Outcome(
        3,
        "",
        "run.yaml:4:7  parallel.pp = 3: dp(2) x tp(2) x pp(3) = 12 ranks, but 8 were started.\n"
        "              Set pp to 2, or start 12 ranks.\n"
        '--set train.steps  train.steps = "x": must be a whole number.\n'
        "                   For example 100.\n",
    )


def test_json_errors_go_to_stdout(parallel3d, here, monkeypatch):
    Path("run.yaml").write_text("trian: {}\n")
    monkeypatch.setenv("PARALLEL3D_TRAIN__STEPS", "0")
    code, stdout, stderr = parallel3d("validate", "run.yaml", "--json")
    unknown = {"path": "trian", "found": None, "message": "unknown key.", "remedy": "Did you mean train?"}
    zero = {"path": "train.steps", "found": "0", "message": "must be at least 1.", "remedy": "Set it to 1."}
    assert json.loads(stdout) == {
        "errors": [
            {"file": "run.yaml", "line": 1, "column": 1, **unknown},
            {"file": "PARALLEL3D_TRAIN__STEPS", "line": None, "column": None, **zero},
        ]
    }
    assert (code, stderr) == (3, "")


@pytest.mark.parametrize(
    "words", [[], [str(MESH), "--world", "0"], [str(MESH), "--set", "a.b"], [str(MESH), "--set", "=1"]]
)
def test_wrong_usage_exits_2(words, parallel3d):
    code, stdout, stderr = parallel3d("validate", *words)
    assert (code, stdout) == (2, "")
    assert "Usage" in stderr


def test_schema(parallel3d):
    code, stdout, stderr = parallel3d("schema")
    assert (code, json.loads(stdout), stderr) == (0, json_schema(), "")
    assert parallel3d("schema", "--markdown") == Outcome(0, markdown(), "")


def test_validate_never_imports_torch():
    # None in sys.modules makes every import of that name fail.
    script = "import sys; sys.modules['torch'] = None; from parallel3d.cli.main import main; main()"
    command = [sys.executable, "-c", script, "validate", str(MESH)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
