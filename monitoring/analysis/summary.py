"""What an observer knows of a run's time, as `metrics.json` has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monitoring.analysis.totals import RankTotals
from monitoring.events.time_parts import mean_of

if TYPE_CHECKING:
    from monitoring.live.observer import Observer


def summarize(observer: Observer) -> dict[str, Any]:
    """`parts` are shares of the ranks' mean step; seconds are those of the steps that count for speed."""
    totals = observer.totals
    return {
        "parts": mean_of([each.counted.parts for each in totals.values()]).shares(),
        "bottlenecks": [each.to_json() for each in observer.bottlenecks],
        "stragglers": [each.to_json() for each in observer.stragglers],
        "nonfinite_gradients": observer.nonfinite,
        "events_dropped": sum(observer.dropped.values()),
        "incomplete_steps": observer.incomplete,
        "ranks": {rank: _of_rank(observer, rank, totals.get(rank)) for rank in sorted(observer.ranks)},
    }


def _of_rank(observer: Observer, rank: int, totals: RankTotals | None) -> dict[str, Any]:
    facts = observer.ranks[rank]
    found: dict[str, Any] = {
        "host": facts.host,
        "memory_bytes": observer.peak_memory.get(rank),
        "memory_kinds": observer.memory.get(rank, {}),
        "straggler_score": observer.scores.get(rank),
        "steps": 0,
    }
    if totals is not None:
        counted = totals.counted
        found |= {
            "steps": counted.num_steps,
            "seconds": counted.parts.to_json(),
            "total_seconds": counted.seconds,
            "remainder_seconds": counted.remainder,
            "compute_cpu_seconds": counted.compute_cpu,
            "core_wait_seconds": counted.core_wait,
            "bubble": counted.bubble,
        }
    return found
