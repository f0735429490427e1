"""`parallel3d schedule` and `parallel3d simulate`: what they print and draw, what they refuse, and their exit codes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from parallel3d.cli.main import main
from parallel3d.pipeline.schedules.actions import Kind, parse_actions
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.simulation import Costs, simulate
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.reports.drawing import Lane, Span, draw, lanes_of
from parallel3d.reports.drawing.grid import grid, painter
from parallel3d.reports.drawing.palette import shade
from parallel3d.reports.drawing.svg import to_svg
from parallel3d.reports.drawing.words import number, round_steps

ROOT = Path(__file__).parents[3]
MESH = ROOT / "configs" / "mesh-2x2x2.yaml"
SVG = "{http://www.w3.org/2000/svg}"
HTML = "{http://www.w3.org/1999/xhtml}"
VIRTUAL = {"interleaved": 2, "round-robin": 2, "zbv": 2, "dualpipe-v": 2}
ALL = ["gpipe", "1f1b", "interleaved", "round-robin", "zero-bubble", "zbv", "dualpipe-v"]
STUCK = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def terminal(monkeypatch, here):
    """What the pictures depend on; and an empty folder to write them to."""
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def parallel3d(monkeypatch, capsys):
    """Runs the command in this process."""

    def run(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["parallel3d", *words])
        with pytest.raises(SystemExit) as exit:
            main()
        return Outcome(exit.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def schedule(parallel3d):
    """Its stdout; anything else is a failure."""

    def run(words: str) -> str:
        code, stdout, stderr = parallel3d("schedule", *words.split())
        assert (code, stderr) == (0, "")
        return stdout

    return run


def simulated(schedule: str, ranks: int, microbatches: int):
    table = build(schedule, ranks, microbatches, VIRTUAL.get(schedule))
    return simulate(table, Costs.uniform(table.stages))


# The grid


def test_gpipe_as_text(schedule):
    assert (
        schedule("--schedule gpipe --pp 2 --microbatches 2")
        == """\
gpipe: 2 ranks, 2 microbatches

time   | 0   1   2   3   4   5   6   7   8
rank 0 | 0F0 0F1 .   .   .   0B0---- 0B1----
rank 1 | .   1F0 1F1 1B0---- 1B1---- .   .

makespan 9, bubble 33.3 %, peak activations by stage: 2 2
"""
    )


def test_1f1b_is_what_is_drawn_unless_asked_otherwise(schedule):
    text = """\
1f1b: 2 ranks, 2 microbatches

time   | 0   1   2   3   4   5   6   7   8
rank 0 | 0F0 0F1 .   .   0B0---- .   0B1----
rank 1 | .   1F0 1B0---- 1F1 1B1---- .   .

makespan 9, bubble 33.3 %, peak activations by stage: 2 1
"""
    assert schedule("--pp 2 --microbatches 2") == schedule("--schedule 1f1b --pp 2 --microbatches 2") == text


def test_bands_as_wide_as_the_terminal(schedule, monkeypatch):
    monkeypatch.setenv("COLUMNS", "33")
    assert (
        schedule("--pp 3 --microbatches 2")
        == """\
1f1b: 3 ranks, 2 microbatches

time   | 0   1   2   3   4
rank 0 | 0F0 0F1 .   .   .
rank 1 | .   1F0 1F1 .   .
rank 2 | .   .   2F0 2B0----

time   | 5   6   7   8   9
rank 0 | .   .   0B0---- .
rank 1 | 1B0---- .   1B1----
rank 2 | 2F1 2B1---- .   .

time   | 10  11
rank 0 | 0B1----
rank 1 | .   .
rank 2 | .   .

makespan 12, bubble 50.0 %, peak activations by stage: 2 2 1
"""
    )


def test_an_action_that_does_not_fit_a_band_waits_for_the_next(schedule, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert (
        schedule("--pp 2 --microbatches 2")
        == """\
1f1b: 2 ranks, 2 microbatches

time   | 0   1   2
rank 0 | 0F0 0F1 .
rank 1 | .   1F0

time   | 2   3   4
rank 0 |     .
rank 1 | 1B0---- 1F1

time   | 4   5   6
rank 0 | 0B0---- .
rank 1 |     1B1----

time   | 7   8
rank 0 | 0B1----
rank 1 | .   .

makespan 9, bubble 33.3 %, peak activations by stage: 2 1
"""
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [1, 20, 41, 80, 133, 1000])
@pytest.mark.parametrize("weights", [(1, 1, 1), (0.3, 0.7, 0.001), (3, 2, 1)])
def test_no_action_is_lost_or_broken(name, width, weights):
    table = build(name, 3, 12, VIRTUAL.get(name))
    result = simulate(table, Costs.uniform(table.stages, *weights))
    lines = grid(lanes_of(result), width)
    widest = max(len(word) for line in lines for word in line.split())
    assert max(map(len, lines)) <= max(width, len("rank 0 | ") + widest)
    for rank, column in enumerate(table.columns):
        rows = [line.partition("|")[2] for line in lines if line.startswith(f"rank {rank} ")]
        words = [word.rstrip("-") for row in rows for word in row.split()]
        assert [word for word in words if word != "."] == list(map(str, column))


def test_an_action_stands_at_its_time_and_is_as_wide_as_it_takes_long():
    result = simulated("1f1b", 4, 8)
    lines = grid(lanes_of(result), 1000)
    for row, column, starts, ends in zip(lines[1:], result.table.columns, result.starts, result.ends, strict=True):
        for action, start, end in zip(column, starts, ends, strict=True):
            at = len("rank 0 | ") + 4 * round(start)
            assert row[at : at + 4 * round(end - start)].strip() == str(action).ljust(4 * round(end - start) - 1, "-")


def test_costs_are_given_for_all_stages_or_for_each(schedule):
    assert (
        schedule("--pp 2 --microbatches 1 --forward 1,2 --backward 3 --transfer 1")
        == """\
1f1b: 2 ranks, 1 microbatch

time   | 0   1   2   3   4   5   6   7   8   9   10
rank 0 | 0F0 .   .   .   .   .   .   .   0B0--------
rank 1 | .   .   1F0---- 1B0-------- .   .   .   .

makespan 11, bubble 59.1 %, peak activations by stage: 1 1
"""
    )


def test_the_input_part_is_what_the_weight_part_leaves(schedule):
    half = schedule("--schedule zero-bubble --pp 2 --microbatches 2 --backward 4")
    assert half == schedule("--schedule zero-bubble --pp 2 --microbatches 2 --backward 4 --weight-backward 2")
    assert (
        schedule("--schedule zero-bubble --pp 2 --microbatches 2 --backward 4 --weight-backward 1").splitlines()[3:5]
        == """\
rank 0 | 0F0 0F1 .   .   .   0I0-------- 0W0 0I1-------- 0W1
rank 1 | .   1F0 1I0-------- 1F1 1I1-------- 1W0 1W1 .   .
""".splitlines()
    )


def test_all_actions_are_listed_rank_by_rank(schedule, monkeypatch):
    text = """\
rank 0        rank 1
0F0           1RECV_F0
0SEND_F0      1F0
0RECV_B0      1B0
0B0           1SEND_B0
0REDUCE_GRAD  1REDUCE_GRAD
"""
    assert text in schedule("--pp 2 --microbatches 1 --actions all")
    monkeypatch.setenv("COLUMNS", "20")
    assert schedule("--pp 2 --microbatches 1 --actions all").splitlines()[2:] == [
        *("rank 0", "0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE_GRAD", ""),
        *("rank 1", "1RECV_F0", "1F0", "1B0", "1SEND_B0", "1REDUCE_GRAD", ""),
        "makespan 6, bubble 50.0 %, peak activations by stage: 1 1",
    ]


def test_a_table_of_ones_own(schedule):
    Path("my.csv").write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    mine, ours = schedule("--schedule csv:my.csv"), schedule("--pp 2 --microbatches 2")
    assert mine.splitlines()[0] == "csv:my.csv: 2 ranks, 2 microbatches"
    assert mine.splitlines()[1:] == ours.splitlines()[1:]


# Colour


def test_colours_are_for_terminals(schedule, monkeypatch):
    plain = schedule("--pp 2 --microbatches 2")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    coloured = schedule("--pp 2 --microbatches 2")
    assert "\x1b[48;5;74;38;5;16m0F0\x1b[0m \x1b[48;5;74;38;5;16m0F1\x1b[0m \x1b[2m.  \x1b[0m" in coloured
    assert "\x1b[48;5;215;38;5;16m0B0    \x1b[0m" in coloured
    without = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()]
    expected = [line.rstrip() for line in plain.replace("-", " ").splitlines()]
    assert without == [*expected[:-1], " F  forward    B  backward", *expected[-2:]]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_not_for_those_who_want_none(name, value, schedule, monkeypatch):
    plain = schedule("--pp 2 --microbatches 2")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv(name, value)
    assert schedule("--pp 2 --microbatches 2") == plain
    monkeypatch.setenv(name, "")
    assert schedule("--pp 2 --microbatches 2") != plain


def test_terminals_that_know_more_colours_get_those_of_the_pictures():
    line = grid(lanes_of(simulated("zbv", 2, 2)), 80, painter({"COLORTERM": "truecolor"}))[1]
    found = re.findall(r"\x1b\[48;2;(\d+);(\d+);(\d+);[0-9;]+m(\w+)", line)
    for red, green, blue, name in found:
        (action,) = parse_actions(name)
        colour = "#" + "".join(f"{int(value):02x}" for value in (red, green, blue))
        assert colour == shade(action.kind, 0 if action.stage == 0 else 1, 2)
    assert [name for *_, name in found] == list(map(str, build("zbv", 2, 2).columns[0]))


def test_kinds_and_stages_look_different():
    colours = [shade(kind, place, 3) for kind in (Kind.F, Kind.B, Kind.I, Kind.W) for place in range(3)]
    assert len(set(colours)) == len(colours)


# JSON


def test_json(schedule):
    text = schedule("--schedule 1f1b --pp 2 --microbatches 2 --json")
    assert text == (
        "{\n"
        '  "schedule": "1f1b",\n'
        '  "stages": 2,\n'
        '  "microbatches": 2,\n'
        '  "ranks": [\n'
        '    ["0F0", "0F1", "0B0", "0B1"],\n'
        '    ["1F0", "1B0", "1F1", "1B1"]\n'
        "  ],\n"
        '  "bubble_ratio": 0.3333333333333333,\n'
        '  "peak_activations": [2, 1]\n'
        "}\n"
    )
    assert json.loads(text)["ranks"][1] == ["1F0", "1B0", "1F1", "1B1"]


def test_json_with_all_actions(schedule):
    document = json.loads(schedule("--pp 2 --microbatches 1 --actions all --json"))
    assert document == {
        "schedule": "1f1b",
        "stages": 2,
        "microbatches": 1,
        "ranks": [
            ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE_GRAD"],
            ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1REDUCE_GRAD"],
        ],
        "bubble_ratio": 0.5,
        "peak_activations": [1, 1],
    }


@pytest.mark.parametrize("name", ["zbv", "dualpipe-v"])
def test_two_stages_a_rank_are_implied(name, schedule):
    document = json.loads(schedule(f"--schedule {name} --pp 2 --microbatches 4 --json"))
    assert document["stages"] == len(document["peak_activations"]) == 4
    assert all(re.fullmatch(r"\d[FBIW]\d", action) for column in document["ranks"] for action in column)


def test_overlapped_pairs_are_two_actions(schedule):
    Path("my.csv").write_text("0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,1B1,0B1\n")
    document = json.loads(schedule("--schedule csv:my.csv --json"))
    assert document["ranks"] == [["0F0", "1F0", "0F1", "1B0", "1F1", "0B0", "1B1", "0B1"]]


# Pictures


def boxes(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in root.iter(f"{SVG}g") if "box" in group.get("class", "").split()]


def place(box: ElementTree.Element) -> tuple[float, float, float]:
    rect = box.find(f"{SVG}rect")
    assert rect is not None
    return float(rect.get("x", "")), float(rect.get("y", "")), float(rect.get("width", ""))


def name_of(box: ElementTree.Element) -> str:
    return box.findtext(f"{SVG}title", "").partition(":")[0]


@pytest.mark.parametrize("name", ALL)
def test_svg_is_to_scale(name, schedule):
    schedule(f"--schedule {name} --pp 4 --microbatches 8 --virtual-stages {VIRTUAL.get(name, 1)} --svg picture.svg")
    root = ElementTree.parse("picture.svg").getroot()
    result = simulated(name, 4, 8)
    times = {
        str(action): (rank, start, end)
        for rank, column in enumerate(result.table.columns)
        for action, start, end in zip(column, result.starts[rank], result.ends[rank], strict=True)
    }
    found = {name_of(box): place(box) for box in boxes(root)}
    assert len(boxes(root)) == len(found) == len(times)
    left, top, _ = found["0F0"]
    row = found["1F0"][1] - top
    unit = (found["0F1"][0] - left) / (times["0F1"][1] - times["0F0"][1])
    for action, (rank, start, end) in times.items():
        x, y, width = found[action]
        assert x == pytest.approx(left + unit * start, abs=0.03)
        assert y == pytest.approx(top + row * rank, abs=0.03)
        assert unit * (end - start) - 2 <= width <= unit * (end - start)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert all(str(action) in texts for column in result.table.columns for action in column)
    assert f"makespan {number(result.makespan)}, bubble {100 * result.bubble_ratio:.1f} %" in texts
    assert {"rank 0", "rank 3", "idle", "F forward"} <= set(texts)


def test_ticks_of_the_axis_stand_at_their_times(schedule):
    schedule("--pp 2 --microbatches 8 --svg picture.svg")
    root = ElementTree.parse("picture.svg").getroot()
    ticks = {text.text: float(text.get("x", "")) for text in root.iter(f"{SVG}text") if (text.text or "").isdigit()}
    found = {name_of(box): place(box)[0] for box in boxes(root)}
    result = simulated("1f1b", 2, 8)
    starts = dict(zip(map(str, result.table.columns[0]), result.starts[0], strict=True))
    assert len(ticks) > 5
    checked = [name for name, start in starts.items() if number(start) in ticks]
    assert len(checked) > 3
    assert all(found[name] == pytest.approx(ticks[number(starts[name])], abs=0.03) for name in checked)


def test_names_are_left_out_where_they_do_not_fit():
    narrow, wide = parse_actions("0F0")[0], parse_actions("0B0")[0]
    picture = draw([Lane("rank 0", (Span(0, 0.01, narrow), Span(0.01, 10, wide)))])
    assert [(box.name, bool(box.size)) for box in picture.boxes] == [("0F0", False), ("0B0", True)]


def test_measured_lanes_are_beneath_the_planned_ones_on_the_same_axis():
    planned = lanes_of(simulated("1f1b", 2, 2))
    late = [Lane(lane.label, tuple(Span(s + 1, e + 1, action) for s, e, action in lane.spans)) for lane in planned]
    picture = draw(planned, late, title="both")
    half = len(picture.boxes) // 2
    assert max(box.y for box in picture.boxes[:half]) < min(box.y for box in picture.boxes[half:])
    unit = picture.boxes[half].x - picture.boxes[0].x  # one unit late
    assert picture.boxes[1].x - picture.boxes[0].x == pytest.approx(unit)
    assert {"planned", "measured"} <= {text.text for text in picture.texts}
    assert "planned" not in {text.text for text in draw(planned).texts}
    ElementTree.fromstring(to_svg(picture))


def test_html_needs_nothing_else(schedule):
    schedule("--schedule zbv --pp 2 --microbatches 4 --transfer 0.5 --html page.html")
    text = Path("page.html").read_text()
    root = ElementTree.fromstring(text)
    assert not re.search(r"<script|\ssrc=|\shref=|url\(|@import", text)
    table = build("zbv", 2, 4)
    result = simulate(table, Costs.uniform(4, transfer=0.5))
    critical = [name_of(box) for box in boxes(root) if "critical" in box.get("class", "").split()]
    assert sorted(critical) == sorted(str(step.action) for step in result.critical_path)
    assert len(boxes(root)) == sum(map(len, table.columns))
    (toggle,) = root.iter(f"{HTML}input")
    assert (toggle.get("type"), toggle.get("id")) == ("checkbox", "critical")
    assert "#critical:checked ~ figure .box:not(.critical)" in text
    assert "prefers-color-scheme: dark" in text
    ranks, stages = (
        [["".join(cell.itertext()) for cell in row] for row in t.iter(f"{HTML}tr")] for t in root.iter(f"{HTML}table")
    )
    assert ranks[1] == ["0", "0 3", "24", number(result.idle[0]), f"{100 * result.rank_bubble_ratios[0]:.1f} %"]
    assert stages[1:] == [["0", "0", "4"], ["1", "1", "3"], ["2", "1", "2"], ["3", "0", "1"]]


def test_names_of_files_are_harmless_in_pictures(schedule):
    name = "<&\x1b\"'.csv"
    Path(name).write_text("0F0,0B0\n")
    text = schedule(f"--schedule csv:{name} --svg a.svg --html a.html")
    assert text.splitlines()[0] == "csv:<&?\"'.csv: 1 rank, 1 microbatch"
    assert ElementTree.parse("a.svg").getroot().get("aria-label") == text.splitlines()[0]
    assert ElementTree.parse("a.html").findtext(f".//{HTML}title") == text.splitlines()[0]


def test_png(schedule):
    pytest.importorskip("matplotlib")
    schedule("--pp 2 --microbatches 2 --png picture.png")
    data = Path("picture.png").read_bytes()
    picture = draw(lanes_of(simulated("1f1b", 2, 2)))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20], "big") == pytest.approx(2 * picture.width, abs=2)
    assert len(data) > 5000


def test_png_without_matplotlib_is_refused(parallel3d, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    assert parallel3d("schedule", "--pp", "2", "--microbatches", "2", "--png", "a.png") == Outcome(
        2,
        "",
        "parallel3d schedule: --png needs matplotlib, which is not installed. "
        "pip install 'parallel3d[plot]', or use --svg.\n",
    )


@pytest.mark.parametrize(
    ("end", "most", "steps"),
    [
        (3, 3, [0, 1, 2, 3]),
        (9, 8, [0, 2, 4, 6, 8]),
        (33, 7, [0, 5, 10, 15, 20, 25, 30]),
        (0.003, 3, [0, 0.001, 0.002, 0.003]),
        (5, 1, [0, 5]),
        (70, 1, [0]),
        (0, 5, [0]),
    ],
)
def test_steps_of_an_axis_are_round_and_not_too_many(end, most, steps):
    assert list(round_steps(end, most)) == pytest.approx(steps)


# All schedules


def test_compare(schedule):
    assert (
        schedule("--compare --pp 4 --microbatches 6")
        == """\
4 ranks, 6 microbatches, the same work for a rank in each schedule

schedule     virtual stages  makespan  x 1f1b  bubble  peak activations
gpipe                     1        27   1.000  33.3 %                 6
1f1b                      1        27   1.000  33.3 %                 4
interleaved               2  not possible: 6 microbatches are no multiple of 4 ranks. Use 4 or 8.
round-robin               2      22.5   0.833  20.0 %                 6
zero-bubble               1        21   0.778  14.3 %                 4
zbv                       2      19.5   0.722   7.7 %                 4
dualpipe-v                2  not possible: 6 microbatches are fewer than 2 x 4 ranks. Use 8 or more, or zbv.

peak activations: of the rank that keeps the most, in microbatches of a whole rank
"""
    )


def test_compare_as_json(schedule):
    document = json.loads(schedule("--compare --pp 4 --microbatches 6 --virtual-stages 3 --backward 4 --json"))
    assert (document["pp"], document["microbatches"]) == (4, 6)
    entries = {entry["schedule"]: entry for entry in document["schedules"]}
    assert list(entries) == ALL
    assert [entry["virtual_stages"] for entry in entries.values()] == [1, 1, 3, 3, 1, 2, 2]
    assert entries["1f1b"] == {
        "schedule": "1f1b",
        "virtual_stages": 1,
        "makespan": 45.0,
        "relative_makespan": 1.0,
        "bubble_ratio": pytest.approx(1 / 3),
        "peak_activations": 4.0,
    }
    assert entries["round-robin"]["makespan"] == pytest.approx(6 * 5 + 3 * 5 / 3)
    assert entries["round-robin"]["peak_activations"] == pytest.approx(6)
    assert entries["interleaved"] == {
        "schedule": "interleaved",
        "virtual_stages": 3,
        "not_possible": "6 microbatches are no multiple of 4 ranks. Use 4 or 8.",
        "nearest": {"pp": 4, "microbatches": 4, "virtual_stages": 3},
    }


def formulas(p: int, m: int, v: int) -> dict[str, tuple[Fraction, Fraction] | None]:
    """The table of docs/schedules.md: bubble, and peak activations of the rank with the most."""
    part = Fraction
    return {
        "gpipe": (part(p - 1, m + p - 1), part(m)),
        "1f1b": (part(p - 1, m + p - 1), part(min(p, m))),
        "interleaved": (part(p - 1, v * m + p - 1), min(part(m), p + part(p - 1, v))) if m % p == 0 else None,
        "round-robin": (part(p - 1, v * m + p - 1), part(m)) if m >= p else None,
        "zero-bubble": (part(p - 1, 3 * m + p - 1), part(p)) if m >= p else None,
        "zbv": (part(p - 1, 6 * m + p - 1), part(p)) if m >= 2 * p - 1 else None,
        "dualpipe-v": (part(p - 1, 6 * m + p - 1), p + part(1, 2)) if m >= 2 * p and p > 1 else None,
    }


@pytest.mark.parametrize(("pp", "microbatches", "virtual"), [*product([1, 2, 3, 4, 8], [1, 2, 4, 8, 16, 24], [2, 3])])
def test_formulas_of_the_documentation(pp, microbatches, virtual, schedule):
    words = f"--compare --pp {pp} --microbatches {microbatches} --virtual-stages {virtual} --json"
    for entry in json.loads(schedule(words))["schedules"]:
        expected = formulas(pp, microbatches, virtual)[entry["schedule"]]
        if expected is not None:
            bubble, peak = expected
            assert entry["bubble_ratio"] == pytest.approx(float(bubble)), entry
            assert entry["peak_activations"] == pytest.approx(float(peak)), entry
            assert entry["makespan"] == pytest.approx(3 * microbatches / float(1 - bubble)), entry


@pytest.mark.parametrize("page", ["docs/schedules.md"])
def test_examples_of_the_documentation_are_real(page, schedule):
    examples = re.findall(r"```\n\$ parallel3d schedule ([^\n]+)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert examples
    for words, output in examples:
        assert schedule(words) == output


# Refusals

REFUSALS = [
    ("--microbatches 8", "the number of pipeline ranks is missing. Give it, such as --pp 4."),
    ("--pp 4", "the number of microbatches is missing. Give it, such as --microbatches 8."),
    ("--compare --pp 4", "the number of microbatches is missing. Give it, such as --microbatches 8."),
    ("--pp 4 --microbatches 0", "1f1b: 0 microbatches. Use 1 or more."),
    (
        "--schedule interleaved --virtual-stages 2 --pp 4 --microbatches 6",
        "interleaved: 6 microbatches are no multiple of 4 ranks. Use 4 or 8.",
    ),
    (
        "--schedule interleaved --pp 4 --microbatches 8",
        "interleaved has 2 or more stages a rank. Use 2, or 1f1b for 1.",
    ),
    ("--schedule csv:no.csv", "no.csv cannot be read: No such file or directory. Give the path of a CSV file."),
    (
        "--pp 100000 --microbatches 100000",
        "10000000000 = stages x microbatches, which is more than 1000000. Use fewer.",
    ),
    (
        "--pp 2 --microbatches 2 --forward 1,2,3",
        "--forward has 3 numbers, but there are 2 stages. Give 2, or one for all.",
    ),
    (
        "--pp 2 --microbatches 2 --transfer 1,2",
        "--transfer has 2 numbers, but there is 1 link. Give 1, or one for all.",
    ),
    (
        "--pp 1 --microbatches 2 --transfer 1,2",
        "--transfer has 2 numbers, but one stage alone has no links. Leave it out.",
    ),
    *(
        (
            f"--pp 2 --microbatches 2 --backward {text}",
            f"--backward: {text!r} is no time. Give a number that is not negative, such as 1.5.",
        )
        for text in ("x", "nan", "inf", "-1")
    ),
    (
        "--pp 2 --microbatches 2 --forward 0 --backward 0",
        "--forward 0 --backward 0: nothing takes time. Give one of them a number above 0.",
    ),
    (
        "--pp 2 --microbatches 2 --backward 2,3 --weight-backward 2.5",
        "--weight-backward 2.5 of stage 0 is more than its --backward 2. Give at most 2.",
    ),
    (
        "--compare --pp 2 --microbatches 2 --forward 1,2",
        "--forward 1,2: schedules have different numbers of stages. Give one number for all.",
    ),
    (
        "--compare --pp 2 --microbatches 2 --html a.html",
        "--compare shows all schedules as a table. Leave out --html or --compare.",
    ),
    (
        "--pp 2 --microbatches 2 --svg no/a.svg",
        "--svg no/a.svg can't be written: No such file or directory. Name another file.",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSALS)
def test_what_cannot_be_is_refused_in_one_line(words, message, parallel3d, here):
    assert parallel3d("schedule", *words.split()) == Outcome(2, "", f"parallel3d schedule: {message}\n")
    assert list(here.iterdir()) == []


def test_nothing_is_left_where_a_picture_was_to_be(parallel3d, here):
    assert parallel3d("schedule", "--pp", "0", "--microbatches", "1", "--svg", "a.svg").code == 2
    assert list(here.iterdir()) == []


def test_a_table_that_waits_for_ever_is_drawn(parallel3d):
    Path("my.csv").write_text(STUCK)
    code, stdout, stderr = parallel3d("schedule", "--schedule", "csv:my.csv")
    assert (code, stdout) == (2, "")
    assert "rank 0: 0B0 waits for 1B0 (rank 1), which has not come" in stderr


# A run's pipeline


def test_a_table_is_written_and_drawn_again(schedule):
    first = schedule("--schedule zbv --pp 2 --microbatches 4 --csv mine.csv --json")
    again = json.loads(schedule("--schedule csv:mine.csv --json"))
    assert again == {**json.loads(first), "schedule": "csv:mine.csv"}
    schedule("--schedule 1f1b --pp 2 --microbatches 2 --actions all --csv mine.csv")
    assert "1RECV_F0" in Path("mine.csv").read_text()


def test_a_table_that_cannot_be_written(parallel3d, here):
    code, _, stderr = parallel3d("schedule", "--pp", "2", "--microbatches", "2", "--csv", str(here))
    assert code == 2
    assert stderr.startswith(f"parallel3d schedule: --csv {here} can't be written: ")


def test_simulate(parallel3d):
    assert parallel3d("simulate", str(MESH), "--transfer", "0.5") == Outcome(
        0,
        f"{MESH}: 1f1b: 2 ranks, 4 microbatches: no deadlock\n"
        "makespan          17\n"
        "bubble            29.4 %; by rank: 29.4 29.4\n"
        "peak activations  by stage: 2 1\n"
        "critical path     5 F, 5 B; 4 changes of rank, which take 2\n",
        "",
    )


def test_simulate_shows_the_bubble_of_every_stage_where_a_rank_has_several(parallel3d):
    code, stdout, _ = parallel3d("simulate", str(MESH), "--set", "pipeline.schedule=zbv")
    planned = simulate(build("zbv", 2, 4), Costs(4, 1.0, 1.0, 1.0, transfer=0.0))
    by_rank, by_stage = (
        " ".join(f"{100 * ratio:.1f}" for ratio in ratios)
        for ratios in (planned.rank_bubble_ratios, planned.stage_bubble_ratios)
    )
    assert code == 0
    assert f"; by rank: {by_rank}; by stage: {by_stage}\n" in stdout


def test_simulate_as_json(parallel3d):
    words = ("--set", "pipeline.schedule=gpipe", "--set", "pipeline.microbatches=1", "--json")
    code, stdout, stderr = parallel3d("simulate", str(MESH), *words)
    assert (code, stderr) == (0, "")
    assert json.loads(stdout) == {
        "schedule": "gpipe",
        "stages": 2,
        "microbatches": 1,
        "makespan": 6,
        "bubble_ratio": 0.5,
        "rank_bubble_ratios": [0.5, 0.5],
        "stage_bubble_ratios": [0.5, 0.5],
        "peak_activations": [1, 1],
        "critical_path": [
            {"rank": rank, "action": action, "start": start, "end": end, "reason": reason, "transfer": 0}
            for rank, action, start, end, reason in (
                (0, "0F0", 0, 1, "start"),
                (1, "1F0", 1, 2, "data"),
                (1, "1B0", 2, 4, "rank"),
                (0, "0B0", 4, 6, "data"),
            )
        ],
    }


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_bad_config_is_refused_as_validate_does(words, parallel3d):
    Path("run.yaml").write_text("pipeline: {schedule: interleaved}\ntrian: {}\n")
    outcome = parallel3d("simulate", "run.yaml", *words)
    assert outcome == parallel3d("validate", "run.yaml", *words)
    assert outcome.code == 3


RUN = "model: {args: {layers: 2}}\nparallel: {pp: 2}\npipeline: {schedule: 'csv:my.csv', microbatches: 2}\n"


def test_a_run_that_would_wait_for_ever_is_drawn(parallel3d):
    Path("my.csv").write_text(STUCK)
    Path("run.yaml").write_text(RUN)
    assert parallel3d("simulate", "run.yaml") == Outcome(
        3,
        "",
        """\
run.yaml:3:22  pipeline.schedule = "csv:my.csv": deadlock: these actions wait for each other
  rank 0: 0B0 waits for 1B0 (rank 1), which has not come
  rank 1: 1B0 comes after 1F1 in its column
  rank 1: 1F1 waits for 0F1 (rank 0)
  rank 0: 0F1 comes after 0B0 in its column

  rank 0 |  0F0  [0B0] [0F1]  0B1
  rank 1 |  1F0  [1F1] [1B0]  1B1

One of the actions that come after another has to come before it.
""",
    )
    code, stdout, stderr = parallel3d("simulate", "run.yaml", "--json")
    (error,) = json.loads(stdout)["errors"]
    assert (code, stderr) == (3, "")
    assert (error["file"], error["line"], error["column"]) == ("run.yaml", 3, 22)
    assert (error["path"], error["found"]) == ("pipeline.schedule", '"csv:my.csv"')
    assert error["deadlock"] == [
        {"rank": 0, "action": "0B0", "waits_for": "1B0", "of_rank": 1},
        {"rank": 1, "action": "1F1", "waits_for": "0F1", "of_rank": 0},
    ]


def test_a_table_that_does_not_fit_the_config_is_refused(parallel3d):
    Path("my.csv").write_text("0F0,0B0\n1F0,1B0\n")
    Path("run.yaml").write_text(RUN)
    assert parallel3d("simulate", "run.yaml") == Outcome(
        3,
        "",
        "run.yaml:3:50  pipeline.microbatches = 2: my.csv: 2 microbatches were asked for, but the file has 1.\n"
        "               Set it to 1, or name another table.\n",
    )
    assert parallel3d("simulate", "run.yaml", "--set", "pipeline.microbatches=1").code == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["pipeline.schedule=csv:none.csv"],
            '--set pipeline.schedule  pipeline.schedule = "csv:none.csv": none.csv cannot be read: No such file',
        ),
        (
            ["pipeline.microbatches=1", "parallel.pp=1"],
            "--set parallel.pp  parallel.pp = 1: my.csv: 1 ranks were asked for, but the file has 2.\n",
        ),
        (
            ["pipeline.microbatches=3", "train.batch_size=3"],
            "--set pipeline.microbatches  pipeline.microbatches = 3: my.csv: 3 microbatches were asked for, but",
        ),
        (
            ["pipeline.schedule=gpipe", "pipeline.microbatches=500001", "train.batch_size=500001"],
            "--set pipeline.microbatches  pipeline.microbatches = 500001: 1000002 = stages x microbatches, which is",
        ),
        (
            ["pipeline.schedule=gpipe", "parallel.pp=600000", "model.args.layers=600000"],
            "--set parallel.pp  parallel.pp = 600000: 1200000 = stages x microbatches, which is more than 1000000.",
        ),
    ],
)
def test_what_was_set_is_blamed_and_not_the_file(parallel3d, settings, words):
    Path("my.csv").write_text("0F0,0B0\n1F0,1B0\n")
    Path("run.yaml").write_text(RUN)
    given = [word for setting in settings for word in ("--set", setting)]
    code, stdout, stderr = parallel3d("simulate", "run.yaml", *given)
    assert (code, stdout) == (3, "")
    assert stderr.startswith(words)


def test_a_deadlock_of_a_table_that_was_set(parallel3d):
    Path("stuck.csv").write_text(STUCK)
    Path("run.yaml").write_text(RUN)
    code, stdout, stderr = parallel3d("simulate", "run.yaml", "--set", "pipeline.schedule=csv:stuck.csv")
    assert (code, stdout) == (3, "")
    assert stderr.startswith('--set pipeline.schedule  pipeline.schedule = "csv:stuck.csv": deadlock: ')


@pytest.mark.parametrize("option", ["--pp", "--microbatches", "--virtual-stages"])
def test_a_table_of_another_size_names_the_option(parallel3d, option):
    Path("my.csv").write_text("0F0,0B0\n1F0,1B0\n")
    code, stdout, stderr = parallel3d("schedule", "--schedule", "csv:my.csv", option, "3")
    assert (code, stdout) == (2, "")
    assert stderr.startswith("parallel3d schedule: my.csv: ")
    assert stderr.endswith(f" Leave out {option}: the file says how many.\n")


def test_costs_that_do_not_fit_are_wrong_usage(parallel3d):
    assert parallel3d("simulate", str(MESH), "--forward", "1,2,3") == Outcome(
        2, "", "parallel3d simulate: --forward has 3 numbers, but there are 2 stages. Give 2, or one for all.\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["schedule", "--pp", "2", "--microbatches", "2", "--svg", "a.svg", "--html", "a.html"],
        ["schedule", "--compare", "--pp", "2", "--microbatches", "2"],
        ["simulate", str(MESH)],
    ],
)
def test_torch_is_not_needed(words, here):
    # None in sys.modules makes every import of that name fail.
    script = (
        f"import sys; sys.modules['torch'] = None; sys.path.insert(0, {str(ROOT)!r}); "
        "from parallel3d.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def measured_step(path: Path) -> Path:
    """As planned, in seconds."""
    table = build("1f1b", 2, 3).with_communication()
    planned = simulate(table, Costs(2, 0.01, 0.01, 0.01))
    times = [
        [(start, end, 0.0, 0.0) for start, end in zip(*each, strict=True)]
        for each in zip(planned.starts, planned.ends, strict=True)
    ]
    path.write_text(json.dumps(Measured.of(table, times).to_json()))
    return path


def test_a_measured_step_beneath_its_plan(schedule, here):
    step = measured_step(here / "step.json")
    text = schedule(f"--measured {step} --svg a.svg --html a.html")
    assert text.splitlines()[0] == "step 120.0 ms, planned 120.0 ms"
    assert text.splitlines()[-1] == "nothing came late"
    root = ElementTree.parse(here / "a.svg").getroot()
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert [each for each in texts if each in ("planned", "measured")] == ["planned", "measured"]
    assert texts.count("1F2") == 2, "once in the plan, once as it was"
    assert ElementTree.parse(here / "a.html").getroot().tag == f"{HTML}html"


def test_a_measured_step_as_json(schedule, here):
    step = measured_step(here / "step.json")
    assert json.loads(schedule(f"--measured {step} --json")) == {
        "schedule": "1f1b",
        "stages": 2,
        "microbatches": 3,
        "makespan": {"planned": pytest.approx(0.12), "measured": pytest.approx(0.12)},
        "bubble_ratio": {"planned": pytest.approx(0.25), "measured": pytest.approx(0.25)},
        "rank_bubble_ratios": {"planned": pytest.approx([0.25] * 2), "measured": pytest.approx([0.25] * 2)},
        "stage_bubble_ratios": {"planned": pytest.approx([0.25] * 2), "measured": pytest.approx([0.25] * 2)},
        "first_late": None,
    }


@pytest.mark.parametrize("other", ["--forward 2", "--backward 3", "--weight-backward 1", "--transfer 0.1"])
def test_a_measured_step_has_its_own_times(parallel3d, here, other):
    code, stdout, stderr = parallel3d("schedule", "--measured", str(measured_step(here / "step.json")), *other.split())
    message = f"parallel3d schedule: --measured has times of its own. Leave out {other.split()[0]} or --measured.\n"
    assert (code, stdout, stderr) == (2, "", message)


@pytest.mark.parametrize(
    "other",
    ["--pp 2", "--microbatches 3", "--schedule gpipe", "--compare", "--virtual-stages 2", "--actions all", "--csv a"],
)
def test_a_measured_step_has_its_own_schedule(parallel3d, here, other):
    step = measured_step(here / "step.json")
    code, stdout, stderr = parallel3d("schedule", "--measured", str(step), *other.split())
    option = other if other == "--actions all" else other.split()[0]
    message = f"parallel3d schedule: --measured has a schedule of its own. Leave out {option} or --measured.\n"
    assert (code, stdout, stderr) == (2, "", message)


def test_a_file_that_holds_no_step(parallel3d, here):
    (here / "a.json").write_text("{}")
    code, _, stderr = parallel3d("schedule", "--measured", "a.json")
    assert (code, stderr) == (2, "parallel3d schedule: a.json holds no measured step: 'ranks'\n")
