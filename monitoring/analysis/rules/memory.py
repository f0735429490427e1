"""Rules about memory: near the budget, or on some ranks far more than on others."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from monitoring.analysis.facts import RunFacts
from monitoring.analysis.observations import Bottleneck, Severity
from monitoring.analysis.rules.levels import LEVELS, severity_of
from monitoring.analysis.rules.view import View, percent, size

_MATTERS = 0.5  # of the budget: below, there is room enough whatever the ranks use


def memory_imbalance(view: View) -> Iterator[Bottleneck]:
    """One rank fills its budget while others have room: the mesh can't hold more because of that one."""
    used = _used(view)
    if len(used) < 2 or not view.facts.memory_budget:
        return
    most, mean = max(used, key=lambda rank: used[rank]), fmean(used.values())
    if used[most] <= _MATTERS * view.facts.memory_budget:
        return
    severity = severity_of("memory_imbalance", 1 - mean / used[most])
    if severity is None:
        return
    share = used[most] / view.facts.memory_budget
    remedy, key, value = _better_balance(view.facts)
    yield Bottleneck(
        kind="memory_imbalance",
        severity=max(severity, severity_of("memory_pressure", share) or severity, key=list(Severity).index),
        message=f"Rank {most} uses {size(used[most])}, {percent(share)} of its budget, while the mean of the ranks is "
        f"{size(mean)}.",
        evidence={"most_bytes": used[most], "mean_bytes": mean, "budget_bytes": view.facts.memory_budget},
        remedy=remedy,
        key=key,
        value=value,
        rank=most,
    )


def _better_balance(facts: RunFacts) -> tuple[str, str, str | None]:
    """Words, key, value."""
    if facts.pp > 1:
        words = "Cut the layers by their parameters, so that stages hold equally much."
        return words, "pipeline.layers_per_stage", "parameters"
    own = "ook for tensors that only this rank keeps"
    if facts.dp > 1 and not facts.shards_optimizer:
        return f"Shard the optimizer's state, so that there is more room, and l{own}.", "optimizer.shard", "true"
    return f"L{own}; or give ranks a larger budget, if the machine has more.", "memory.budget", None


def memory_pressure(view: View) -> Iterator[Bottleneck]:
    """A rank is near the end of its budget, and no better balance would change that."""
    used, budget = _used(view), view.facts.memory_budget
    if not used or not budget:
        return
    most = max(used, key=lambda rank: used[rank])
    share = used[most] / budget
    severity = severity_of("memory_pressure", share)
    if severity is None:
        return
    if view.is_found(["memory_imbalance"]) and fmean(used.values()) <= LEVELS["memory_pressure"].low * budget:
        return
    remedy, key, value = _less_memory(view)
    yield Bottleneck(
        kind="memory_pressure",
        severity=severity,
        message=f"Rank {most} uses {size(used[most])}, {percent(share)} of its budget of {size(budget)}.",
        evidence={"bytes": used[most], "budget_bytes": budget, "share": share},
        remedy=remedy,
        key=key,
        value=value,
        rank=most,
    )


def _less_memory(view: View) -> tuple[str, str, str]:
    """Words, key, value."""
    facts = view.facts
    samples = facts.batch_size // facts.dp
    if samples and samples % (2 * facts.microbatches) == 0:
        words = "Cut the batch into smaller microbatches: a rank holds fewer activations at a time."
        return words, "pipeline.microbatches", str(2 * facts.microbatches)
    if facts.dp > 1 and not facts.shards_optimizer:
        words = "Shard the optimizer's state over the replicas, or use more tensor-parallel ranks or stages."
        return words, "optimizer.shard", "true"
    words = "Use more tensor-parallel ranks or stages; or give ranks a larger budget, if the machine has more."
    # Where tensor parallelism costs too much already, the rules before have said: less of it.
    axis = "pp" if view.is_found(["tp_comm", "tp_efficiency"]) else "tp"
    return words, f"parallel.{axis}", str(2 * getattr(facts, axis))


def _used(view: View) -> dict[int, int]:
    return {number: rank.memory for number, rank in view.window.ranks.items() if rank.memory is not None}
