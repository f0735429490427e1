"""The HTTP application of a run's endpoint: /metrics, /sd, /healthz and further routes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from monitoring.http.endpoint import Endpoint
from monitoring.http.guard import Guard, Handler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RENDER_SECONDS = 1.0
"""Shortest time between two renderings, however many clients scrape. One takes some milliseconds, which slow down the
ranks on a fully used host."""
_SHUTDOWN_SECONDS = 1.0

Targets = Callable[[], Sequence[dict[str, Any]]]
"""Returns targets in the format of Prometheus' HTTP service discovery."""


class Exposition:
    """A collector's metrics as text, rendered at most once every RENDER_SECONDS."""

    def __init__(self, collector: Collector, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._clock = clock
        self._text, self._made = b"", float("-inf")

    def text(self) -> bytes:
        now = self._clock()
        if now - self._made >= RENDER_SECONDS:
            self._text, self._made = generate_latest(self._registry), now
        return self._text


def make_app(
    endpoint: Endpoint,
    collector: Collector,
    routes: Iterable[web.RouteDef] = (),
    targets: Targets | None = None,
) -> web.Application:
    """The application with its guard installed. targets: the ranks' endpoints for /sd; None: there is no /sd."""
    app, exposition = web.Application(), Exposition(collector)
    Guard(endpoint).install(app)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=exposition.text(), headers={"Content-Type": CONTENT_TYPE})

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", health), *routes])
    if targets is not None:
        app.router.add_get("/sd", _discovery(targets))
    return app


def _discovery(targets: Targets) -> Handler:
    async def discovery(_: web.Request) -> web.Response:
        return web.json_response(targets())

    return discovery


async def serve(app: web.Application, endpoint: Endpoint) -> web.AppRunner:
    """Serve on the endpoint's socket until the returned runner is cleaned up."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    await web.SockSite(runner, endpoint.listener, ssl_context=endpoint.tls).start()
    return runner
