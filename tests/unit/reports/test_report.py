"""What a run comes to: figures, words, page and JSON say the same, and the verb's exit codes."""

from __future__ import annotations

import json
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitoring.events.time_parts import MEANINGS, NO_TIME, PARTS, TimeParts
from parallel3d.cli.main import main
from parallel3d.reports.drawing.charts import line_chart, nice_ticks, stacked_chart
from parallel3d.reports.html import COLOURS, to_page
from parallel3d.reports.report import Statistics, efficiency, quantile
from parallel3d.reports.run_reader import read_run
from tests.support.run_folders import BOTTLENECK, RUN_ID, SHARES, events, kill, metrics, write_events, write_run

SVG = "{http://www.w3.org/2000/svg}"


# Figures.


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_statistics_are_those_of_numpy(seconds):
    found = Statistics.of(seconds, 2)
    assert (found.num_steps, found.num_warm_up) == (len(seconds), 2)
    assert found.mean == pytest.approx(statistics.fmean(seconds))
    for value, share in ((found.median, 0.5), (found.p95, 0.95), (found.p99, 0.99)):
        assert value == pytest.approx(float(np.quantile(seconds, share)))
    assert (found.least, found.most) == (min(seconds), max(seconds))


def test_no_steps_have_no_statistics():
    assert Statistics.of([], 0) is None
    assert quantile([3.0], 0.99) == 3.0


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"dp": 1, "tp": 1, "pp": 1}, (None, None, None)),
        ({"dp": 4, "tp": 1, "pp": 1}, (0.8, None, None)),
        ({"dp": 1, "tp": 2, "pp": 1}, (None, 0.5 / 0.85, None)),
        ({"dp": 1, "tp": 1, "pp": 4}, (None, None, 0.75)),
        ({"dp": 2, "tp": 2, "pp": 2}, (0.9, 0.5 / 0.75, 0.75)),  # whose stragglers they are is not known
    ],
)
def test_efficiency_by_axis(mesh, expected):
    parts = TimeParts.of({"compute": 0.5, "tp_comm": 0.25, "dp_comm": 0.1, "straggler": 0.1, "other": 0.05})
    assert tuple(efficiency(parts, mesh, 0.25).values()) == pytest.approx(expected)


def test_no_time_has_no_efficiency():
    assert efficiency(NO_TIME, {"dp": 2, "tp": 2, "pp": 2}, 0.5) == {"dp": None, "tp": None, "pp": None}
    only_waiting = TimeParts.of({"optimizer": 1.0})
    assert efficiency(only_waiting, {"dp": 1, "tp": 2, "pp": 2}, None) == {"dp": None, "tp": None, "pp": None}


def test_the_report_of_a_run(tmp_path):
    found = read_run(write_run(tmp_path)).report().to_json()
    assert found["overall"]["tokens_per_second"] == 200.0
    assert (found["overall"]["first_loss"], found["overall"]["final_loss"]) == (5.0, 3.0)
    assert found["overall"]["allreduce_bandwidth_gbps"] == 2.0
    assert found["efficiency"] == {"dp": pytest.approx(0.92), "tp": None, "pp": pytest.approx(0.85)}
    assert found["parts"] == pytest.approx(SHARES)
    assert found["remainder"] == pytest.approx(0.01)
    assert found["memory"] == {
        "total_bytes": 10 << 20,
        "most_bytes": 4 << 20,
        "budget_bytes": 1 << 30,
        "ranks": {"0": 1 << 20, "1": 2 << 20, "2": 3 << 20, "3": 4 << 20},
    }
    assert found["bottlenecks"] == [BOTTLENECK]
    assert found["statistics"]["step_seconds"]["median"] == 0.5
    assert (found["statistics"]["steps"], found["statistics"]["warm_up_steps"]) == (3, 2)


def test_a_killed_run_has_its_steps_parts(tmp_path):
    found = read_run(kill(write_run(tmp_path))).report().to_json()
    assert found["parts"] == pytest.approx(SHARES)
    assert (found["remainder"], found["memory"]["total_bytes"]) == (None, None)
    assert found["efficiency"]["dp"] == pytest.approx(0.92)


# The page.


def page_of(folder: Path) -> ElementTree.Element:
    text = to_page(read_run(folder))
    assert "http" not in text.replace("http://www.w3.org/", "")
    assert "<script" not in text
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def text_of(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def test_the_page_shows_the_run(tmp_path):
    page = page_of(write_run(tmp_path))
    text = text_of(page)
    for words in (
        f"run {RUN_ID} completed",
        "4 ranks = dp 2 x tp 1 x pp 2",
        "steps 5 of 9",
        "rank 3 (dp=1 tp=0 pp=1)",
        "50.0 %",
        "2 steps of warm-up are left out.",
        "high too_few_microbatches : The pipeline idles for 20 % of its time with 2 microbatches.",
        "Cut the batch into more microbatches. [pipeline.microbatches: 8] Saves about 12.5 % of the step.",
        "bubble 0.2, microbatches 2",
        "node-7",
        "0.62",  # the straggler's score
        "the most of 1.00 GiB optimizer weights rank 0 (dp=0 tp=0 pp=0) 1 MiB 0.1 % 0 MiB 1 MiB",
        "step 4: 1f1b",
        "bubble planned",
        "warning disk is slow rank=1",
        "batch_size: 4",
        *(f"{part}: {meaning}" for part, meaning in MEANINGS.items()),
    ):
        assert words in text, words


def test_the_page_has_the_plots(tmp_path):
    page = page_of(write_run(tmp_path))
    curves = page.findall(f".//{SVG}polyline[@class='curve']")
    assert [len(curve.get("points", "").split()) for curve in curves] == [5, 5]
    layers = page.findall(f".//{SVG}polygon")
    assert [layer.get("fill") for layer in layers] == [COLOURS[part] for part in PARTS if SHARES[part]]
    assert {len(layer.get("points", "").split()) for layer in layers} == {2 * 3}, "the steps that count"
    actions = {box.text for box in page.iter(f"{SVG}text")}
    assert {"0F0", "1B1"} <= actions


def test_every_part_has_a_colour():
    assert tuple(COLOURS) == PARTS


def test_what_users_wrote_is_escaped(tmp_path):
    evil = "</pre><script>alert(1)</script><img src=x>\x1b[31m\x00"
    error = {"message": evil, "rank": 0, "coords": None, "step": 0, "traceback": evil, "notes": [evil]}
    held_up = BOTTLENECK | {"message": evil, "kind": evil, "severity": evil}
    rank = metrics()["ranks"][0] | {"host": evil, "device": evil}
    write_run(tmp_path, run_id=evil, status=evil, error=error, bottlenecks=[held_up], ranks=[rank])
    (tmp_path / "config.yaml").write_text(f"model: {{factory: {json.dumps(evil)}}}\n# <script>alert(2)</script>\n")
    write_events(tmp_path, [{"kind": "log", "event": evil, "level": evil, evil: evil}])
    text = to_page(read_run(tmp_path))
    assert "<script" not in text
    assert "<img" not in text
    assert "<script>alert(1)</script><img src=x>" in text_of(page_of(tmp_path))


def test_a_run_without_a_step(tmp_path):
    write_run(tmp_path, ranks=[], losses=[], step_seconds=[], bottlenecks=[])
    write_events(tmp_path, [])
    text = text_of(page_of(tmp_path))
    assert "No step was made." in text
    assert "Bottlenecks" not in text, "nobody could look for one"


def test_a_run_that_nothing_held_up(tmp_path):
    assert "Bottlenecks None was found." in text_of(page_of(write_run(tmp_path, bottlenecks=[])))


def test_a_killed_runs_page(tmp_path):
    text = text_of(page_of(kill(write_run(tmp_path))))
    assert "killed" in text
    assert "all ranks 50.0 %" in text


# Charts.


def points_of(chart: str) -> list[str]:
    found = ElementTree.fromstring(chart).find(f".//{SVG}polyline")
    return found.get("points", "").split()


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    points = points_of(line_chart("Loss", "", [*((step, float(step)) for step in range(5000)), (5000, float("nan"))]))
    assert len(points) <= 1001
    assert (points[0].split(",")[0], points[-1].split(",")[0]) == ("62.0", "628.0")


def test_nothing_to_draw():
    assert line_chart("Loss", "", [(0, 1.0)]) == ""
    assert line_chart("Loss", "", [(0, float("nan")), (1, float("inf"))]) == ""
    assert stacked_chart("Parts", "", [0], {"a": ("red", [1.0])}) == ""


def test_layers_stand_on_each_other():
    chart = ElementTree.fromstring(
        stacked_chart("x", "", [3, 4], {"a": ("red", [1.0, 1.0]), "b": ("blue", [3.0, 0.0])})
    )
    red, blue = (each.get("points").split() for each in chart.iter(f"{SVG}polygon"))
    assert red[:2] == blue[:1:-1], "the upper one's lower edge is the lower one's upper"
    assert len({point.split(",")[0] for point in red + blue}) == 2


def test_a_flat_stack_is_drawn():
    assert stacked_chart("x", "", [0, 1], {"a": ("red", [0.0, 0.0])})


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (1.2, 4.1, [2.0, 3.0, 4.0]),
        (3.0, 3.0, [3.0]),
        (0.0, 7.5, [0.0, 2.0, 4.0, 6.0]),
        (0.0, float("inf"), [0.0]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


# The verb.


class Exit(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def report(monkeypatch, capsys, here):
    """Runs the command in this process."""

    def run(*words: str) -> Exit:
        monkeypatch.setattr(sys, "argv", ["parallel3d", "report", *words])
        with pytest.raises(SystemExit) as exit:
            main()
        return Exit(exit.value.code or 0, *capsys.readouterr())

    return run


def test_the_report_in_words(report, here):
    write_run(here / "run")
    done = report("run")
    assert (done.code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"run {RUN_ID}: completed, 5 of 9 steps"
    for line in (
        "  loss        5.0000 to 3.0000",
        "  tokens/s    200",
        "  all-reduce  2.00 GB/s",
        "  dp    92.0 %  of the time is left when gradients are reduced",
        "  pp    85.0 %  of the pipeline's time is no bubble",
        "  rank 3 (dp=1 tp=0 pp=1)       4 MiB  0.4 % of 1.00 GiB (weights 1 MiB)",
        "  high: too_few_microbatches: The pipeline idles for 20 % of its time with 2 microbatches.",
        "      Cut the batch into more microbatches. [pipeline.microbatches: 8] Saves about 12.5 % of the step.",
        "  a step      mean 500.0 ms, median 500.0 ms, p95 500.0 ms, p99 500.0 ms",
        "  counted     3 steps; 2 steps of warm-up left out",
    ):
        assert line in lines, line
    head, first, *_, last = [line for line in lines if line.startswith(("where", "rank", "all"))]
    assert head.split()[4:] == [*(part for part in PARTS if part != "checkpoint"), "remainder", "score"]
    assert first.split()[5:7] + first.split()[-3:] == ["50.0", "%", "1.0", "%", "0.62"]
    assert last.startswith("all ranks ")


def test_no_terminal_obeys_a_folder(report, here):
    write_run(here / "run", bottlenecks=[BOTTLENECK | {"message": "\x1b]0;owned\x07"}])
    assert "\x1b" not in report("run").stdout


def test_json(report, here):
    write_run(here / "run")
    done = report("run", "--json")
    assert json.loads(done.stdout) == read_run(here / "run").report().to_json()


def test_the_page_goes_to_a_file_or_stdout(report, here):
    write_run(here / "run")
    assert report("run", "--html", "page.html") == (0, "", "")
    page = (here / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert report("run", "--html", "-").stdout == page


def test_a_killed_run_is_told_of(report, here):
    kill(write_run(here / "run"))
    done = report("run")
    assert (done.code, done.stdout.splitlines()[0]) == (0, f"run {RUN_ID}: killed, 5 of 9 steps")
    assert "all ranks" in done.stdout


def test_bottlenecks_that_nobody_looked_for_are_not_told_as_none(report, here):
    write_run(here / "run", bottlenecks=[])
    assert "none was found" in report("run").stdout
    unwatched = [rank | {"seconds": NO_TIME.to_json()} for rank in metrics()["ranks"]]
    write_run(here / "run", bottlenecks=[], ranks=unwatched)
    write_events(here / "run", [line for line in events() if line["kind"] != "parts"])
    assert "none was found" not in report("run").stdout
    assert "where the time went" not in report("run").stdout
    kill(here / "run")
    write_events(here / "run", [])
    assert "none was found" not in report("run").stdout


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nowhere"], 1, "parallel3d: nowhere is no run's folder: there is none.\n"),
        (["."], 1, "parallel3d: . is no run's folder: it has neither events.jsonl nor metrics.json.\n"),
        (["run", "--html", "no/such/folder.html"], 1, "--html no/such/folder.html can't be written"),
        (["run", "--html", "x.html", "--json"], 2, "either a page or JSON"),
        ([], 2, "Missing argument"),
    ],
)
def test_refusals(report, here, words, code, says):
    write_run(here / "run")
    done = report(*words)
    assert (done.code, done.stdout) == (code, "")
    assert says in done.stderr
