"""A thread that answers on an endpoint, from the moment it is made until it is closed."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from monitoring.http.endpoint import Endpoint
from monitoring.http.loop_thread import BackgroundLoop

if TYPE_CHECKING:
    from aiohttp import web

CLOSE_SECONDS = 5.0

MakeApp = Callable[[], "web.Application"]


class Service:
    """Also without an endpoint it has its thread, for those who need only that."""

    def __init__(
        self, name: str, endpoint: Endpoint | None, make_app: MakeApp, before_end: Callable[[], None] | None = None
    ) -> None:
        """make_app: called in the thread, before all else there, so that nobody waits for its imports. before_end:
        called there too, so that those who are told of something without end hear the last of it."""
        self.endpoint, self.background = endpoint, BackgroundLoop(name)
        self._before_end = before_end
        self._serving: Future[web.AppRunner | None] | None = None
        if endpoint is not None:
            self._serving = self.background.run(self._serve(make_app, endpoint))

    async def _serve(self, make_app: MakeApp, endpoint: Endpoint) -> web.AppRunner | None:
        try:
            from monitoring.http.server import serve  # aiohttp takes a third of a second

            return await serve(make_app(), endpoint)
        except Exception:
            complain()
            return None

    async def close(self) -> None:
        """Answer nobody any more, and end the thread."""
        await asyncio.shield(asyncio.to_thread(self.close_now))

    def close_now(self) -> None:
        """The same, for those without an event loop; waits some seconds at most."""
        try:
            self.background.run(self._stop_serving()).result(CLOSE_SECONDS)
        except Exception:
            complain()
        if self.endpoint is not None:
            self.endpoint.close()
        self.background.stop(CLOSE_SECONDS)

    async def _stop_serving(self) -> None:
        runner = await asyncio.wrap_future(self._serving) if self._serving is not None else None
        if self._before_end is not None:
            self._before_end()
        if runner is not None:
            await runner.cleanup()


def complain() -> None:
    """A bug of ours, or a system that lacks something; a run shall not end for it."""
    print("parallel3d: watching the run failed; the run itself goes on.", file=sys.stderr)
    traceback.print_exc()
