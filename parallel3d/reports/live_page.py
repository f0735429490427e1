"""The page of a run that goes on: snapshots of what its observer knows, and a feed of what changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monitoring.analysis.device_peaks import utilization
from monitoring.analysis.facts import Status
from monitoring.analysis.observations import StepTimes
from monitoring.events.events import Event
from monitoring.live.cpu_budget import CpuBudget
from monitoring.live.observer import Observer
from monitoring.live.run_state import RunState
from parallel3d.pipeline.schedules.actions import parse_actions
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.reports.snapshot import Json, RankInfo, RunInfo, RunTotals, Snapshot, pipeline_view, thinned

if TYPE_CHECKING:
    from aiohttp import web

    from monitoring.http.page import Feed
    from monitoring.live.monitor_thread import MonitorThread

_PIPELINE_SHARE = 0.00025
"""Of a core that drawing pipelines may take: a larger one is drawn more rarely."""
_PIPELINE_SECONDS = 15.0
"""At most between two drawings."""


def page_of(monitor: MonitorThread, observer: Observer) -> list[web.RouteDef]:
    """The page's routes for a run that is being watched. Called in the monitor thread."""
    from monitoring.http.page import page_routes  # with aiohttp, which takes a third of a second

    view = RunView(observer)
    monitor.on_status.append(view.set_status)
    monitor.on_close.append(view.close)
    return page_routes(view)


class RunView:
    """The source of a live page. Only the observer's thread may use it."""

    def __init__(self, observer: Observer, budget: CpuBudget | None = None) -> None:
        from monitoring.http.page import Feed

        self._observer = observer
        self._status, self._error = str(Status.RUNNING), ""
        self._feed = Feed(self.state)
        self._pipeline = _PipelineView(budget or CpuBudget(_PIPELINE_SHARE, longest=_PIPELINE_SECONDS))
        observer.changes.subscribe(self._on_change)

    # As the page asks.

    @property
    def feed(self) -> Feed:
        return self._feed

    @property
    def is_live(self) -> bool:
        return not self._feed.is_closed

    def snapshot(self) -> Json:
        state = self._observer.state
        return self._now(state.steps_json(thinned(list(state.steps))), list(state.logs)).to_json()

    def state(self) -> Json:
        """What has no history."""
        return self._now().state_json()

    def _now(self, steps: list[Json] | None = None, log: list[Json] | None = None) -> Snapshot:
        observer = self._observer
        return Snapshot(
            run=self._info(),
            totals=_totals(observer.state),
            ranks=[_rank(observer, rank) for rank in sorted(observer.state.ranks)],
            bottlenecks=[each.to_json() for each in observer.analysis.bottlenecks],
            pipeline=self._pipeline.of(observer),
            steps=steps or (),
            log=log or (),
        )

    def _info(self) -> RunInfo:
        facts = self._observer.state.facts
        return RunInfo(
            run_id=facts.run_id,
            status=self._status,
            started=facts.started,
            world_size=facts.world_size,
            mesh={"dp": facts.dp, "tp": facts.tp, "pp": facts.pp},
            model=facts.model,
            parameters=facts.parameters,
            schedule=facts.schedule,
            microbatches=facts.microbatches,
            steps=facts.steps,
            error={"message": self._error} if self._error else None,
        )

    # As the run goes on.

    def set_status(self, status: str, error: str) -> None:
        self._status, self._error = status, error
        self._feed.changed()

    def close(self) -> None:
        """No request is answered any more."""
        self._feed.close()

    def _on_change(self, kind: str, payload: Any) -> None:
        match kind:
            case "step" | "log":
                self._feed.put(kind, payload)
            case "parts":
                self._feed.put("parts", {"step": payload["step"], "parts": payload["parts"]})
        self._feed.changed()


def _totals(state: RunState) -> RunTotals:
    facts, counted = state.facts, state.counted()
    devices = (rank.device for rank in state.ranks.values())
    rate = counted.tokens / counted.seconds if counted.seconds > 0 else 0.0
    return RunTotals(
        steps=state.num_steps,
        tokens=state.num_tokens,
        tokens_per_second=rate,
        step_seconds=counted.seconds / counted.num_steps if counted.num_steps else None,
        mfu=utilization(devices, facts.world_size, facts.precision, rate * facts.flops_per_token),
        final_loss=state.steps[-1].loss if state.steps else None,
    )


def _rank(observer: Observer, rank: int) -> RankInfo:
    state, totals = observer.state, observer.analysis.totals.get(rank)
    facts, counted = state.ranks[rank], totals.counted if totals is not None else None
    return RankInfo(
        rank=rank,
        coords=facts.place._asdict(),
        host=facts.host,
        device=facts.device,
        parameters=facts.parameters,
        memory_bytes=state.peak_memory.get(rank),
        memory_kinds=state.memory.get(rank, {}),
        bubble=counted.bubble if counted is not None else None,
        straggler_score=observer.analysis.scores.get(rank),
        seconds=counted.parts.to_json() if counted is not None else None,
        remainder_seconds=counted.remainder if counted is not None else None,
        compute_cpu_seconds=counted.compute_cpu if counted is not None else None,
        core_wait_seconds=counted.core_wait if counted is not None else None,
    )


class _PipelineView:
    """The latest step of the first replica's pipeline, planned and measured; made anew as the budget allows."""

    def __init__(self, budget: CpuBudget) -> None:
        self._budget = budget
        self._step: StepTimes | None = None
        self._shown: Json | None = None

    def of(self, observer: Observer) -> Json | None:
        step = observer.analysis.latest
        if observer.state.facts.pp == 1 or step is None or step is self._step or not self._budget.is_due:
            return self._shown
        with self._budget.spent():
            self._step, self._shown = step, _view(observer.state, observer.analysis.last_pipeline or {})
        return self._shown


def _view(state: RunState, events: Mapping[int, list[Event]]) -> Json | None:
    places = sorted((facts.place.pp, rank) for rank, facts in state.ranks.items() if facts.place[:2] == (0, 0))
    columns = [events.get(rank, []) for _, rank in places]
    if not columns or not all(columns):
        return None
    actions = tuple(tuple(parse_actions(event.action)[0] for event in column) for column in columns)
    times = [[(event.start, event.end, event.waited, event.cpu) for event in column] for column in columns]
    stages = 1 + max(action.stage for column in actions for action in column)
    table = Table(state.facts.schedule, stages, state.facts.microbatches, actions)
    return pipeline_view(columns[0][0].step, state.facts.schedule, Measured.of(table, times))
