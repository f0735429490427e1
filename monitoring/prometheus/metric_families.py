"""A run's metric families (name, help, labels), and functions that build Prometheus families from values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

PREFIX = "parallel3d_"

Labels = Sequence[str | int]
Sample = tuple[Labels, float]
Buckets = tuple[Labels, Sequence[float], Sequence[int], float]
"""Labels, upper bounds (the last is infinite), counts per bucket (not cumulative), and the sum of all observations."""


class Family(NamedTuple):
    kind: Literal["counter", "gauge", "info", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


RUN_FAMILIES = {
    # Identity.
    "build_info": Family("info", "What the run was started with.", ("version", "python", "torch")),
    "run_info": Family("info", "The run.", ("run_id", "model", "schedule", "mesh", "precision")),
    "rank_info": Family("info", "A rank's place in the mesh.", ("rank", "dp", "tp", "pp", "host", "device")),
    "start_time_seconds": Family("gauge", "When the run was started, since the epoch."),
    # Progress.
    "steps_total": Family("counter", "Steps that were made, or that failed.", ("outcome",)),
    "tokens_total": Family("counter", "Tokens of all steps."),
    "step_duration_seconds": Family("histogram", "From the end of one step to the end of the next."),
    "training_loss": Family("gauge", "The latest step's mean loss over its whole batch."),
    "gradient_norm": Family("gauge", "Of the latest step, before it was clipped."),
    "learning_rate": Family("gauge", "Of the latest step."),
    "model_flops_utilization_ratio": Family(
        "gauge", "Share of what the devices could compute at most; absent where that is not known."
    ),
    "last_step_timestamp_seconds": Family("gauge", "When the latest step was told, since the epoch."),
    # Time.
    "phase_seconds_total": Family("counter", "What a rank's time went into; all phases add up.", ("rank", "phase")),
    "unattributed_seconds_total": Family(
        "counter", "What the phases of a rank's steps miss, or have too much.", ("rank",)
    ),
    "compute_cpu_seconds_total": Family("counter", "Processor time of a rank's forwards and backwards.", ("rank",)),
    "core_wait_seconds_total": Family("counter", "Part of the phase other: computing without a core.", ("rank",)),
    "pipeline_bubble_ratio": Family(
        "gauge",
        "Share of the pipeline's time that its ranks waited as the schedule has it, of the latest steps.",
        ("pp_rank",),
    ),
    "straggler_score_ratio": Family("gauge", "A rank's own speed over the best; 1 is as fast.", ("rank",)),
    "bottleneck_state": Family(
        "gauge", "1 where this is a bottleneck now; else 0, with the severity that it had last.", ("kind", "severity")
    ),
    # Communication.
    "collective_bytes_total": Family(
        "counter",
        "Bytes of calls between ranks, all ranks together; messages between stages are a send on pp.",
        ("op", "axis"),
    ),
    "collective_duration_seconds": Family("histogram", "From call to end, of each rank's calls.", ("op", "axis")),
    "collective_bus_bandwidth_bytes_per_second": Family(
        "gauge", "Of the latest calls, as nccl-tests defines it.", ("op", "axis", "strategy")
    ),
    "event_loop_lag_seconds": Family("histogram", "How late the ranks' event loops ran their timers."),
    "event_loop_lag_worst_seconds": Family(
        "gauge", "The latest timer of a rank's event loop since it started.", ("rank",)
    ),
    # Resources and health.
    "memory_bytes": Family(
        "gauge",
        "A rank's memory; the kind process is what the system counts, all others are within it.",
        ("rank", "kind"),
    ),
    "memory_budget_bytes": Family("gauge", "What a rank may use, as configured."),
    "data_queue_batches": Family("gauge", "Batches that wait when a rank asks for one, on average.", ("rank",)),
    "data_queue_capacity_batches": Family("gauge", "Batches that can wait."),
    "events_dropped_total": Family("counter", "Events that came too fast to be kept.", ("rank",)),
    "steps_incomplete_total": Family("counter", "Steps whose time is not attributed, for want of some rank's events."),
    "rank_last_report_timestamp_seconds": Family("gauge", "When a rank was heard last, since the epoch.", ("rank",)),
    "nonfinite_gradients_total": Family("counter", "Steps whose gradients were not finite."),
}
"""Families of a whole run, by name without the prefix. No histogram has a `rank` label."""


def numbers(families: dict[str, Family], name: str, samples: Iterable[Sample]) -> Metric:
    """A family of counters, gauges or infos."""
    family = families[name]
    # prometheus_client appends `_total` to counters itself.
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(PREFIX + name.removesuffix("_total"), family.help, labels=family.labels)
    for labels, value in samples:
        metric.add_metric([str(label) for label in labels], value)
    return metric


def number(families: dict[str, Family], name: str, value: float | None) -> Metric:
    """A family with one sample; without any if the value is None."""
    return numbers(families, name, [] if value is None else [((), value)])


def histograms(families: dict[str, Family], name: str, each: Iterable[Buckets]) -> Metric:
    """A family of histograms."""
    family = families[name]
    metric = HistogramMetricFamily(PREFIX + name, family.help, labels=family.labels)
    for labels, bounds, counts, total in each:
        metric.add_metric([str(label) for label in labels], _cumulative(bounds, counts), total)
    return metric


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    running, buckets = 0, []
    for bound, count in zip(bounds, counts, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
    return buckets
