"""The dashboard of a run as a whole: does it get on, where does its time go, and does it learn."""

from __future__ import annotations

from monitoring.dashboards.dashboard import SHOWN, Dashboard, Section
from monitoring.dashboards.panels import (
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    YELLOW,
    Panel,
    Query,
    Steps,
    facts,
    lines,
    number,
    states,
)

_GOODPUT: Steps = ((None, RED), (0.3, ORANGE), (0.5, YELLOW), (0.7, GREEN))
_SEVERITIES: Steps = ((None, "transparent"), (1, YELLOW), (2, ORANGE), (3, RED), (4, PURPLE))
_PHASE_COLOURS = {
    "compute": "green",
    "tp_comm": "dark-blue",
    "pp_comm": "blue",
    "dp_comm": "light-blue",
    "bubble": "orange",
    "straggler": "red",
    "data": "purple",
    "optimizer": "dark-green",
    "checkpoint": "brown",
    "other": "text",
}


def run_dashboard() -> Dashboard:
    """The same for every mesh."""
    return Dashboard(
        "parallel3d-run",
        "parallel3d: run",
        "Does it get on, where does its time go, does it learn.",
        (
            Section("At a glance", _glance()),
            Section("Where the time goes", _time()),
            Section("Training", _training()),
        ),
    )


def _glance() -> list[Panel]:
    return [
        number(
            "Goodput",
            "The share of wall time in which ranks compute, all ranks together.",
            Query(SHOWN.goodput),
            unit="percentunit",
            steps=_GOODPUT,
        ),
        number("Tokens/s", "Tokens that all replicas train on in a second.", Query(SHOWN.tokens)),
        number("Step", "The mean of the steps that ended lately.", Query(SHOWN.step_seconds), unit="s"),
        number("Loss", "Of the last step.", Query(SHOWN.series("training_loss"))),
        number("Steps", "That ended well.", Query(SHOWN.series("steps_total", 'outcome="ok"'))),
        number(
            "Since the last step",
            "Much more than a step takes: the run hangs.",
            Query(f"time() - {SHOWN.series('last_step_timestamp_seconds')}"),
            unit="s",
        ),
        facts(
            "Run",
            "What runs.",
            Query(SHOWN.series("run_info"), instant=True),
            shown=("run_id", "model", "mesh", "schedule", "precision", "instance"),
        ),
    ]


def _time() -> list[Panel]:
    return [
        lines(
            "Goodput",
            "The share of wall time in which ranks compute; 0 while nothing moves. Model FLOPs utilization beside it, "
            "on devices whose peak is known.",
            Query(SHOWN.goodput, "goodput"),
            Query(SHOWN.series("model_flops_utilization_ratio"), "MFU"),
            unit="percentunit",
            least=0,
            most=1,
        ),
        lines("Throughput", "Tokens a second, all replicas.", Query(SHOWN.tokens, "tokens/s"), least=0),
        lines(
            "Phase share",
            "What the ranks' time went into; adds up to 100 %. Overlapped communication is not in it.",
            Query(SHOWN.phase_share, "{{phase}}"),
            unit="percentunit",
            stacked=True,
            least=0,
            most=1,
            colours=_PHASE_COLOURS,
        ),
        lines(
            "Step time",
            "Of all steps that ended: their mean, and quantiles as far as the histogram's buckets tell.",
            Query(SHOWN.step_seconds, "mean"),
            Query(SHOWN.quantile(0.5, "step_duration_seconds"), "median"),
            Query(SHOWN.quantile(0.99, "step_duration_seconds"), "99 %"),
            unit="s",
            least=0,
        ),
        states(
            "Bottlenecks",
            "What the run has found, by kind; its page and `parallel3d report` tell evidence and remedy.",
            Query(SHOWN.bottlenecks, "{{kind}}"),
            steps=_SEVERITIES,
            names=("none", "low", "medium", "high", "critical"),
            height=12,
        ),
    ]


def _training() -> list[Panel]:
    return [
        lines("Loss", "The whole batch's mean.", Query(SHOWN.series("training_loss"), "loss")),
        lines("Gradient norm", "Of all weights, before clipping.", Query(SHOWN.series("gradient_norm"), "norm")),
        lines("Learning rate", "Of the last step.", Query(SHOWN.series("learning_rate"), "rate"), least=0),
        lines(
            "Steps that failed, gradients that were not finite",
            "Since the run began. Both are 0 in a healthy run.",
            Query(SHOWN.series("steps_total", 'outcome="failed"'), "failed steps"),
            Query(SHOWN.series("nonfinite_gradients_total"), "non-finite gradients"),
            least=0,
        ),
    ]
