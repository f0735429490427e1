"""A run's metrics for Prometheus, read from its observer."""

from __future__ import annotations

import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from monitoring.analysis import traffic
from monitoring.analysis.device_peaks import utilization
from monitoring.analysis.observations import Severity
from monitoring.analysis.rules.bottlenecks import KINDS
from monitoring.events import loop_lag
from monitoring.events.loop_lag import LagHistogram
from monitoring.events.time_parts import PARTS
from monitoring.live.observer import Observer
from monitoring.live.run_state import RunState
from monitoring.prometheus.metric_families import RUN_FAMILIES, histograms, number, numbers

STEP_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, float("inf"),
)  # fmt: skip
"""Seconds per step. The range covers test models up to models that fill a cluster."""

_LATEST = 20  # steps over which the utilization is computed

_numbers, _number, _histograms = (partial(each, RUN_FAMILIES) for each in (numbers, number, histograms))


class RunMetrics(Collector):
    """Create it before the observer takes its first message; collect only in the observer's thread."""

    def __init__(
        self,
        observer: Observer,
        has_failed: Callable[[], bool] = bool,
        on_collect: Callable[[], None] = lambda: None,
    ) -> None:
        """on_collect: called after each complete collection."""
        self._state, self._analysis = observer.state, observer.analysis
        self._has_failed, self._on_collect = has_failed, on_collect
        self._durations = [0] * len(STEP_BOUNDS)
        self._last_step: float | None = None
        self._severities: dict[str, str] = {}
        """The latest severity of each kind of bottleneck seen so far."""
        observer.changes.subscribe(self._note)

    def _note(self, kind: str, payload: Any) -> None:
        if kind == "step":
            self._durations[bisect_left(STEP_BOUNDS, payload["seconds"])] += 1
            self._last_step = time.time()

    def collect(self) -> Iterable[Metric]:
        yield from self._identity()
        yield from self._progress()
        yield from self._time()
        yield from self._bottlenecks()
        yield from self._exchanges()
        yield from self._health()
        self._on_collect()

    def _identity(self) -> Iterator[Metric]:
        state, facts = self._state, self._state.facts
        yield _numbers("build_info", [((facts.version, platform.python_version(), _torch_version()), 1)])
        mesh = f"{facts.dp}x{facts.tp}x{facts.pp}"
        who = [((facts.run_id, facts.model, facts.schedule, mesh, facts.precision), 1)]
        yield _numbers("run_info", who if facts.run_id else [])  # a script's run has no id
        yield _numbers(
            "rank_info",
            [((rank, *each.place, each.host, each.device), 1) for rank, each in sorted(state.ranks.items())],
        )
        yield _number("start_time_seconds", facts.started)

    def _progress(self) -> Iterator[Metric]:
        state = self._state
        last = state.steps[-1] if state.steps else None
        outcomes = {"ok": state.num_steps, "failed": int(self._has_failed())}
        yield _numbers("steps_total", [((outcome,), count) for outcome, count in outcomes.items()])
        yield _number("tokens_total", state.num_tokens)
        yield _histograms("step_duration_seconds", [((), STEP_BOUNDS, self._durations, state.step_seconds)])
        yield _number("training_loss", last and last.loss)
        yield _number("gradient_norm", last and last.grad_norm)
        yield _number("learning_rate", last and last.learning_rate)
        yield _number("model_flops_utilization_ratio", self._utilization())
        yield _number("last_step_timestamp_seconds", self._last_step)

    def _utilization(self) -> float | None:
        """Of the latest steps; None if a device's peak or the model's cost is unknown."""
        state, facts = self._state, self._state.facts
        latest = list(islice(reversed(state.steps), _LATEST))
        seconds, tokens = sum(step.seconds for step in latest), sum(step.tokens for step in latest)
        flops = tokens / seconds * facts.flops_per_token if seconds > 0 else 0.0
        devices = (rank.device for rank in state.ranks.values())
        return utilization(devices, facts.world_size, facts.precision, flops)

    def _time(self) -> Iterator[Metric]:
        analysis = self._analysis
        totals = [(rank, each.all) for rank, each in sorted(analysis.totals.items())]
        yield _numbers(
            "phase_seconds_total",
            [((rank, part), each.parts[part]) for rank, each in totals for part in PARTS],
        )
        yield _numbers("unattributed_seconds_total", [((rank,), each.unattributed) for rank, each in totals])
        yield _numbers("compute_cpu_seconds_total", [((rank,), each.compute_cpu) for rank, each in totals])
        yield _numbers("core_wait_seconds_total", [((rank,), each.core_wait) for rank, each in totals])
        bubbles = sorted(analysis.bubble_by_stage.items())
        yield _numbers("pipeline_bubble_ratio", [((stage,), ratio) for stage, ratio in bubbles])
        scores = sorted(analysis.scores.items())
        yield _numbers("straggler_score_ratio", [((rank,), score) for rank, score in scores])

    def _bottlenecks(self) -> Iterator[Metric]:
        """A sample for every kind, so that alerts can tell 0 from no data; the worst severity if there are several."""
        worst: dict[str, Severity] = {}
        for each in self._analysis.bottlenecks:
            worst[each.kind] = max(each.severity, worst.get(each.kind, each.severity), key=list(Severity).index)
        self._severities |= worst
        yield _numbers(
            "bottleneck_state",
            [((kind, self._severities.get(kind, Severity.LOW)), kind in worst) for kind in KINDS],
        )

    def _exchanges(self) -> Iterator[Metric]:
        state = self._state
        totals = sorted(state.traffic.totals().items())
        yield _numbers("collective_bytes_total", [(where, each.num_bytes) for where, each in totals])
        yield _histograms(
            "collective_duration_seconds",
            [(where, traffic.BOUNDS, each.counts, each.seconds) for where, each in totals],
        )
        bandwidths = sorted(state.traffic.bandwidths().items())
        yield _numbers("collective_bus_bandwidth_bytes_per_second", bandwidths)
        yield from _lag(state.lag)

    def _health(self) -> Iterator[Metric]:
        state, analysis = self._state, self._analysis
        memory = sorted(state.memory.items())
        yield _numbers(
            "memory_bytes", [((rank, kind), size) for rank, kinds in memory for kind, size in sorted(kinds.items())]
        )
        yield _number("memory_budget_bytes", state.facts.memory_budget or None)
        yield _numbers("data_queue_batches", [((rank,), means[-1]) for rank, means in sorted(state.queue.items())])
        yield _number("data_queue_capacity_batches", state.queue_capacity)
        dropped = [((rank,), state.dropped.get(rank, 0)) for rank in sorted(state.ranks)]
        yield _numbers("events_dropped_total", dropped)
        yield _number("steps_incomplete_total", analysis.incomplete)
        seen = sorted(state.last_seen.items())
        yield _numbers("rank_last_report_timestamp_seconds", [((rank,), moment) for rank, moment in seen])
        yield _number("nonfinite_gradients_total", state.nonfinite)


def _lag(ranks: Mapping[int, LagHistogram]) -> Iterator[Metric]:
    none = [0] * len(loop_lag.BOUNDS)
    counts = [sum(column) for column in zip(none, *(each.counts for each in ranks.values()), strict=True)]
    total = sum(each.total for each in ranks.values())
    yield _histograms("event_loop_lag_seconds", [((), loop_lag.BOUNDS, counts, total)])
    yield _numbers("event_loop_lag_worst_seconds", [((rank,), each.worst) for rank, each in sorted(ranks.items())])


def scrape_targets(state: RunState) -> list[dict[str, Any]]:
    """The ranks' endpoints in the format of Prometheus' HTTP service discovery: one group per rank."""
    return [
        {"targets": [each.target], "labels": {"__scheme__": each.scheme, **_target_labels(state, rank)}}
        for rank, each in sorted(state.endpoints.items())
    ]


def _target_labels(state: RunState, rank: int) -> dict[str, str]:
    labels = {"run_id": state.facts.run_id, "rank": str(rank)}
    facts = state.ranks.get(rank)
    if facts is not None:
        labels |= {axis: str(place) for axis, place in facts.place._asdict().items()}
        labels["host"] = facts.host
    return labels


@cache
def _torch_version() -> str:
    """From the package's metadata: importing torch takes seconds. Cached, because it reads a file."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
