"""A run's monitor as its owner has it: fed with what ranks tell, asked once they have ended, then closed."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from monitoring.analysis.facts import RunFacts
from monitoring.assemble import open_monitor
from monitoring.events.trace import Span
from monitoring.http.endpoint import Endpoint
from monitoring.http.service import complain
from monitoring.messages import Message, Ready
from parallel3d import __version__
from parallel3d.config import RunConfig
from parallel3d.planning.preflight import ModelFacts
from parallel3d.planning.what_if import PipelinePlanner
from parallel3d.runs.endpoint import endpoints
from parallel3d.runs.folder import RunFolder
from parallel3d.runs.record import RunRecord
from parallel3d.runs.run_log import RunLog

if TYPE_CHECKING:
    from aiohttp import web

    from monitoring.live.monitor_thread import MonitorThread
    from monitoring.live.observer import Observer

SETTLE_SECONDS = 10.0
"""For what ranks have told last; what a busy host has not got through by then is left out of the folder."""


class RunWatch:
    """Made once the folder is there; the endpoint is closed with it."""

    def __init__(self, record: RunRecord, folder: RunFolder, endpoint: Endpoint | None) -> None:
        facts = run_facts(record.config, record.facts, folder.run_id)
        planner, lists_ranks = PipelinePlanner.of_config(record.config), record.config.monitoring.per_rank
        self._monitor, self._observer = open_monitor(facts, endpoint, planner, _page, lists_ranks)
        self._observer.changes.subscribe(folder.note)
        log = RunLog(self._observer)
        self._observer.changes.subscribe(log.note)
        self._monitor.on_status.append(log.note_status)
        self._monitor.set_status(record.status)
        self._record, self._folder = record, folder
        self._has_frozen = False

    def take(self, rank: int, message: Message | None) -> None:
        """A rank's message; never waits."""
        if isinstance(message, Ready) and rank == 0 and not self._has_frozen:
            # Else looking through all that lives, again and again, would take as long as watching itself.
            gc.collect()
            gc.freeze()
            self._has_frozen = True
        self._monitor.take(rank, message)

    @property
    def bubble(self) -> float | None:
        """Of the latest step of which it is known."""
        return self._observer.analysis.bubble

    async def settle(self) -> None:
        """The record then has all that was observed, and the page how the run ended."""
        record = self._record
        self._monitor.set_status(record.status, record.error.message if record.error is not None else "")
        try:
            record.observed = await asyncio.wait_for(self._monitor.settle(self._conclude), SETTLE_SECONDS)
        except TimeoutError:
            pass
        except Exception:  # a bug of ours, or a rule's: the folder has all the rest
            complain()

    def _conclude(self) -> dict[str, Any]:
        self._observer.finish()
        return self._observer.summary()

    async def linger(self, hurry: asyncio.Event) -> None:
        """Where somebody scrapes a run that has failed, until that is told: counters of it rise only now."""
        seconds = self._record.config.monitoring.linger_seconds
        if not self._record.status.is_broken or not seconds:
            return
        waits = [asyncio.create_task(self._scraped()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    async def _scraped(self) -> None:
        """Once more, where it was before."""
        scrape = await self._monitor.settle(self._monitor.scrapes.next)
        if scrape is not None:
            await asyncio.wrap_future(scrape)

    async def close(self) -> None:
        """Once the folder is complete."""
        if self._has_frozen:
            gc.unfreeze()
        await self._monitor.close()
        # Its port may soon be somebody else's, who shall not be sent the token.
        await asyncio.to_thread(self._folder.write_endpoints, endpoints(self._folder.run_id, None))


class Watch(Protocol):
    """Who looks on."""

    @property
    def bubble(self) -> float | None:
        """Of the latest step of which it is known."""

    def take(self, rank: int, message: Message | None) -> object:
        """Never waits."""

    async def settle(self) -> None:
        """No message comes any more; the record then has what was found."""

    async def linger(self, hurry: asyncio.Event) -> None:
        """The folder is complete; somebody may yet want to hear of it. Once `hurry` is set, no more."""

    async def close(self) -> None:
        """Nobody does."""


async def complete(
    folder: RunFolder, record: RunRecord, watch: Watch | None, spans: Mapping[int, list[Span]] | None = None
) -> None:
    """The folder, with all that was observed, and then nobody is answered any more. Who is cancelled here waits for it
    all the same: half a folder would be all that is left of a run."""
    hurry = asyncio.Event()
    ending = asyncio.create_task(_complete(folder, record, watch, spans, hurry))
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        hurry.set()
        if not ending.done():
            await asyncio.wait([ending])  # cancelled again, it is left to itself
        raise


async def _complete(
    folder: RunFolder,
    record: RunRecord,
    watch: Watch | None,
    spans: Mapping[int, list[Span]] | None,
    hurry: asyncio.Event,
) -> None:
    try:
        if watch is not None:
            await watch.settle()
        await folder.complete(record, spans)
        if watch is not None:
            await watch.linger(hurry)
    finally:
        if watch is not None:
            await watch.close()


def _page(monitor: MonitorThread, observer: Observer) -> list[web.RouteDef]:
    """Called in the monitor thread, which imports what a page takes."""
    from parallel3d.reports.live_page import page_of

    return page_of(monitor, observer)


def run_facts(config: RunConfig, model: ModelFacts, run_id: str) -> RunFacts:
    """What is known before the first rank starts."""
    layers = config.pipeline.layers_per_stage
    return RunFacts(
        run_id=run_id,
        world_size=config.world_size,
        dp=config.parallel.dp,
        tp=config.parallel.tp,
        pp=config.parallel.pp,
        model=config.model.factory,
        parameters=model.parameters,
        flops_per_token=model.flops_per_token,
        precision=config.train.precision,
        schedule=config.pipeline.schedule,
        microbatches=config.pipeline.microbatches,
        virtual_stages=config.pipeline.virtual_stages,
        batch_size=config.batch_size,
        steps=config.train.steps,
        bucket_bytes=config.comm.bucket_size,
        comm_strategy=config.comm.strategy,
        shards_optimizer=config.optimizer.shard,
        memory_budget=config.memory.budget,
        prefetch=config.data.prefetch,
        version=__version__,
        started=time.time(),
        layers_per_stage=layers if isinstance(layers, tuple) else (),
    )
