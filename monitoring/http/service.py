"""A thread that serves an HTTP application on an endpoint, from construction until it is closed."""

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
    """Without an endpoint it serves nothing, but still runs its background loop."""

    def __init__(
        self, name: str, endpoint: Endpoint | None, make_app: MakeApp, before_end: Callable[[], None] | None = None
    ) -> None:
        """make_app: called first in the thread, so that no other thread waits for its imports. before_end: called in
        the thread before the server stops, so that open streams get their last message."""
        self.endpoint, self.background = endpoint, BackgroundLoop(name)
        self._before_end = before_end
        self._serving: Future[web.AppRunner | None] | None = None
        if endpoint is not None:
            self._serving = self.background.run(self._serve(make_app, endpoint))

    async def _serve(self, make_app: MakeApp, endpoint: Endpoint) -> web.AppRunner | None:
        try:
            from monitoring.http.server import serve  # importing aiohttp takes a third of a second

            return await serve(make_app(), endpoint)
        except Exception:
            complain()
            return None

    async def close(self) -> None:
        """Stop serving, and end the thread."""
        await asyncio.shield(asyncio.to_thread(self.close_now))

    def close_now(self) -> None:
        """Like `close`, for callers without an event loop; blocks for a few seconds at most."""
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
    """Print the current exception: an error in monitoring must not end the run."""
    print("parallel3d: watching the run failed; the run itself goes on.", file=sys.stderr)
    traceback.print_exc()
