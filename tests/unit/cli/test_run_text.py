"""The live line, on a terminal and elsewhere, and what is said at the end."""

from __future__ import annotations

import io
import json

import pytest

from monitoring.analysis.facts import Status
from parallel3d.cli.run_text import LiveLine, print_summary, summary, time_table
from parallel3d.config import load_config
from parallel3d.planning.preflight import ModelFacts
from parallel3d.reports.drawing.words import show_bytes
from parallel3d.runs.record import RunError, RunRecord
from tests.support.observed import report
from tests.unit.runs.test_record import step_message, watch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def record() -> RunRecord:
    return RunRecord(
        load_config(None, overrides={"train.steps": 40, "parallel.pp": 2, "model.args.layers": 2}, environ={})
    )


def show(line: LiveLine, record: RunRecord, step: int) -> None:
    report(record, 0, step_message(step, loss=2.5))
    told = record.steps[-1]
    assert told is not None
    line.show(record, told, bubble=0.25)


def test_elsewhere_a_line_now_and_then_first_and_last_always(record):
    stream, clock = io.StringIO(), Clock()
    line = LiveLine(stream, {}, 80, clock)
    for step in range(36):
        clock.now = step / 10
        show(line, record, step)
    line.close()
    shown = [text.split()[1] for text in stream.getvalue().splitlines()]
    assert shown == ["1/40", "11/40", "21/40", "31/40", "36/40"]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert stream.getvalue().splitlines()[0] == "step  1/40  loss 2.5000  grad norm 2  tokens/s 200  bubble 25 %"


def test_on_a_terminal_one_line_is_redrawn(record):
    stream, clock = Terminal(), Clock()
    line = LiveLine(stream, {"NO_COLOR": "1"}, 200, clock)
    for step in range(4):
        clock.now = step * 0.06
        show(line, record, step)
    line.close()
    drawn = stream.getvalue()
    assert drawn.count("\r\x1b[K") == 3, "the second came too soon after the first; the last is always drawn"
    assert drawn.endswith("\n")
    assert drawn.count("\n") == 1
    assert "\x1b[2m" not in drawn


def test_a_narrow_terminal_gets_no_second_line(record):
    stream = Terminal()
    line = LiveLine(stream, {}, 20, Clock())
    show(line, record, 0)
    assert stream.getvalue() == "\r\x1b[Kstep  1/40  loss 2."


def test_colours_and_dumb_terminals(record):
    stream = Terminal()
    show(LiveLine(stream, {}, 200, Clock()), record, 0)
    assert "\x1b[2mloss\x1b[0m 2.5000" in stream.getvalue()
    stream = Terminal()
    show(LiveLine(stream, {"TERM": "dumb"}, 200, Clock()), record, 0)
    assert "\x1b" not in stream.getvalue()


def test_a_line_that_nobody_reads_is_no_trouble(record):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    line = LiveLine(Gone(), {}, 80, Clock())
    show(line, record, 0)
    line.close()


def test_no_step_no_line():
    for stream in (Terminal(), io.StringIO()):
        LiveLine(stream, {}, 80, Clock()).close()
        assert stream.getvalue() == ""


def test_mfu_and_memory_are_shown_when_known(record):
    record.facts = ModelFacts(1, 1e12)
    for rank in (0, 1):
        report(record, rank, {"kind": "ready", "device": "NVIDIA A100", "parameters": 1})
    report(record, 0, {"kind": "memory", "bytes": 3 << 29})
    stream = io.StringIO()
    show(LiveLine(stream, {}, 80, Clock()), record, 0)
    assert "MFU 512.8 %" in stream.getvalue()
    assert "memory 1.50 GiB" in stream.getvalue()
    assert show_bytes(5 << 20) == "5 MiB"


def test_the_end(record, capsys):
    assert time_table(record, record.metrics()) == ""
    for rank in (0, 1):
        report(record, rank, {"kind": "mesh", "coords": [0, 0, rank]})
        for step in range(3):
            report(record, rank, step_message(step, loss=4.0 - step))
    record.status = Status.COMPLETED
    watch(record)
    assert summary(record, "runs/id", record.metrics()).splitlines() == [
        "completed: 3 of 40 steps, loss 4.0000 to 2.0000, 200 tokens/s",
        "",
        "where the time went        compute       data      other",
        "rank 0 (dp=0 tp=0 pp=0)     60.0 %     20.0 %     20.0 %",
        "rank 1 (dp=0 tp=0 pp=1)     60.0 %     20.0 %     20.0 %",
        "all ranks                   60.0 %     20.0 %     20.0 %",
        "(speed and times leave out 2 steps of warm-up)",
        "",
        "files: runs/id/ (report.html, metrics.json, events.jsonl, trace.json.gz, config.yaml)",
    ]
    metrics = record.metrics()
    print_summary(record, "runs/id", metrics, as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(json.dumps(metrics))
    assert err.startswith("completed")
    print_summary(record, "runs/id", metrics, as_json=False)
    assert capsys.readouterr().out.startswith("completed")


def test_a_failure_is_said_again_below_the_table(record):
    record.error = RunError("rank 1 failed: ValueError: no", 1, notes=("Layer 3.",))
    record.status = Status.FAILED
    assert "ValueError" not in summary(record, "runs/id", record.metrics())  # it stands right above
    report(record, 0, step_message(0))
    lines = summary(record, "runs/id", record.metrics()).splitlines()
    assert lines[-5:-1] == ["", "rank 1 failed: ValueError: no", "Layer 3.", ""]


def test_parts_that_do_not_add_up_and_bottlenecks_are_told(record):
    report(record, 0, {"kind": "mesh", "coords": [0, 0, 0]})
    report(record, 0, step_message(0))
    watch(record, 1)
    record.observed["ranks"][0]["remainder_seconds"] = -0.05
    found = {"severity": "high", "message": "rank 0 waits.", "remedy": "Load ahead.", "gain": 0.2}
    found |= {"key": "data.prefetch", "value": "4"}
    record.observed["bottlenecks"] = [found, {**found, "severity": "low", "gain": None, "value": None}, found, found]
    assert summary(record, "runs/id", record.metrics()).splitlines()[4:-2] == [
        "(the parts add up to the steps but for 10.0 %)",
        "",
        "high     rank 0 waits.",
        "         Load ahead. [data.prefetch: 4] (a step would take about 20 % less)",
        "low      rank 0 waits.",
        "         Load ahead. [data.prefetch]",
        "high     rank 0 waits.",
        "         Load ahead. [data.prefetch: 4] (a step would take about 20 % less)",
    ]


def test_a_run_that_nobody_watched_has_no_table(record):
    report(record, 0, {"kind": "mesh", "coords": [0, 0, 0]})
    report(record, 0, step_message(0))
    assert len(summary(record, "runs/id", record.metrics()).splitlines()) == 3
