"""A rank's own endpoint, where the configuration asks for one: a free port, and the run's owner is told."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from monitoring.http.endpoint import Endpoint
from monitoring.http.service import Service
from monitoring.prometheus.rank_metrics import RankFigures, RankMetrics
from parallel3d.config import RunConfig
from parallel3d.runs.endpoint import open_endpoint
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

    from parallel3d.training.coordinator import Coordinator


class Told(Protocol):
    """The run's owner."""

    def send(self, kind: str, **fields: object) -> None: ...


@asynccontextmanager
async def serving_rank(coordinator: Coordinator, owner: Told) -> AsyncIterator[None]:
    """While the rank makes its steps."""
    endpoint = _open(coordinator.config)
    if endpoint is None:
        yield
        return
    service = Service("parallel3d-rank-endpoint", endpoint, lambda: _app(endpoint, coordinator))
    owner.send("endpoint", target=endpoint.authority, scheme=endpoint.scheme)
    try:
        yield
    finally:
        await service.close()


def _open(config: RunConfig) -> Endpoint | None:
    """With the run's token and TLS, on a port of its own. What is amiss on this host alone is no reason to end."""
    watched = config.monitoring
    if not (watched.enabled and watched.per_rank):
        return None
    try:
        return open_endpoint(config.model_copy(update={"monitoring": watched.model_copy(update={"port": None})}))
    except ConfigError as error:
        print(f"parallel3d: this rank has no /metrics: {error}", file=sys.stderr)
        return None


def _app(endpoint: Endpoint, coordinator: Coordinator) -> web.Application:
    from monitoring.http.server import make_app

    return make_app(endpoint, RankMetrics(lambda: figures(coordinator)))


def figures(coordinator: Coordinator) -> RankFigures:
    """What the rank knows of itself, from any thread: what changes meanwhile is as it was or as it is."""
    performance, mesh, recorder = coordinator.performance(), coordinator.mesh, coordinator.recorder
    return RankFigures(
        num_steps=performance.num_steps,
        parts=performance.total,
        lag=mesh.loop_lag,
        collectives=mesh.collectives.totals(),
        memory=_memory(coordinator),
        dropped=recorder.dropped if recorder is not None else 0,
    )


def _memory(coordinator: Coordinator) -> dict[str, int]:
    try:
        return coordinator.memory()
    except RuntimeError:  # the first step is just making the optimizer's state
        return {}
