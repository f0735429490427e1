"""Alert rules: what somebody should know of without looking, each with its severity and a page on what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monitoring.dashboards.expressions import SLOW, Expressions
from monitoring.dashboards.recording_rules import LAG, SCORE, TOKENS
from monitoring.dashboards.setup import Setup

CRITICAL, WARNING = "critical", "warning"
"""The run stands or is lost; it goes on, but worse than it could."""
_ALL = Expressions()
_AT = "{{ $labels.instance }}"
_MEAN_STEP = "parallel3d_step_duration_seconds_sum / parallel3d_step_duration_seconds_count"
_RANK = "rank {{ $labels.rank }} (dp={{ $labels.dp }} tp={{ $labels.tp }} pp={{ $labels.pp }})"


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires once `expr` has had a result for `lasting`."""

    name: str
    severity: str
    runbook: str
    """The page's name, without `.md`."""
    expr: str
    lasting: str
    summary: str
    description: str

    def to_json(self, setup: Setup) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{setup.runbooks.rstrip('/')}/{self.runbook}.md",
            },
        }


def _no_progress() -> Alert:
    """Much later than steps usually come; and two minutes at least, or every hiccup of short steps would count. The
    first step may take longer, as ranks start and torch loads what it loads late. Scripts tell of no steps, and have
    no `run_info`."""
    last, since = _ALL.series("last_step_timestamp_seconds"), "time() - parallel3d_last_step_timestamp_seconds"
    begun = f"time() - {_ALL.series('start_time_seconds')}"
    run = "on (job, instance) parallel3d_run_info"
    return Alert(
        "Parallel3dNoProgress",
        CRITICAL,
        "no-progress",
        f"({since} > 120 and {since} > 10 * {_MEAN_STEP}) or ({begun} > 900 and {run} unless {last} > 0)",
        "1m",
        f"The run at {_AT} makes no steps",
        "No step has ended for {{ $value | humanizeDuration }}.",
    )


def _heartbeat_lost() -> Alert:
    """Ranks report each second from their event loops, whatever they compute. But where no process supervises them, as
    under torchrun, rank 0 gathers the reports beside a step: they are up to two steps old then."""
    age = f"time() - {_ALL.series('rank_last_report_timestamp_seconds')}"
    soon = f"({age} <= on (job, instance) group_left () (4 * {_MEAN_STEP}))"
    silent = f"({age} > 30 unless {soon})"
    return Alert(
        "Parallel3dHeartbeatLost",
        CRITICAL,
        "heartbeat-lost",
        _ALL.located(silent),
        "15s",
        f"{_RANK} of {_AT} is silent",
        "It has not reported for {{ $value | humanizeDuration }}; ranks report every second, without a supervisor once "
        "in a step or two. It is on host {{ $labels.host }}.",
    )


def _throughput_drop() -> Alert:
    """Beside this run's own median before: 15 minutes that end 5 minutes ago, so that a drop is not soon usual. What
    stands still is another alert's matter."""
    usual = f"quantile_over_time(0.5, {TOKENS}[15m] offset 5m)"
    long_enough = f"(time() - {_ALL.series('start_time_seconds')} > 1200)"
    return Alert(
        "Parallel3dThroughputDrop",
        WARNING,
        "throughput-drop",
        f"(({TOKENS} > 0) / {usual} < 0.7) and on (job, instance) {long_enough}",
        "2m",
        f"The run at {_AT} has become slower",
        "It trains on {{ $value | humanizePercentage }} of the tokens a second that it did before.",
    )


def _straggler() -> Alert:
    """The mean of a minute: one slow step is none."""
    return Alert(
        "Parallel3dStraggler",
        WARNING,
        "straggler",
        f"avg_over_time({SCORE}[1m]) < {SLOW}",
        "1m",
        f"{_RANK} of {_AT} is slow",
        "It works at {{ $value | humanizePercentage }} of the best speed for the same work, and others wait for it. "
        "It is on host {{ $labels.host }}.",
    )


def _nonfinite_gradients() -> Alert:
    """A run that ends with them may be seen only once, so a first sample above 0 counts too, and so does one that is
    no longer served."""
    counter = _ALL.series("nonfinite_gradients_total")
    return Alert(
        "Parallel3dNonFiniteGradients",
        CRITICAL,
        "non-finite-gradients",
        f"increase({counter}[10m]) > 0 or (last_over_time({counter}[10m]) > 0 unless {counter} offset 10m)",
        "0s",
        f"Gradients of the run at {_AT} have become NaN or infinite",
        "A step was given up because of that within the last ten minutes.",
    )


def _restart_loop() -> Alert:
    return Alert(
        "Parallel3dRestartLoop",
        CRITICAL,
        "restart-loop",
        f"changes({_ALL.series('start_time_seconds')}[15m]) >= 3",
        "0s",
        f"The run at {_AT} starts again and again",
        "It has started anew {{ $value }} times within 15 minutes.",
    )


def _event_loop_lag() -> Alert:
    return Alert(
        "Parallel3dEventLoopLag",
        WARNING,
        "event-loop-lag",
        f"{LAG} > 0.25",
        "2m",
        f"Event loops of the run at {_AT} lag",
        "One in a hundred timers runs {{ $value | humanizeDuration }} late or later: heartbeats, deadlines and "
        "messages between ranks wait as long.",
    )


def alerts() -> tuple[Alert, ...]:
    return (
        _no_progress(),
        _heartbeat_lost(),
        _throughput_drop(),
        _straggler(),
        _nonfinite_gradients(),
        _restart_loop(),
        _event_loop_lag(),
    )


def alert_rules(setup: Setup) -> dict[str, Any]:
    rules = [alert.to_json(setup) for alert in alerts()]
    return {"groups": [{"name": "parallel3d-alerts", "interval": f"{setup.interval}s", "rules": rules}]}
