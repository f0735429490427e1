"""The station of a run: an observer with all rules, and an endpoint that serves what it sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from monitoring.analysis.bottlenecks import Planner, find_bottlenecks
from monitoring.analysis.facts import RunFacts
from monitoring.http.endpoint import Endpoint
from monitoring.live.monitor_thread import Station
from monitoring.live.observer import Observer
from monitoring.prometheus.scrape_targets import ScrapeTargets

if TYPE_CHECKING:
    from aiohttp import web

    from monitoring.http.server import Targets

Routes = Callable[[Station, Observer], "list[web.RouteDef]"]
"""What is mounted beside /metrics, behind the token. Called once, in the station's thread."""
_BROKEN = ("failed", "hung")


def open_station(
    facts: RunFacts,
    endpoint: Endpoint | None,
    planner: Planner | None = None,
    routes: Routes | None = None,
    lists_ranks: bool = False,
) -> tuple[Station, Observer]:
    """Observes from now on, and answers on the endpoint until it is closed. The observer is the station's thread's.

    lists_ranks: whether ranks have endpoints of their own, which /sd tells.
    """
    observer = Observer(facts, planner, find=find_bottlenecks)
    targets = ScrapeTargets(observer)
    make_app = partial(_make_app, endpoint, observer, targets.listed if lists_ranks else None, routes)
    return Station(observer, targets, endpoint=endpoint, make_app=make_app), observer


def _make_app(
    endpoint: Endpoint | None, observer: Observer, targets: Targets | None, routes: Routes | None, station: Station
) -> web.Application:
    from monitoring.http.server import make_app
    from monitoring.prometheus.run_metrics import RunMetrics  # here, so that the run does not wait for them

    assert endpoint is not None
    metrics = RunMetrics(observer, lambda: station.status in _BROKEN, station.scrapes.note)
    return make_app(endpoint, metrics, routes(station, observer) if routes is not None else (), targets)
