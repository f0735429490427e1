"""Recording rules: what alerts compare with, and what is worth keeping longer than every rank's counters."""

from __future__ import annotations

from typing import Any

from monitoring.dashboards.expressions import Expressions
from monitoring.dashboards.setup import Setup

TOKENS = "instance:parallel3d_tokens:rate"
GOODPUT = "instance:parallel3d_goodput:ratio"
PHASE_SHARE = "instance_phase:parallel3d_phase_share:ratio"
STEP_SECONDS = "instance:parallel3d_step_duration_seconds:mean"
AXIS_BYTES = "instance_axis:parallel3d_collective_bytes:rate"
LAG = "instance:parallel3d_event_loop_lag_seconds:p99"
SCORE = "instance_rank:parallel3d_straggler_score:ratio"


def recording_rules(setup: Setup) -> dict[str, Any]:
    """Of every run that this Prometheus scrapes."""
    each = Expressions(window=setup.window)
    recorded = {
        TOKENS: each.tokens,
        GOODPUT: each.goodput,
        PHASE_SHARE: each.phase_share,
        STEP_SECONDS: each.step_seconds,
        AXIS_BYTES: each.axis_bytes,
        LAG: each.lag,
        SCORE: each.score,
    }
    rules = [{"record": name, "expr": expr} for name, expr in recorded.items()]
    return {"groups": [{"name": "parallel3d-recording", "interval": f"{setup.interval}s", "rules": rules}]}
