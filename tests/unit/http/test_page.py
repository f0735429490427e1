"""The page without a browser: what its feed tells whom, what its routes answer, and what its files hold."""

from __future__ import annotations

import asyncio
import json
import math
import re
from contextlib import aclosing
from importlib.resources import files

import pytest
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application

from monitoring.events.time_parts import MEANINGS
from monitoring.http.page import Feed, page_routes
from monitoring.http.page.feed import Pace
from monitoring.http.page.plain_json import to_text
from parallel3d.pipeline.schedules.actions import Kind
from parallel3d.reports.drawing.palette import LETTERS, THEMES, shade
from parallel3d.reports.html import COLOURS
from tests.ui.synthetic_run import SyntheticRun, some_bottlenecks

AT_ONCE = Pace(messages=0.0, state=0.0, heartbeat=60.0)
STATIC = files("monitoring.http.page") / "static"


def events(text: str) -> list[dict[str, str]]:
    """A stream as a browser takes it apart."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith((":", "retry"))]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


async def all_of(feed: Feed, last_id: str) -> list[dict[str, str]]:
    return events("".join([block async for block in feed.blocks(last_id)]))


class TestFeed:
    async def test_tells_what_came_since_and_the_state_and_the_end(self):
        feed = Feed(lambda: {"steps": 2}, pace=AT_ONCE)
        before = feed.last_id
        feed.put("step", {"step": 0})
        middle = feed.last_id
        feed.put("log", {"event": "two\nlines"})
        feed.close()
        told = await all_of(feed, before)
        assert [each["event"] for each in told] == ["step", "log", "state", "end"]
        assert json.loads(told[1]["data"]) == {"event": "two\nlines"}
        assert json.loads(told[2]["data"]) == {"steps": 2}
        assert [each["event"] for each in await all_of(feed, middle)] == ["log", "state", "end"]
        assert told[0]["id"] == middle
        assert told[1]["id"] == feed.last_id

    async def test_the_last_state_is_the_last(self):
        state = {"status": "running"}
        feed = Feed(lambda: state, pace=Pace(0.0, 60.0, 60.0))
        async with aclosing(feed.blocks(feed.last_id)) as blocks:
            await anext(blocks)  # when to try again
            assert '"running"' in await anext(blocks)
            state["status"] = "completed"
            feed.close()
            last = events(await anext(blocks))
        assert [each["event"] for each in last] == ["state", "end"]
        assert json.loads(last[0]["data"]) == {"status": "completed"}

    @pytest.mark.parametrize(
        "last_id", ["", "nonsense", "other-3", "-1", "{name}-9", "{name}-x", "{name}-²", "{name}-"]
    )
    async def test_a_place_that_is_not_its_own_begins_anew(self, last_id):
        feed = Feed(dict, pace=AT_ONCE)
        feed.put("step", {"step": 0})
        feed.close()
        name = feed.last_id.partition("-")[0]
        told = await all_of(feed, last_id.replace("{name}", name))
        assert [each["event"] for each in told] == ["reset", "state", "end"]
        assert told[0]["id"] == feed.last_id

    async def test_forgets_the_oldest_and_says_so_to_those_who_missed_them(self):
        feed = Feed(dict, capacity=3, pace=AT_ONCE)
        ids = [feed.last_id]
        for step in range(5):
            feed.put("step", {"step": step})
            ids.append(feed.last_id)
        feed.close()
        assert [each["event"] for each in await all_of(feed, ids[1])] == ["reset", "state", "end"]
        kept = await all_of(feed, ids[2])
        assert [json.loads(each["data"])["step"] for each in kept[:3]] == [2, 3, 4]

    async def test_a_reader_that_is_slow_is_told_to_begin_anew(self):
        feed = Feed(dict, capacity=2, pace=AT_ONCE)
        async with aclosing(feed.blocks(feed.last_id)) as blocks:
            await anext(blocks)
            await anext(blocks)  # the state
            for step in range(3):
                feed.put("step", {"step": step})
            assert events(await anext(blocks))[0]["event"] == "reset"

    async def test_long_lines_are_forgotten_sooner(self):
        feed = Feed(dict, most_letters=1000, pace=AT_ONCE)
        ids = [feed.last_id]
        for number in range(20):
            feed.put("log", {"event": "x" * 80, "number": number})
            ids.append(feed.last_id)
        feed.put("log", {"event": "x" * 2000})  # which nobody has room for
        ids.append(feed.last_id)
        feed.put("log", {"event": "short"})
        feed.close()
        assert [each["event"] for each in await all_of(feed, ids[20])] == ["reset", "state", "end"]
        assert [each["event"] for each in await all_of(feed, ids[21])] == ["log", "state", "end"]

    async def test_the_state_is_made_once_for_all_and_not_more_often_than_it_is_shown(self):
        made = []
        feed = Feed(lambda: made.append(1) or {}, pace=Pace(0.0, 60.0, 60.0))
        async with aclosing(feed.blocks(feed.last_id)) as one, aclosing(feed.blocks(feed.last_id)) as other:
            for blocks in (one, other):
                await anext(blocks)
                assert "event: state" in await anext(blocks)
            for step in range(100):
                feed.changed()
                feed.put("step", {"step": step})
            assert len(events(await anext(one))) == 100
            assert feed.num_readers == 2
        assert len(made) == 1
        assert feed.num_readers == 0

    async def test_a_reader_who_waits_hears_news_at_once_and_a_sign_of_life(self):
        feed = Feed(dict, pace=Pace(0.0, 0.0, 0.01))
        async with aclosing(feed.blocks(feed.last_id)) as blocks:
            await anext(blocks)
            await anext(blocks)
            assert (await anext(blocks)).startswith(":")
            waiting = asyncio.ensure_future(anext(blocks))
            feed.put("step", {"step": 0})
            while not (told := await waiting).startswith("event: step"):
                waiting = asyncio.ensure_future(anext(blocks))
            assert events(told)[0]["event"] == "step"


def test_json_that_browsers_read():
    document = {"loss": math.nan, "rows": [(math.inf, 1.5)], 3: None, "text": "</script>\u2028", "odd": {1}}
    text = to_text(document)
    assert json.loads(text) == {"loss": None, "rows": [[None, 1.5]], "3": None, "text": "</script>\u2028", "odd": "{1}"}
    assert "\u2028" not in text


@pytest.fixture
async def client():
    run = SyntheticRun(pace=AT_ONCE)
    run.advance(4)
    run.find(some_bottlenecks())
    app = Application()
    app.add_routes(page_routes(run))
    async with TestClient(TestServer(app)) as client:
        client.run = run
        yield client


class TestRoutes:
    async def test_files_have_their_types_and_nothing_from_elsewhere_runs(self, client):
        kinds = {"/": "text/html", "/static/page.css": "text/css", "/static/page.js": "text/javascript"}
        for path, kind in kinds.items():
            answer = await client.get(path)
            assert (answer.status, answer.content_type, answer.charset) == (200, kind, "utf-8")
            rules = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in rules
            assert "unsafe" not in rules

    @pytest.mark.parametrize("name", ["none.js", "..%2froutes.py", "%2e%2e/feed.py", "..%2f..%2fevents.py", "page.py"])
    async def test_no_path_leads_out_of_the_folder(self, client, name):
        assert (await client.get(f"/static/{name}")).status == 404

    async def test_the_run_is_told_with_the_place_where_the_stream_goes_on(self, client):
        told = await (await client.get("/api/run")).json()
        assert told["steps"] == client.run.steps
        assert told["parts"] == MEANINGS
        assert (told["live"], told["last_id"]) == (True, client.run.feed.last_id)

    async def test_the_stream_goes_on_after_what_the_browser_has_seen(self, client):
        first = client.run.feed.last_id
        client.run.advance(2)
        second = client.run.feed.last_id
        client.run.advance(1)
        client.run.end()
        by_address = await (await client.get("/api/stream", params={"after": first})).text()
        again = await (await client.get(f"/api/stream?after={first}", headers={"Last-Event-ID": second})).text()
        numbers = [
            [json.loads(e["data"])["step"] for e in events(text) if e["event"] == "step"]
            for text in (by_address, again)
        ]
        assert numbers == [[4, 5, 6], [6]]
        assert events(again)[-1]["event"] == "end"

    async def test_nobody_gets_a_stream_who_asks_for_headers_alone(self, client):
        assert (await client.head("/api/run")).status == 200
        assert (await client.head("/api/stream")).status == 405
        assert client.run.feed.num_readers == 0

    async def test_readers_are_bounded_and_one_that_goes_makes_room(self, client, monkeypatch):
        monkeypatch.setattr("monitoring.http.page.routes._MOST_READERS", 1)
        stream = await client.get("/api/stream")
        await stream.content.readline()
        assert (await client.get("/api/stream")).status == 503
        client.run.end()
        await stream.read()
        assert (await client.get("/api/stream")).status == 200


class TestFiles:
    def test_colours_are_those_of_pictures_and_reports(self):
        rules = (STATIC / "page.css").read_text()
        light, dark = rules[: rules.index("@media")], rules[rules.index(':root[data-theme="dark"]') :]
        for theme, text in (("light", light), ("dark", dark)):
            for role, colour in THEMES[theme].items():
                assert f"--{role}: {colour};" in text
        for part, colour in COLOURS.items():
            assert f"--part-{part}: {colour};" in light
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            assert f"--kind-{kind}: {shade(kind, 0, 1)};" in light
        assert f"--letters: {LETTERS};" in light

    def test_both_ways_to_the_dark_theme_are_the_same(self):
        rules = (STATIC / "page.css").read_text()
        blocks = re.findall(
            r':root(?::not\(\[data-theme="light"\]\)|\[data-theme="dark"\]) \{(.*?)\}', rules, re.DOTALL
        )
        assert len(blocks) == 2
        assert blocks[0].split() == blocks[1].split()

    @pytest.mark.parametrize("name", sorted(each.name for each in STATIC.iterdir()))
    def test_nothing_makes_markup_of_text_or_asks_another_host(self, name):
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not re.search(r"https?:|//cdn|@import|url\(", text)

    def test_all_scripts_that_are_asked_for_are_there(self):
        names = {each.name for each in STATIC.iterdir()}
        for name in names:
            asked = re.findall(r'(?:from "\./|static/)([\w.]+)"', (STATIC / name).read_text())
            assert set(asked) <= names
