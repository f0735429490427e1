"""Bottlenecks: what costs the time of a window of steps, each with evidence, remedy and predicted gain.

Rules for causes run before those for their symptoms, and a cause that is found hides its symptoms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from monitoring.analysis.facts import RankFacts, RunFacts
from monitoring.analysis.observations import Bottleneck, Window
from monitoring.analysis.rules.communication import communication, small_buckets, tp_efficiency
from monitoring.analysis.rules.levels import KINDS, LEVELS, Levels, rank_of
from monitoring.analysis.rules.machine import event_loop_lag, oversubscribed_cores, stragglers
from monitoring.analysis.rules.memory import memory_imbalance, memory_pressure
from monitoring.analysis.rules.pipeline import pipeline_utilization, too_few_microbatches, uneven_stages
from monitoring.analysis.rules.supplies import checkpoint_stalls, data_starved
from monitoring.analysis.rules.view import Plan, Planner, View

__all__ = ["KINDS", "LEVELS", "Levels", "Plan", "Planner", "find_bottlenecks"]

LEAST_STEPS = 3
"""A window of fewer tells nothing: one late step in two is no rule."""
Rule = Callable[[View], Iterable[Bottleneck]]
_RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("oversubscribed_cores",), oversubscribed_cores),
    (("straggler",), stragglers),
    (("data_starved",), data_starved),
    (("checkpoint_stalls",), checkpoint_stalls),
    (("event_loop_lag",), event_loop_lag),
    (("small_buckets",), small_buckets),
    (("tp_comm", "pp_comm", "dp_comm"), communication),
    (("tp_efficiency",), tp_efficiency),
    (("uneven_stages",), uneven_stages),
    (("too_few_microbatches",), too_few_microbatches),
    (("pipeline_utilization",), pipeline_utilization),
    (("memory_imbalance",), memory_imbalance),
    (("memory_pressure",), memory_pressure),
)
"""Each with the kinds that it may name, causes before their symptoms."""
_NO_CORE, _LATE = "oversubscribed_cores", "straggler"
HIDDEN_BY: Mapping[str, tuple[str, ...]] = {
    "event_loop_lag": (_NO_CORE,),
    "tp_comm": (_NO_CORE,),
    "pp_comm": (_NO_CORE,),
    "dp_comm": (_NO_CORE, "small_buckets"),
    "tp_efficiency": (_NO_CORE, _LATE, "tp_comm"),
    # Predictions of the pipeline take what stages took for what they need, and a core for each rank.
    "uneven_stages": (_NO_CORE, _LATE),
    "too_few_microbatches": (_NO_CORE, _LATE),
    # A stage that waits for messages keeps others waiting for its own.
    "pipeline_utilization": (_NO_CORE, _LATE, "pp_comm", "uneven_stages", "too_few_microbatches"),
    "memory_imbalance": ("uneven_stages",),
}
"""The causes of each symptom: it is not named while one of them is."""


def find_bottlenecks(
    window: Window, facts: RunFacts, ranks: Mapping[int, RankFacts], planner: Planner | None = None
) -> list[Bottleneck]:
    """The most severe first, of equally severe ones that with the largest gain. Nothing without data."""
    if window.num_steps < LEAST_STEPS or window.seconds <= 0 or not window.ranks:
        return []
    view = View(window, facts, ranks, None if planner is None or facts.pp < 2 else planner.plan(window))
    for kinds, rule in _RULES:
        wanted = [kind for kind in kinds if not view.is_found(HIDDEN_BY.get(kind, ()))]
        if wanted:  # predictions are slow, so hidden kinds are skipped
            view.found.extend([each for each in rule(view) if each.kind in wanted])
    return sorted(view.found, key=lambda each: (-rank_of(each.severity), -(each.gain or 0.0)))
