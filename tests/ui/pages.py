"""A page that is served while a test looks at it in a browser."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from monitoring.http.endpoint import Endpoint
from monitoring.http.guard import Guard
from monitoring.http.loop_thread import BackgroundLoop
from monitoring.http.page import page_routes
from monitoring.http.server import serve
from tests.ui.synthetic_run import SyntheticRun

_SECONDS = 30.0


class PageServer:
    """Serves a run as a monitor thread does: in a thread of its own, behind the token."""

    def __init__(self, run: SyntheticRun, port: int | None = None) -> None:
        self.run = run
        self._port = port

    def __enter__(self) -> Self:
        self._background = BackgroundLoop("test-page")
        self.endpoint = Endpoint.open("127.0.0.1", self._port, token="a-token-of-16-characters")
        self._runner = self._background.run(self._begin()).result(_SECONDS)
        return self

    async def _begin(self) -> web.AppRunner:
        app = web.Application()
        Guard(self.endpoint).install(app)
        app.add_routes(page_routes(self.run))
        return await serve(app, self.endpoint)

    @property
    def url(self) -> str:
        return self.endpoint.url("/", with_token=True)

    def do(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """In the server's thread, whose the run is."""

        async def call() -> Any:
            return function(*args, **options)

        return self._background.run(call()).result(_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cleaned: Future[None] = self._background.run(self._runner.cleanup())
        cleaned.result(_SECONDS)
        self.endpoint.close()
        self._background.stop(_SECONDS)
