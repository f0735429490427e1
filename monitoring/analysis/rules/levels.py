"""From which value on each kind of bottleneck is there at all, and how severe it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from monitoring.analysis.observations import Severity


class Levels(NamedTuple):
    """Above which value a bottleneck has a severity; up to `low` there is none."""

    low: float
    medium: float
    high: float
    critical: float


LEVELS: Mapping[str, Levels] = {
    "tp_comm": Levels(0.30, 0.40, 0.55, 0.70),  # share of the step
    "pp_comm": Levels(0.30, 0.40, 0.55, 0.70),
    "dp_comm": Levels(0.30, 0.40, 0.55, 0.70),
    "tp_efficiency": Levels(0.20, 0.30, 0.45, 0.60),  # 1 - efficiency
    "small_buckets": Levels(0.05, 0.15, 0.30, 0.50),  # share of the step that reducing takes
    "straggler": Levels(0.0, 0.40, 0.45, 0.70),  # 1 - score; the detector decided already that there is one
    "oversubscribed_cores": Levels(0.10, 0.25, 0.50, 0.75),  # share of the step without a core
    "event_loop_lag": Levels(0.1, 0.25, 0.5, 1.0),  # seconds, the 95th percentile
    "data_starved": Levels(0.10, 0.20, 0.35, 0.50),  # share of the step
    "checkpoint_stalls": Levels(0.05, 0.10, 0.25, 0.50),  # share of the step
    "uneven_stages": Levels(0.15, 0.25, 0.40, 0.60),  # 1 - mean / slowest
    "too_few_microbatches": Levels(0.30, 0.40, 0.55, 0.70),  # 1 - utilisation
    "pipeline_utilization": Levels(0.30, 0.40, 0.55, 0.70),
    "memory_imbalance": Levels(0.25, 0.40, 0.50, 0.60),  # 1 - mean / most
    "memory_pressure": Levels(0.90, 0.93, 0.96, 1.00),  # share of the budget
}
KINDS = tuple(LEVELS)


def severity_of(kind: str, value: float) -> Severity | None:
    """None where the value is no bottleneck."""
    reached = [severity for severity, bound in zip(Severity, LEVELS[kind], strict=True) if value > bound]
    return reached[-1] if reached else None


def rank_of(severity: Severity) -> int:
    """0 for the lowest."""
    return list(Severity).index(severity)
