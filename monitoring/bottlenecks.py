"""Bottlenecks: what costs the time of a window of steps, each with evidence, remedy and predicted gain.

Causes come before their symptoms, and hide them: who repairs the cause need not hear of what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from monitoring.facts import RankFacts, RunFacts
from monitoring.observations import Bottleneck, Window
from monitoring.rules.communication import communication, small_buckets, tp_efficiency
from monitoring.rules.levels import KINDS, LEVELS, Levels, rank_of
from monitoring.rules.machine import event_loop_lag, oversubscribed_cores, stragglers
from monitoring.rules.memory import memory_imbalance, memory_pressure
from monitoring.rules.pipeline import pipeline_utilization, too_few_microbatches, uneven_stages
from monitoring.rules.supplies import checkpoint_stalls, data_starved
from monitoring.rules.view import Plan, Planner, View

__all__ = ["KINDS", "LEVELS", "Levels", "Plan", "Planner", "find_bottlenecks"]

LEAST_STEPS = 3
"""A window of fewer tells nothing: one late step in two is no rule."""
Rule = Callable[[View], Iterable[Bottleneck]]
_RULES: tuple[Rule, ...] = (
    oversubscribed_cores,
    stragglers,
    data_starved,
    checkpoint_stalls,
    event_loop_lag,
    small_buckets,
    communication,
    tp_efficiency,
    uneven_stages,
    too_few_microbatches,
    pipeline_utilization,
    memory_imbalance,
    memory_pressure,
)
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
    "pipeline_utilization": (_NO_CORE, _LATE, "uneven_stages", "too_few_microbatches"),
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
    for rule in _RULES:
        found = [each for each in rule(view) if not view.is_found(HIDDEN_BY.get(each.kind, ()))]
        view.found.extend(found)
    return sorted(view.found, key=lambda each: (-rank_of(each.severity), -(each.gain or 0.0)))
