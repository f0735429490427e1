"""A run that goes on, for its page: what the observer knows as values of JSON, and a feed of what changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from monitoring.analysis.device_peaks import utilization
from monitoring.analysis.observations import StepTimes
from monitoring.analysis.totals import WARM_UP
from monitoring.events.events import Event
from monitoring.live.cpu_budget import Ration
from monitoring.live.observer import Observer
from parallel3d.pipeline.schedules.actions import parse_actions
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.reports.pipeline_view import pipeline_view
from parallel3d.reports.run_reader import MOST_STEPS, thinned
from parallel3d.runs.record import Status

if TYPE_CHECKING:
    from aiohttp import web

    from monitoring.http.page import Feed
    from monitoring.live.monitor_thread import Station

Json = dict[str, Any]
_PIPELINE_SHARE = 0.00025
"""Of a core that drawing pipelines may take: a larger one is drawn more rarely."""
_PIPELINE_SECONDS = 15.0
"""But that often."""


def page_of(station: Station, observer: Observer) -> list[web.RouteDef]:
    """The page's routes for a run that is being watched. Called in the station's thread."""
    from monitoring.http.page import page_routes  # with aiohttp, which takes a third of a second

    view = RunView(observer)
    station.on_status.append(view.set_status)
    station.on_close.append(view.close)
    return page_routes(view)


class RunView:
    """The source of a live page. It is of the observer's thread."""

    def __init__(self, observer: Observer, ration: Ration | None = None) -> None:
        from monitoring.http.page import Feed

        self._observer = observer
        self._status, self._error = str(Status.RUNNING), ""
        self._feed = Feed(self.state)
        self._pipeline = _PipelineView(ration or Ration(_PIPELINE_SHARE, longest=_PIPELINE_SECONDS))
        self._warm_up = _WarmUp()
        for step in observer.steps:
            self._warm_up.add(step.tokens, step.seconds)
        observer.on_change.append(self._on_change)

    # As the page asks.

    @property
    def feed(self) -> Feed:
        return self._feed

    @property
    def is_live(self) -> bool:
        return not self._feed.is_closed

    def snapshot(self) -> Json:
        observer = self._observer
        steps = [step.to_json() for step in thinned(list(observer.steps), MOST_STEPS)]
        return {**self.state(), "steps": steps, "log": list(observer.logs)}

    def state(self) -> Json:
        """What has no history."""
        observer = self._observer
        return {
            "run": self._run(),
            "totals": self._totals(),
            "ranks": [_rank(observer, rank) for rank in sorted(observer.ranks)],
            "bottlenecks": [each.to_json() for each in observer.bottlenecks],
            "pipeline": self._pipeline.of(observer),
        }

    def _run(self) -> Json:
        facts = self._observer.facts
        return {
            "run_id": facts.run_id,
            "status": self._status,
            "started": facts.started,
            "world_size": facts.world_size,
            "mesh": {"dp": facts.dp, "tp": facts.tp, "pp": facts.pp},
            "model": facts.model,
            "parameters": facts.parameters,
            "schedule": facts.schedule,
            "microbatches": facts.microbatches,
            "steps": facts.steps,
            "error": {"message": self._error} if self._error else None,
        }

    def _totals(self) -> Json:
        observer, facts = self._observer, self._observer.facts
        devices = (rank.device for rank in observer.ranks.values())
        counted = self._warm_up.counted(observer)
        rate = counted.tokens / counted.seconds if counted.seconds > 0 else 0.0
        return {
            "steps": observer.num_steps,
            "tokens": observer.num_tokens,
            "tokens_per_second": rate,
            "step_seconds": counted.seconds / counted.num_steps if counted.num_steps else None,
            "mfu": utilization(devices, facts.world_size, facts.precision, rate * facts.flops_per_token),
            "final_loss": observer.steps[-1].loss if observer.steps else None,
        }

    # As the run goes on.

    def set_status(self, status: str, error: str) -> None:
        self._status, self._error = status, error
        self._feed.changed()

    def close(self) -> None:
        """Nobody is answered any more."""
        self._feed.close()

    def _on_change(self, kind: str, payload: Any) -> None:
        match kind:
            case "step":
                self._warm_up.add(payload["tokens"], payload["seconds"])
                self._feed.put("step", payload)
            case "parts":
                self._feed.put("parts", {"step": payload["step"], "parts": payload["parts"]})
            case "log":
                self._feed.put("log", payload)
        self._feed.changed()


def _rank(observer: Observer, rank: int) -> Json:
    facts, totals = observer.ranks[rank], observer.totals.get(rank)
    counted = totals.counted if totals is not None else None
    return {
        "rank": rank,
        "coords": facts.place._asdict(),
        "host": facts.host,
        "device": facts.device,
        "parameters": facts.parameters,
        "memory_bytes": observer.peak_memory.get(rank),
        "memory_kinds": observer.memory.get(rank, {}),
        "bubble": counted.bubble if counted is not None else None,
        "straggler_score": observer.scores.get(rank),
        "seconds": counted.parts.to_json() if counted is not None else None,
        "remainder_seconds": counted.remainder if counted is not None else None,
        "compute_cpu_seconds": counted.compute_cpu if counted is not None else None,
        "core_wait_seconds": counted.core_wait if counted is not None else None,
    }


class _Sums(NamedTuple):
    """Of some steps."""

    num_steps: int
    tokens: int
    seconds: float


class _WarmUp:
    """The first steps, which say nothing of speed; the observer forgets them in a long run."""

    def __init__(self) -> None:
        self._first: list[tuple[int, float]] = []

    def add(self, tokens: int, seconds: float) -> None:
        if len(self._first) < WARM_UP:
            self._first.append((tokens, seconds))

    def counted(self, observer: Observer) -> _Sums:
        """All others; one always counts."""
        left_out = self._first[: max(0, observer.num_steps - 1)]
        tokens, seconds = sum(first for first, _ in left_out), sum(second for _, second in left_out)
        return _Sums(observer.num_steps - len(left_out), observer.num_tokens - tokens, observer.step_seconds - seconds)


class _PipelineView:
    """The latest step of the first replica's pipeline, planned and measured; made anew where that is not too dear."""

    def __init__(self, ration: Ration) -> None:
        self._ration = ration
        self._step: StepTimes | None = None
        self._shown: Json | None = None

    def of(self, observer: Observer) -> Json | None:
        step = observer.latest
        if observer.facts.pp == 1 or step is None or step is self._step or not self._ration.is_due:
            return self._shown
        with self._ration.spent():
            self._step, self._shown = step, _view(observer, observer.last_pipeline or {})
        return self._shown


def _view(observer: Observer, events: Mapping[int, list[Event]]) -> Json | None:
    places = sorted((facts.place.pp, rank) for rank, facts in observer.ranks.items() if facts.place[:2] == (0, 0))
    columns = [events.get(rank, []) for _, rank in places]
    if not columns or not all(columns):
        return None
    actions = tuple(tuple(parse_actions(event.action)[0] for event in column) for column in columns)
    times = [[(event.start, event.end, event.waited, event.cpu) for event in column] for column in columns]
    facts = observer.facts
    stages = 1 + max(action.stage for column in actions for action in column)
    table = Table(facts.schedule, stages, facts.microbatches, actions)
    return pipeline_view(columns[0][0].step, facts.schedule, Measured.of(table, times))
