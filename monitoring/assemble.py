"""Builds a run's monitor: an observer in its own thread, and an endpoint that serves its results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from monitoring.analysis.facts import RunFacts, Status
from monitoring.analysis.rules.bottlenecks import Planner
from monitoring.http.endpoint import Endpoint
from monitoring.live.monitor_thread import MonitorThread
from monitoring.live.observer import Observer

if TYPE_CHECKING:
    from aiohttp import web

Routes = Callable[[MonitorThread, Observer], "list[web.RouteDef]"]
"""Returns the routes to mount beside /metrics; they require the token. Called once, in the monitor thread."""


def open_monitor(
    facts: RunFacts,
    endpoint: Endpoint | None,
    planner: Planner | None = None,
    routes: Routes | None = None,
    lists_ranks: bool = False,
) -> tuple[MonitorThread, Observer]:
    """Start observing, and serve on the endpoint until the thread is closed. Only that thread may use the observer.

    lists_ranks: whether ranks have endpoints of their own; /sd then lists them.
    """
    observer = Observer(facts, planner)
    make_app = partial(_make_app, endpoint, observer, lists_ranks, routes)
    return MonitorThread(observer, endpoint=endpoint, make_app=make_app), observer


def _make_app(
    endpoint: Endpoint | None, observer: Observer, lists_ranks: bool, routes: Routes | None, monitor: MonitorThread
) -> web.Application:
    from monitoring.http.server import make_app
    from monitoring.prometheus.run_metrics import RunMetrics, scrape_targets  # here: the thread imports it, not the run

    assert endpoint is not None
    metrics = RunMetrics(observer, lambda: Status(monitor.status).is_broken, monitor.scrapes.note)
    targets = partial(scrape_targets, observer.state) if lists_ranks else None
    return make_app(endpoint, metrics, routes(monitor, observer) if routes is not None else (), targets)
