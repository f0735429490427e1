"""The station of a run: an observer with all rules, and an endpoint that serves what it sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from monitoring.bottlenecks import Planner, find_bottlenecks
from monitoring.endpoint import Endpoint
from monitoring.facts import RunFacts
from monitoring.observer import Observer
from monitoring.station import Station

if TYPE_CHECKING:
    from aiohttp import web

Routes = Callable[[Station, Observer], "list[web.RouteDef]"]
"""What is mounted beside /metrics, behind the token. Called once, in the station's thread."""
_BROKEN = ("failed", "hung")


def open_station(
    facts: RunFacts, endpoint: Endpoint | None, planner: Planner | None = None, routes: Routes | None = None
) -> tuple[Station, Observer]:
    """Observes from now on, and answers on the endpoint until it is closed. The observer is the station's thread's."""
    observer = Observer(facts, planner, find=find_bottlenecks)
    return Station(observer, endpoint, partial(_make_app, observer, routes)), observer


def _make_app(observer: Observer, routes: Routes | None, station: Station) -> web.Application:
    from monitoring.metrics import RunMetrics  # here, so that the run does not wait for them
    from monitoring.server import make_app

    assert station.endpoint is not None
    metrics = RunMetrics(observer, station.inbox.lost_events, lambda: station.status in _BROKEN)
    return make_app(station.endpoint, metrics, routes(station, observer) if routes is not None else ())
