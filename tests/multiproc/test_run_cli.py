"""`parallel3d run` as a process of its own, with a coordinator that computes nothing: output, signals, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, SECONDS, Started, Stream
from tests.support.stand_in import STAND_IN

COMMAND = str(ROOT / "tests" / "support" / "stand_in_cli.py")
FILES = ["config.yaml", "endpoints.json", "events.jsonl", "metrics.json", "report.html", "trace.json.gz"]


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("parallel: {dp: 2}\ntrain: {steps: 6}\n")
    return str(path)


def run(file: str, *options: str, **environment: str) -> Started:
    return Started(COMMAND, "run", file, *options, cwd=Path(file).parent, **environment)


def only_folder(file: str) -> Path:
    (folder,) = (Path(file).parent / "runs").iterdir()
    return folder


def metrics(file: str) -> dict[str, Any]:
    return json.loads((only_folder(file) / "metrics.json").read_text())


def test_a_run_tells_how_it_gets_on_and_where_its_files_are(run_yaml):
    with run(run_yaml, "--set", "train.steps=5") as started:
        assert started.finish() == 0, started.stderr.text
        out, err = started.stdout.text, started.stderr.text
    folder = only_folder(run_yaml)
    assert sorted(os.listdir(folder)) == FILES
    first, second, *lines = err.splitlines()
    assert first == f"run {folder.name}: runs/{folder.name}/"
    assert re.fullmatch(r"page: http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", second)
    assert lines[0].startswith("step 1/5  loss 10.0000  grad norm 1  tokens/s ")
    assert lines[-1].startswith("step 5/5  loss 6.0000")
    assert out.startswith("completed: 5 of 5 steps, loss 10.0000 to 6.0000, ")
    assert "where the time went" in out
    assert "rank 1 (dp=1 tp=0 pp=0)" in out
    assert f"files: runs/{folder.name}/ (report.html" in out


@pytest.mark.slow
def test_json_is_all_there_is_on_stdout(run_yaml, tmp_path):
    with run(run_yaml, "--json", "--run-dir", str(tmp_path / "here")) as started:
        assert started.finish() == 0, started.stderr.text
        assert json.loads(started.stdout.text) == json.loads((tmp_path / "here" / "metrics.json").read_text())
        assert "where the time went" in started.stderr.text
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "code", "words"),
    [
        pytest.param(
            "raise 1 2",
            4,
            "parallel3d: rank 1 (dp=1 tp=0 pp=0) failed first: ValueError: the model has an opinion",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "kill 1 2",
            4,
            "parallel3d: rank 1 (dp=1 tp=0 pp=0) failed first: killed by SIGKILL",
            marks=pytest.mark.exhaustive,
        ),
        ("hang 1 2", 124, "rank 1 (dp=1 tp=0 pp=0) has not called it"),
    ],
)
def test_what_fails_after_the_start(run_yaml, trouble, code, words):
    with run(run_yaml, "--set", "comm.timeout=1", **{STAND_IN: trouble}) as started:
        assert started.finish() == code, started.stderr.text
        assert words in started.stderr.text
        assert "failed: 2 of 6 steps" in started.stdout.text or code == 124
    assert sorted(os.listdir(only_folder(run_yaml))) == FILES
    found = metrics(run_yaml)
    assert (found["losses"], found["error"]["step"]) == ([10.0, 9.0], 2)
    assert found["status"] == ("hung" if code == 124 else "failed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive)]
)
def test_an_interrupted_run(run_yaml, number, code):
    with run(run_yaml, "--set", "train.steps=1000000") as started:
        started.stderr.wait_for("^step")
        started.send(number)
        assert started.finish() == code, started.stderr.text
    assert sorted(os.listdir(only_folder(run_yaml))) == FILES
    assert metrics(run_yaml)["status"] == "interrupted"
    assert metrics(run_yaml)["steps"] > 0


@pytest.mark.slow
def test_ctrl_c_again_does_not_wait_for_a_step(run_yaml):
    with run(run_yaml, "--set", "comm.timeout=60", **{STAND_IN: "hang 1 1"}) as started:
        started.stderr.wait_for("^step 1/6")
        started.send(signal.SIGINT)
        started.send(signal.SIGINT)
        assert started.finish() == 130, started.stderr.text
    assert metrics(run_yaml)["status"] == "interrupted"


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_rank(run_yaml):
    with run(run_yaml, "--set", "train.steps=1000000") as started:
        started.stderr.wait_for("^step")
        started.process.kill()
        started.wait_until_nothing_is_left()
    assert {"config.yaml", "events.jsonl"} <= set(os.listdir(only_folder(run_yaml)))


@pytest.mark.slow
def test_on_a_terminal_one_line_is_redrawn_and_ranks_words_stand_above_it(run_yaml):
    ours, theirs = pty.openpty()
    terminal = Stream(ours)
    environment = {**os.environ, "TERM": "xterm", STAND_IN: "speak 1 2", "COLUMNS": "200"}
    command = [sys.executable, COMMAND, "run", run_yaml]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=Path(run_yaml).parent, env=environment
    ) as process:
        os.close(theirs)
        text = terminal.read_all()
        assert process.wait(SECONDS) == 0, text
    os.close(ours)
    assert text.count("\r\x1b[K") >= 2
    assert re.search(r"\r\x1b\[K(\x1b\[\d+m)?\[1\](\x1b\[0m)? a word\r\n", text)
    assert re.search(r"\x1b\[2mstep\x1b\[0m 6/6.*\r\ncompleted: 6 of 6 steps", text)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("parallel: {dp: 0}", (), "run.yaml:1:16  parallel.dp = 0: must be at least 1."),
        ("trian: {}", (), "Did you mean train?"),
        ("train: {steps: 3}", ("--run-dir", "."), '--run-dir  runtime.run_dir = ".": not empty'),
        ("runtime: {run_dir: run.yaml}", (), "can't be a run's folder: Not a directory"),
    ],
)
def test_bad_input_starts_nothing_and_writes_nothing(tmp_path, text, options, words):
    (tmp_path / "run.yaml").write_text(text)
    with Started("-m", "parallel3d", "run", "run.yaml", *options, cwd=tmp_path) as started:
        assert started.finish() == 3
        assert words in started.stderr.text
        assert started.stdout.text == ""
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_errors_as_json(tmp_path):
    (tmp_path / "run.yaml").write_text("train: {steps: 0}")
    with Started("-m", "parallel3d", "run", "run.yaml", "--json", cwd=tmp_path) as started:
        assert started.finish() == 3
        (error,) = json.loads(started.stdout.text)["errors"]
        assert error["path"] == "train.steps"
