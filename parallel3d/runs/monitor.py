"""The monitor of one run: takes the ranks' messages while they run, and gives the record what it found at the end."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING, Any

from monitoring.analysis.facts import RunFacts
from monitoring.assemble import open_monitor
from monitoring.http.endpoint import Endpoint
from monitoring.http.service import complain
from monitoring.messages import Message, Ready
from parallel3d import __version__
from parallel3d.config import RunConfig
from parallel3d.planning.preflight import ModelFacts
from parallel3d.planning.what_if import PipelinePlanner
from parallel3d.runs.folder import RunFolder
from parallel3d.runs.record import RunRecord
from parallel3d.runs.run_log import RunLog

if TYPE_CHECKING:
    from aiohttp import web

    from monitoring.live.monitor_thread import MonitorThread
    from monitoring.live.observer import Observer

SETTLE_SECONDS = 10.0
"""For the ranks' last messages; what a busy host has not analysed by then is missing in the folder."""


class RunMonitor:
    """Observes the ranks and serves the endpoint, in a thread of its own; what it finds goes into the folder."""

    def __init__(self, record: RunRecord, folder: RunFolder, endpoint: Endpoint | None) -> None:
        facts = run_facts(record.config, record.facts, folder.run_id)
        planner, lists_ranks = PipelinePlanner.of_config(record.config), record.config.monitoring.per_rank
        self._monitor, self._observer = open_monitor(facts, endpoint, planner, _page, lists_ranks)
        self._observer.changes.subscribe(folder.note)
        log = RunLog(self._observer)
        self._observer.changes.subscribe(log.note)
        self._monitor.on_status.append(log.note_status)
        self._monitor.set_status(record.status)
        self._record = record
        self._has_frozen = False

    def take(self, rank: int, message: Message | None) -> None:
        """Pass on a rank's message; never waits."""
        if isinstance(message, Ready) and rank == 0 and not self._has_frozen:
            # Otherwise the garbage collector, walking all objects again and again, would cost as much as monitoring.
            gc.collect()
            gc.freeze()
            self._has_frozen = True
        self._monitor.take(rank, message)

    @property
    def bubble(self) -> float | None:
        """Mean over ranks, of the latest analysed step; None before the first."""
        return self._observer.analysis.bubble

    async def settle(self) -> None:
        """Analyse the remaining messages, put the summary into the record, and show the run's status on the page."""
        record = self._record
        self._monitor.set_status(record.status, record.error.message if record.error is not None else "")
        try:
            record.observed = await asyncio.wait_for(self._monitor.settle(self._conclude), SETTLE_SECONDS)
        except TimeoutError:
            pass
        except Exception:  # a bug of the monitor must not cost the rest of the folder
            complain()

    def _conclude(self) -> dict[str, Any]:
        self._observer.finish()
        return self._observer.summary()

    async def linger(self, hurry: asyncio.Event) -> None:
        """Wait until a failed run is scraped once more, because its counters rise only now; or until `hurry`."""
        seconds = self._record.config.monitoring.linger_seconds
        if not self._record.status.is_broken or not seconds:
            return
        waits = [asyncio.create_task(self._scraped()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()

    async def _scraped(self) -> None:
        """The next scrape, if there was one before."""
        scrape = await self._monitor.settle(self._monitor.scrapes.next)
        if scrape is not None:
            await asyncio.wrap_future(scrape)

    async def close(self) -> None:
        """Stop the thread, and answer no more requests."""
        if self._has_frozen:
            gc.unfreeze()
        await self._monitor.close()


def _page(monitor: MonitorThread, observer: Observer) -> list[web.RouteDef]:
    """Called in the monitor's thread, so that importing the page does not delay the run."""
    from parallel3d.reports.live_page import page_of

    return page_of(monitor, observer)


def run_facts(config: RunConfig, model: ModelFacts, run_id: str) -> RunFacts:
    """What the monitor knows before the first rank starts."""
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
