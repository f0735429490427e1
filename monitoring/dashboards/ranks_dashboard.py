"""The dashboard of the ranks as processes: memory, cores, data, event loops, and whether they still report."""

from __future__ import annotations

from monitoring.dashboards.dashboard import SHOWN, Dashboard, Section
from monitoring.dashboards.expressions import RUN
from monitoring.dashboards.panels import Panel, Query, lines
from monitoring.dashboards.setup import MOST_ROWS, Setup

_WHOLE = "process"
"""The kind of memory that holds all others."""


def ranks_dashboard(setup: Setup) -> Dashboard:
    """A line a rank, as long as that can be read; then the ones that matter most."""
    return Dashboard(
        "parallel3d-ranks",
        "parallel3d: ranks",
        "Memory, cores, data and event loops, and whether ranks still report.",
        (
            Section("Memory", _memory(setup)),
            Section("Cores and data", _cores_and_data(setup)),
            Section("Event loops and reports", _reports(setup)),
        ),
    )


def _memory(setup: Setup) -> list[Panel]:
    by_rank, by_kind = (SHOWN.series("memory_bytes", f'kind{sign}"{_WHOLE}"') for sign in ("=", "!="))
    return [
        lines(
            "Memory by rank",
            "What a rank uses; what ranks share is divided between them. The budget is `memory.budget`, if one is set.",
            Query(most(by_rank, setup), "rank {{rank}}"),
            Query(SHOWN.series("memory_budget_bytes"), "budget"),
            unit="bytes",
            least=0,
        ),
        lines(
            "Memory by kind",
            "What tensors take, all ranks together.",
            Query(f"sum by ({RUN}, kind) ({by_kind})", "{{kind}}"),
            unit="bytes",
            stacked=True,
            least=0,
        ),
    ]


def _cores_and_data(setup: Setup) -> list[Panel]:
    return [
        lines(
            "Computing with a core",
            "Of the time by the clock that ranks spend computing, the share in which they had a core. Less than 100 %: "
            "more threads than cores. And what of the steps' time no phase explains.",
            Query(SHOWN.core_share, "with a core"),
            Query(SHOWN.unattributed_share, "unexplained"),
            unit="percentunit",
            least=0,
            most=1,
        ),
        lines(
            "Data queue",
            "Batches that are ready when a rank asks for one. At 0 ranks wait for data.",
            Query(least(SHOWN.series("data_queue_batches"), setup), "rank {{rank}}"),
            Query(SHOWN.series("data_queue_capacity_batches"), "capacity"),
            least=0,
        ),
    ]


def _reports(setup: Setup) -> list[Panel]:
    age = f"time() - {SHOWN.series('rank_last_report_timestamp_seconds')}"
    return [
        lines(
            "Event-loop lag",
            "How late timers run in the ranks' event loops: half, and all but one in a hundred, are less late.",
            Query(SHOWN.quantile(0.5, "event_loop_lag_seconds"), "median"),
            Query(SHOWN.lag, "99 %"),
            unit="s",
            least=0,
        ),
        lines(
            "Worst event-loop lag",
            "The latest timer of each rank since it began.",
            Query(most(SHOWN.series("event_loop_lag_worst_seconds"), setup), "rank {{rank}}"),
            unit="s",
            least=0,
        ),
        lines(
            "Since the last report",
            "Ranks report every second, also within a long step; under torchrun and SLURM once in a step or two.",
            Query(most(age, setup), "rank {{rank}}"),
            unit="s",
            least=0,
        ),
        lines(
            "Events dropped",
            "Records of actions that were lost because nobody took them in time; steps do not wait for that.",
            Query(SHOWN.rate("events_dropped_total"), "all ranks"),
            unit="cps",
            least=0,
        ),
    ]


def most(expr: str, setup: Setup) -> str:
    """Only the largest, where there are more than can be read."""
    return expr if setup.world_size <= MOST_ROWS else f"topk({MOST_ROWS}, {expr})"


def least(expr: str, setup: Setup) -> str:
    """Only the smallest, where there are more than can be read."""
    return expr if setup.world_size <= MOST_ROWS else f"bottomk({MOST_ROWS}, {expr})"
