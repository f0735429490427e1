"""The page in a browser, of a run that never was: each number, each way to look at it, and what goes wrong."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, expect

from monitoring.events.time_parts import MEANINGS, PARTS
from monitoring.http.page.feed import Pace
from tests.ui.pages import PageServer
from tests.ui.synthetic_run import SyntheticRun, some_bottlenecks

QUICK = Pace(messages=0.01, state=0.05, heartbeat=1.0)


@pytest.fixture
def run():
    run = SyntheticRun(pace=QUICK)
    run.advance(60)
    return run


@pytest.fixture
def server(run):
    with PageServer(run) as server:
        yield server
        if run.is_live:
            server.do(run.end)


def drawn(page: Page, step: int) -> None:
    """Waits until all up to this step are drawn. The page's own rules let no text be run, so nothing else would do."""
    expect(page.locator("body")).to_have_attribute("data-drawn-step", str(step), timeout=30_000)


def value(page: Page, name: str) -> float:
    found = page.locator(f"#number-{name}").get_attribute("data-value")
    assert found is not None
    return float(found)


def shown(page: Page, selector: str) -> str:
    return page.locator(selector).inner_text()


class TestNumbers:
    def test_key_numbers_are_the_runs(self, run, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        totals = run.totals()
        assert value(page, "steps") == 60
        assert value(page, "loss") == totals["final_loss"]
        assert value(page, "tokens_per_second") == pytest.approx(totals["tokens_per_second"], rel=1e-12)
        assert value(page, "step_seconds") == pytest.approx(totals["step_seconds"], rel=1e-12)
        assert shown(page, "#number-loss").strip() == f"{totals['final_loss']:.4f}"
        assert shown(page, "#number-step_seconds").split() == [f"{1e3 * totals['step_seconds']:.1f}", "ms"]
        assert value(page, "memory") == sum(rank["memory_bytes"] for rank in run.ranks())
        assert shown(page, "#run-id") == run.run_id
        assert "gpt 12.7M parameters" in shown(page, "#facts")
        assert page.title() == f"step 60/600 · loss {totals['final_loss']:.3f} · {run.run_id}"

    def test_parts_are_told_with_their_meanings(self, run, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        rows = page.locator("#parts tbody tr").all()
        assert len(rows) == len(PARTS) + 1
        latest = run.steps[-20:]
        for row, part in zip(rows, PARTS, strict=False):
            name, meaning, now, _, _, _ = row.locator("td").all_inner_texts()
            share = sum(step["parts"][part] for step in latest) / sum(sum(step["parts"].values()) for step in latest)
            assert (name, meaning) == (part, MEANINGS[part])
            assert now == f"{100 * share:.1f} %"
        assert rows[-1].locator("td").all_inner_texts()[4] == "0.4 %"

    def test_a_step_that_is_pointed_at_is_read_out_everywhere(self, run, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        box = page.locator("#loss svg").bounding_box()
        page.mouse.move(box["x"] + 46 + (box["width"] - 56) * 20.5 / 60, box["y"] + 60)
        step = run.steps[20]
        assert shown(page, "#loss-value") == f"step 20 {step['loss']:.4f}"
        assert shown(page, "#throughput-value") == f"step 20 {step['tokens'] / step['seconds']:,.0f}"
        assert shown(page, "#parts-now") == "step 20"
        share = step["parts"]["bubble"] / sum(step["parts"].values())
        assert shown(page, '#parts [data-part="bubble"]') == f"{100 * share:.1f} %"
        assert page.locator(".cursor line").count() == 3
        page.mouse.move(2, 2)
        assert shown(page, "#parts-now") == "last 20"

    def test_the_mesh_shows_scores_and_one_ranks_details(self, run, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        cells = page.locator("#mesh button")
        assert cells.count() == 16
        for rank in run.ranks():
            cell = page.locator(f'#mesh [data-rank="{rank["rank"]}"]')
            assert cell.inner_text().split() == [str(rank["rank"]), f"{rank['straggler_score']:.2f}"]
        assert page.locator("#mesh .straggler").all_inner_texts() == ["5\n0.52"]
        assert shown(page, "#rank h3") == "rank 5 (dp=0 tp=1 pp=1)"  # the slowest, until another one is asked for
        page.locator('#mesh [data-rank="14"]').hover()
        assert shown(page, "#rank h3") == "rank 14 (dp=1 tp=1 pp=2)"
        assert "454 MiB" not in shown(page, "#rank")
        page.mouse.move(2, 2)
        assert shown(page, "#rank h3").startswith("rank 5 ")

    def test_the_pipeline_is_planned_above_and_measured_below(self, run, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        pipeline = run.state()["pipeline"]
        facts = page.locator("#pipeline .row-fact").all_text_contents()
        for row, fact in zip(("planned", "measured"), facts, strict=True):
            end = max(span["end"] for lane in pipeline[row] for span in lane)
            assert fact == f"{1e3 * end:.1f} ms, bubble {100 * pipeline['bubble_ratio'][row]:.1f} %"
        names = page.locator("#pipeline .box-name").all_text_contents()
        told = [span["action"] for row in ("planned", "measured") for lane in pipeline[row] for span in lane]
        assert names == told
        assert pipeline["first_late"] in shown(page, "#pipeline-note")
        page.locator("#pipeline .box-name").first.scroll_into_view_if_needed()
        box = page.locator("#pipeline .box-name").first.bounding_box()
        page.mouse.move(box["x"] + 3, box["y"] + 5)
        assert shown(page, "#pipeline-note").startswith("0F0 stage 0, forward, microbatch 0, pp 0: planned")
        assert page.locator("#pipeline .chosen").count() == 2

    def test_one_stage_has_no_pipeline(self, open_page):
        run = SyntheticRun(dp=2, tp=1, pp=1, slow_rank=None, pace=QUICK)
        run.advance(5)
        with PageServer(run) as server:
            page = open_page(server.url)
            drawn(page, 4)
            expect(page.locator("#pipeline-panel")).to_be_hidden()
            server.do(run.end)


class TestBottlenecks:
    def test_cards_in_order_of_severity_with_evidence_and_gain(self, run, server, open_page):
        server.do(run.find, list(reversed(some_bottlenecks())))
        page = open_page(server.url)
        drawn(page, 59)
        cards = page.locator(".card")
        assert [card.get_attribute("data-kind") for card in cards.all()] == [
            "straggler",
            "too_few_microbatches",
            "small_buckets",
        ]
        text = cards.nth(1).inner_text()
        for part in ("high", "axis pp", "8 microbatches for 4 stages", "bubble share 14.8 %", "about 12 % of a step"):
            assert part in text
        assert "Would save" not in cards.nth(0).inner_text()

    def test_the_remedy_is_copied_as_yaml(self, run, server, open_page):
        server.do(run.find, some_bottlenecks())
        page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
        drawn(page, 59)
        page.get_by_role("button", name="copy the YAML of too few microbatches").click()
        page.get_by_text("copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "pipeline:\n  microbatches: 16"

    def test_they_come_and_go(self, run, server, open_page):
        page = open_page(server.url)
        page.get_by_text("None found").wait_for()
        server.do(run.find, some_bottlenecks()[1:])
        expect(page.locator(".card")).to_have_count(2)
        server.do(run.find, [])
        page.get_by_text("None found").wait_for()


class TestStream:
    def test_steps_and_lines_come_while_it_is_open(self, run, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        server.do(run.advance, 5)
        server.do(run.say, "another line", rank=3, step=64)
        drawn(page, 64)
        expect(page.locator("#number-steps")).to_have_attribute("data-value", "65")  # the state follows its steps
        assert value(page, "loss") == run.steps[-1]["loss"]
        expect(page.locator("#log")).to_contain_text("another line")
        assert shown(page, "#connection") == "live"

    def test_a_reload_shows_all_and_goes_on(self, run, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        server.do(run.advance, 5)
        page.reload()
        drawn(page, 64)
        server.do(run.advance, 5)
        drawn(page, 69)
        expect(page.locator("#number-steps")).to_have_attribute("data-value", "70")
        assert [step["step"] for step in run.steps] == list(range(70))

    def test_a_lost_connection_goes_on_without_a_gap(self, run, open_page):
        with PageServer(run) as first:
            port = first.endpoint.port
            page = open_page(first.url)
            drawn(page, 59)
            asked = []
            page.on("request", lambda request: asked.append((request.url, request.headers)))
        run.advance(3)  # while nobody serves it
        page.locator("#connection.lost").wait_for()
        with PageServer(run, port) as second:
            drawn(page, 62)
            assert shown(page, "#connection") == "live"
            streams = [(url, headers) for url, headers in asked if "/api/stream" in url]
            assert streams
            assert not [url for url, _ in asked if url.endswith("/api/run")]  # the feed knew where it was
            second.do(run.end)

    def test_another_servers_feed_is_loaded_anew(self, run, open_page):
        with PageServer(run) as first:
            port = first.endpoint.port
            page = open_page(first.url)
            drawn(page, 59)
        other = SyntheticRun(pace=QUICK, seed=8)
        other.advance(10)
        with PageServer(other, port) as second:
            drawn(page, 9)
            assert value(page, "loss") == other.steps[-1]["loss"]
            second.do(other.end)

    def test_a_line_that_comes_with_what_is_loaded_anew_is_shown_once(self, open_page):
        run = SyntheticRun(pace=Pace(messages=0.5, state=0.5, heartbeat=1.0))
        run.advance(3)

        def load_again() -> None:
            usual = run.snapshot

            def snapshot():
                run.snapshot = usual
                run.say("said while it was loaded")
                return usual()

            run.snapshot = snapshot
            run.feed.put("reset", {})

        with PageServer(run) as server:
            page = open_page(server.url)
            drawn(page, 2)
            server.do(load_again)
            page.get_by_text("said while it was loaded").wait_for()
            server.do(run.say, "the last line")
            page.get_by_text("the last line").wait_for()
            assert page.get_by_text("said while it was loaded").count() == 1
            server.do(run.end)

    def test_what_comes_while_the_page_is_loaded_anew_is_not_lost(self, open_page):
        run, held = SyntheticRun(pace=QUICK), []
        run.advance(3)
        with PageServer(run) as server:
            page = open_page(server.url)
            drawn(page, 2)

            def hold(route) -> None:
                held.append((route, route.fetch()))
                server.do(run.advance, 1)
                server.do(run.say, "said after it was loaded")

            page.route("**/api/run", hold)
            server.do(run.feed.put, "reset", {})
            drawn(page, 3)
            route, answer = held[0]
            with page.expect_response("**/api/run"):
                route.fulfill(response=answer)
            server.do(run.say, "the last line")
            page.get_by_text("the last line").wait_for()
            drawn(page, 3)
            assert page.get_by_text("said after it was loaded").count() == 1
            server.do(run.end)

    def test_the_end_is_shown_though_the_server_closes(self, run, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        server.do(run.advance, 1)
        server.do(run.end, "failed", {"message": "rank 3 (dp=0 tp=1 pp=1) was killed", "traceback": "Traceback…"})
        page.locator("#status.failed").wait_for()
        page.get_by_text("ended", exact=True).wait_for()
        expect(page.locator("#number-steps")).to_have_attribute("data-value", "61")
        assert shown(page, "#error-message") == "rank 3 (dp=0 tp=1 pp=1) was killed"

    def test_before_the_first_step(self, open_page):
        run = SyntheticRun(pace=QUICK)
        with PageServer(run) as server:
            page = open_page(server.url)
            page.get_by_text("waiting for the first step").first.wait_for()
            assert shown(page, "#number-loss").strip() == "\N{EN DASH}"
            server.do(run.advance, 1)
            drawn(page, 0)
            expect(page.locator("#number-steps")).to_have_attribute("data-value", "1")
            server.do(run.end)

    def test_what_is_not_a_number_is_marked(self, run, server, open_page):
        run.steps[30]["loss"] = float("nan")
        page = open_page(server.url)
        drawn(page, 59)
        assert page.locator("#loss .broken").count() == 1
        assert page.locator("#loss .curve").get_attribute("d").count("M") == 2


class TestSafety:
    NASTY = '<img src=x onerror="window.caught=1"><script>window.caught=1</script></script>&amp;\u202e'

    def test_nothing_that_a_run_says_becomes_markup(self, run, server, open_page):
        nasty = self.NASTY
        run.model = run.run_id = run.schedule = nasty
        found = {**some_bottlenecks()[1], "severity": nasty, "message": nasty, "evidence": {nasty: nasty}, "key": nasty}
        found |= {"kind": nasty, "value": nasty, "remedy": nasty, "host": nasty, "axis": nasty}
        server.do(run.find, [found])
        server.do(run.say, nasty, level=nasty, rank=nasty, step=nasty, **{nasty: nasty})
        page = open_page(server.url)
        drawn(page, 59)
        server.do(run.say, nasty, level="error", extra={"deep": nasty})
        server.do(run.end, nasty, {"message": nasty, "traceback": nasty})
        page.get_by_text("ended", exact=True).wait_for()
        assert page.evaluate("window.caught") is None
        assert page.locator("img, script:not([src])").count() == 0
        assert page.locator("#run-id").text_content() == nasty
        assert page.locator("#log").text_content().count("<img src=x") >= 4
        assert page.locator(".card h3").text_content() == nasty.replace("_", " ")

    def test_without_the_token_nothing_is_told(self, server, open_page):
        page = open_page(server.endpoint.url("/"))
        assert "401" in page.locator("body").inner_text()

    def test_the_token_does_not_stay_in_the_address(self, server, open_page):
        assert open_page(server.url).url == server.endpoint.url("/")

    def test_nothing_is_asked_of_another_host(self, server, browser):
        asked = []
        context = browser.new_context()
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        drawn(page, 59)
        context.close()
        assert asked
        assert all(url.startswith((server.endpoint.url(""), "data:")) for url in asked)


class TestKeyboard:
    def test_charts_are_read_step_by_step(self, run, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        page.locator("#loss svg").focus()
        page.keyboard.press("ArrowLeft")
        assert shown(page, "#loss-value").startswith("step 59 ")
        page.keyboard.press("ArrowLeft")
        assert shown(page, "#loss-value").startswith("step 58 ")
        assert f"step 58: {run.steps[58]['loss']:.4f}" == page.locator("#spoken").text_content()
        page.keyboard.press("Home")
        assert shown(page, "#parts-now") == "step 0"
        page.keyboard.press("Escape")
        assert shown(page, "#parts-now") == "last 20"

    def test_the_mesh_is_one_stop_and_arrows_move_in_it(self, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        assert page.locator('#mesh [tabindex="0"]').count() == 1
        page.locator('#mesh [tabindex="0"]').focus()
        for key, rank in (("ArrowRight", 6), ("ArrowDown", 10), ("ArrowUp", 6), ("ArrowUp", 2), ("ArrowLeft", 1)):
            page.keyboard.press(key)
            assert shown(page, "#rank h3").startswith(f"rank {rank} ")

    def test_the_pipeline_is_read_action_by_action(self, server, open_page):
        page = open_page(server.url)
        drawn(page, 59)
        page.locator("#pipeline svg").focus()
        for key, action in (("ArrowRight", "0F0"), ("ArrowRight", "0F1"), ("ArrowDown", "1F0")):
            page.keyboard.press(key)
            assert shown(page, "#pipeline-note").startswith(f"{action} ")

    def test_every_control_has_a_name(self, run, server, open_page):
        server.do(run.find, some_bottlenecks())
        page = open_page(server.url)
        drawn(page, 59)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, select, input, [tabindex="0"]')]
              .filter((node) => !(node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length))
              .map((node) => node.outerHTML)"""
        )
        assert nameless == []


class TestLooks:
    def test_the_theme_is_the_systems_until_another_is_chosen_and_is_kept(self, server, open_page):
        page = open_page(server.url, color_scheme="dark")
        drawn(page, 59)

        def paper() -> str:
            return page.evaluate("getComputedStyle(document.querySelector('.panel')).backgroundColor")

        assert paper() == "rgb(17, 22, 29)"
        page.locator("#theme").select_option("light")
        assert paper() == "rgb(255, 255, 255)"
        page.reload()
        drawn(page, 59)
        assert paper() == "rgb(255, 255, 255)"

    @pytest.mark.parametrize("width", [360, 768, 1024, 1440, 2560])
    def test_nothing_is_wider_than_the_window(self, run, server, open_page, width):
        server.do(run.find, some_bottlenecks())
        page = open_page(server.url, viewport={"width": width, "height": 900})
        drawn(page, 59)
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    def test_the_range_and_the_scale_are_chosen(self, server, run, open_page):
        server.do(run.advance, 100)
        page = open_page(server.url)
        drawn(page, 159)
        page.get_by_role("button", name="last 100").click()
        expect(page.locator("#loss svg")).to_have_attribute("aria-label", re.compile("steps 60 to 159"))
        page.get_by_role("button", name="time", exact=True).click()
        assert any("ms" in tick for tick in page.locator("#stack .axis text").all_text_contents())

    def test_the_log_is_filtered(self, server, run, open_page):
        for line in range(5):
            server.do(run.say, f"line {line}", level="warning" if line == 3 else "info", rank=line)
        page = open_page(server.url)
        expect(page.locator("#log > div")).to_have_count(5)
        page.locator("#log-level").select_option("warning")
        expect(page.locator("#log > div")).to_have_count(1)
        page.locator("#log-level").select_option("debug")
        page.locator("#log-filter").fill("line 4")
        expect(page.locator("#log > div")).to_have_count(1)
        page.locator("#log-filter").fill("nothing such")
        page.get_by_text("no line is like that").wait_for()

    def test_a_large_run_is_drawn(self, open_page):
        run = SyntheticRun(dp=8, tp=8, pp=8, steps=5000, slow_rank=200, pace=QUICK)
        run.advance(2000)
        with PageServer(run) as server:
            page = open_page(server.url)
            drawn(page, 1999)
            assert page.locator("#mesh button").count() == 512
            assert page.locator("#mesh .straggler").get_attribute("data-rank") == "200"
            server.do(run.end)

    def test_a_run_that_no_browser_could_draw_whole_is_shown_all_the_same(self, open_page):
        run = SyntheticRun(pace=QUICK)
        run.advance(3)
        ranks, pipeline = run.ranks(), run.state()["pipeline"]
        spans = [
            {"action": f"0F{number}", "start": number / 1e3, "end": (number + 1) / 1e3} for number in range(200_000)
        ]
        run.ranks = lambda: ranks
        run.mesh = dict.fromkeys(("dp", "tp", "pp"), 1_000_000)
        run._pipeline = {**pipeline, "measured": [spans]}
        with PageServer(run) as server:
            page = open_page(server.url)
            drawn(page, 2)
            page.get_by_text("too many ranks to be drawn").wait_for()
            assert "3 min 20 s" in page.locator('[data-bubble="measured"]').text_content()
            server.do(run.end)


def test_the_snapshot_in_these_tests_has_the_form_of_a_finished_run(tmp_path):
    from tests.support.run_folders import shown, write_run

    ours, theirs = SyntheticRun(), shown(write_run(tmp_path / "run"))
    ours.advance(1)
    told = json.loads(json.dumps(ours.snapshot()))
    assert told.keys() == theirs.keys()
    for key in ("run", "totals"):
        assert told[key].keys() == theirs[key].keys()
    for key in ("steps", "ranks"):
        assert told[key][0].keys() == theirs[key][0].keys()
