"""Real runs in the browser: the numbers on the page are those that the run writes, while it goes on and afterwards."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from monitoring.events.time_parts import PARTS
from tests.support.processes import ROOT, Started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SECONDS = 240.0  # a deadline; on a quiet host these runs take some seconds
MOST_BYTES = 300 << 10  # of a picture in the documentation
CONFIG = """
model: {factory: gpt, args: {layers: 2, width: 32, heads: 2, vocabulary: 256, sequence: 32}}
parallel: {pp: 2}
pipeline: {schedule: 1f1b, microbatches: 4}
train: {steps: 1000000, batch_size: 8}
"""


def run(*arguments: str, cwd: Path) -> Started:
    return Started("-m", "parallel3d", "run", *arguments, cwd=cwd)


def shown_step(page: Page) -> int:
    return int(page.locator("body").get_attribute("data-drawn-step") or -1)


def wait_past(page: Page, step: int) -> None:
    """Until a later step is drawn."""
    expect(page.locator("body")).to_have_attribute("data-drawn-step", re.compile(r"\d"), timeout=1e3 * SECONDS)
    expect(page.locator("body")).not_to_have_attribute(
        "data-drawn-step", re.compile(f"^({'|'.join(map(str, range(-1, step + 1)))})$"), timeout=1e3 * SECONDS
    )


def value(page: Page, name: str) -> float:
    return float(page.locator(f"#number-{name}").get_attribute("data-value") or "nan")


def compare_with_folder(page: Page, folder: Path) -> None:
    """What is on the page, with what is in metrics.json and events.jsonl."""
    metrics = json.loads((folder / "metrics.json").read_text())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    parts = {event["step"]: event["parts"] for event in events if event["kind"] == "parts"}
    expect(page.locator("body")).to_have_attribute("data-drawn-step", str(steps[-1]["step"]))
    assert page.locator("#status").inner_text() == metrics["status"]
    assert page.locator("#run-id").inner_text() == metrics["run_id"]
    assert value(page, "steps") == metrics["steps"] == len(steps)
    assert value(page, "loss") == metrics["final_loss"] == steps[-1]["loss"]
    assert value(page, "tokens_per_second") == pytest.approx(metrics["tokens_per_sec"])
    assert page.locator("#loss-value").inner_text() == f"step {steps[-1]['step']} {_digits(steps[-1]['loss'])}"
    speed = page.locator("#throughput-value").inner_text().removeprefix(f"step {steps[-1]['step']} ")
    assert float(re.sub(r"[^\d.]", "", speed)) == pytest.approx(steps[-1]["tokens"] / steps[-1]["seconds"], rel=0.01)
    _compare_parts(page, metrics, [parts[step] for step in sorted(parts)[-20:]])
    _compare_ranks(page, metrics)
    _compare_words(page, metrics, [event["event"] for event in events if event["kind"] == "log"])


def _digits(loss: float) -> str:
    """Five of them."""
    return f"{loss:.{4 - (loss >= 10)}f}"


def _compare_parts(page: Page, metrics: dict, latest: list[dict[str, float]]) -> None:
    total = sum(sum(each.values()) for each in latest)
    for part in PARTS:
        row = page.locator("#parts tbody tr", has=page.locator(f'[data-part="{part}"]'))
        _, _, now, _, of_run, _ = row.locator("td").all_inner_texts()
        assert now == f"{100 * sum(each[part] for each in latest) / total:.1f} %"
        assert float(of_run.removesuffix(" %")) == pytest.approx(100 * metrics["parts"][part], abs=0.051)


def _compare_words(page: Page, metrics: dict, logged: list[str]) -> None:
    """Of bottlenecks and of the log's tail."""
    cards = [card.locator("p").first.inner_text() for card in page.locator(".card").all()]
    assert sorted(cards) == sorted(each["message"] for each in metrics["bottlenecks"])
    lines = page.locator("#log .text").all_inner_texts()[-20:]
    assert len(lines) == len(logged[-20:])
    assert all(line.startswith(event) for line, event in zip(lines, logged[-20:], strict=True)), (lines, logged)


def _compare_ranks(page: Page, metrics: dict) -> None:
    assert page.locator("#mesh button").count() == metrics["world_size"]
    for rank in metrics["ranks"]:
        cell = page.locator(f'#mesh [data-rank="{rank["rank"]}"]')
        score = rank["straggler_score"]
        assert cell.inner_text().split() == [str(rank["rank"]), f"{score:.2f}" if score is not None else "\N{EN DASH}"]


def test_a_page_that_is_reloaded_while_its_run_goes_on(tmp_path, open_page):
    (tmp_path / "run.yaml").write_text(CONFIG)
    with run("run.yaml", "--run-dir", "folder", cwd=tmp_path) as started:
        address = started.stderr.wait_for(r"^page: (\S+)$", SECONDS)[1]
        page = open_page(address)
        wait_past(page, 2)
        before = shown_step(page)
        page.reload()
        wait_past(page, before)
        expect(page.locator("#connection")).to_have_text("live")
        with Started("-m", "parallel3d", "view", "folder", cwd=tmp_path) as view:
            assert view.finish(SECONDS) == 0
            assert view.stdout.text == f"{address}\n"  # the run's own page, while there is one
        started.send(signal.SIGINT)
        assert started.finish(SECONDS) == 130, started.stderr.text
        expect(page.locator("#connection")).to_have_text("ended")
        compare_with_folder(page, tmp_path / "folder")
        assert page.locator("#pipeline .row-fact").count() == 2


@pytest.mark.exhaustive
def test_a_finished_run_and_its_report(tmp_path, open_page, pictures):
    config = str(ROOT / "configs" / "mesh-2x2x2.yaml")
    with run(config, "--run-dir", "folder", "--set", "train.steps=40", cwd=tmp_path) as started:
        assert started.finish(SECONDS) == 0, started.stderr.text
    with Started("-m", "parallel3d", "view", "folder", cwd=tmp_path) as view:
        page = open_page(view.stdout.wait_for(r"^(\S+)$", SECONDS)[1])
        expect(page.locator("#connection")).to_have_text("finished run")
        compare_with_folder(page, tmp_path / "folder")
        metrics = json.loads((tmp_path / "folder" / "metrics.json").read_text())
        kinds = [card.get_attribute("data-kind") for card in page.locator(".card").all()]
        assert sorted(kinds) == sorted(each["kind"] for each in metrics["bottlenecks"])
        page.screenshot(path=pictures / "page.png", full_page=True)
        view.send(signal.SIGTERM)
        assert view.finish(SECONDS) == 0
    report = open_page((tmp_path / "folder" / "report.html").as_uri(), viewport={"width": 1200, "height": 1500})
    report.screenshot(path=pictures / "report.png")
    for name in ("page.png", "report.png"):
        assert 20_000 < (pictures / name).stat().st_size <= MOST_BYTES
