"""A run's folder for its page: read once, and again while somebody still writes into it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monitoring.analysis.facts import Status
from monitoring.http.page import Feed
from parallel3d.reports.run_reader import read_run
from parallel3d.reports.snapshot import Snapshot
from runtime.errors import InvalidCall

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_SECONDS = 1.0
_MOST_OF_THE_TIME = 0.05
"""That reading may take: the file of a long run is read less often, as its ranks need the cores."""
_FILES = ("events.jsonl", "metrics.json")


class FolderView:
    """The source of a page. Raises InvalidCall where the folder is no run's."""

    def __init__(
        self,
        folder: Path,
        load: Callable[[Path], Snapshot] = lambda folder: read_run(folder).snapshot(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder, self._load, self._clock = folder, load, clock
        self._seen = self._stamps()
        self._run = load(folder)
        self._feed = Feed(self.state)

    @property
    def feed(self) -> Feed:
        return self._feed

    @property
    def is_live(self) -> bool:
        """Its run goes on without a page of its own."""
        return self._run.run.status == Status.RUNNING

    def snapshot(self) -> dict[str, Any]:
        return self._run.to_json()

    def state(self) -> dict[str, Any]:
        """What has no history."""
        return self._run.state_json()

    async def watch(self, seconds: float = _LOOK_SECONDS) -> None:
        """Until the run has ended: whoever looks at it loads what is new."""
        pause = seconds
        while self.is_live:
            await asyncio.sleep(pause)
            began = self._clock()
            await self.refresh()
            pause = max(seconds, (self._clock() - began) / _MOST_OF_THE_TIME)
        self._feed.close()

    async def refresh(self) -> None:
        """Read it again if it has changed, or if its process may be gone."""
        stamps = await asyncio.to_thread(self._stamps)
        try:
            run = await asyncio.to_thread(self._load, self._folder)
        except InvalidCall:  # it is being removed
            return
        if stamps != self._seen or run.run != self._run.run:
            self._seen, self._run = stamps, run
            self._feed.put("reset", {})
            self._feed.changed()

    def _stamps(self) -> list[tuple[int, int] | None]:
        return [_stamp(self._folder / name) for name in _FILES]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
