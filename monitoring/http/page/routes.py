"""The page's routes: the page itself, its static files, the run as JSON, and a stream of changes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, suppress
from importlib.resources import files
from typing import Any, Protocol

from aiohttp import web

from monitoring.events.time_parts import MEANINGS
from monitoring.http.page.feed import Feed
from monitoring.http.page.plain_json import to_text

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
}
"""Fixed, because a system's MIME table may give scripts a type that browsers refuse."""
_MOST_READERS = 64
"""Each browser tab is one reader."""
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # No content from other hosts, and no script injected through a log line.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


class Source(Protocol):
    """The run that the page shows. Its methods are called in the server's event loop, so they must not block."""

    @property
    def feed(self) -> Feed: ...

    @property
    def is_live(self) -> bool:
        """Whether the run may still change."""

    def snapshot(self) -> Mapping[str, Any]:
        """The whole run: run, totals, steps, ranks, bottlenecks, pipeline, log."""


def page_routes(source: Source) -> list[web.RouteDef]:
    """`GET /`, `/static/*`, `/api/run` and `/api/stream`. The server must check the token, and close the source's feed
    before it stops."""
    page = _Page(source)
    return [
        web.get("/", page.index),
        web.get("/static/{name}", page.static),
        web.get("/api/run", page.run),
        web.get("/api/stream", page.stream, allow_head=False),  # a HEAD request would run the endless stream
    ]


class _Page:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._files = _read_files()

    async def index(self, request: web.Request) -> web.Response:
        return self._file("index.html")

    async def static(self, request: web.Request) -> web.Response:
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.Response:
        if name not in self._files:  # only files read at start, so no path leads out of the folder
            raise web.HTTPNotFound(text=f"there is no {name!r}")
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(text=self._files[name], content_type=kind, charset="utf-8", headers=_HEADERS)

    async def run(self, request: web.Request) -> web.Response:
        """The snapshot, and the id of the last message it includes."""
        source = self._source
        document = {**source.snapshot(), "parts": MEANINGS, "live": source.is_live, "last_id": source.feed.last_id}
        return web.Response(text=to_text(document), content_type="application/json", headers=_HEADERS)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        feed = self._source.feed
        if feed.num_readers >= _MOST_READERS:
            raise web.HTTPServiceUnavailable(text=f"{_MOST_READERS} browsers read already. Close one.")
        # A browser that reconnects sends the header; on the first connection, the page sends `after`.
        last_id = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        with suppress(ConnectionError):  # the tab was closed
            async with aclosing(feed.blocks(last_id)) as blocks:
                async for block in blocks:
                    await response.write(block.encode())
        return response


def _read_files() -> dict[str, str]:
    folder = files("monitoring.http.page") / "static"
    return {
        each.name: each.read_text(encoding="utf-8")
        for each in folder.iterdir()
        if each.name.rpartition(".")[2] in _TYPES
    }
