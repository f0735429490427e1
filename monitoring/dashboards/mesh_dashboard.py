"""The dashboard of the mesh: who is slow, which stage waits, which axis carries how much."""

from __future__ import annotations

from math import ceil

from monitoring.dashboards.dashboard import SHOWN, Dashboard, Section
from monitoring.dashboards.expressions import RUN, SLOW
from monitoring.dashboards.panels import GREEN, ORANGE, RED, YELLOW, Panel, Query, Steps, grid, lines, states
from monitoring.dashboards.setup import MOST_ROWS, Setup

_SCORES: Steps = ((None, RED), (SLOW, ORANGE), (0.8, YELLOW), (0.9, GREEN))
_ROW = 1.2
"""Height of a table's row, in Grafana's units."""


def mesh_dashboard(setup: Setup) -> Dashboard:
    """Without what a mesh of this shape has not: stages where pp is 1, exchanges where there is one rank."""
    sections = [Section("Stragglers", _stragglers(setup)), Section("Ranks' time", _time(setup))]
    if setup.world_size > 1:
        sections.append(Section("Communication", _communication()))
    return Dashboard(
        "parallel3d-mesh", "parallel3d: mesh", "Who is slow, which stage waits, which axis carries how much.", sections
    )


def _stragglers(setup: Setup) -> list[Panel]:
    rows = setup.dp * setup.tp
    shown = min(setup.world_size, MOST_ROWS)
    slowest = SHOWN.score if setup.world_size <= MOST_ROWS else f"bottomk({MOST_ROWS}, {SHOWN.score})"
    return [
        grid(
            "Stragglers now, DP x TP x PP",
            "Each rank's own speed over the best of those with the same work: 1 is as fast, 0.5 takes twice as long. "
            "A row is a replica's tensor-parallel rank, a column a pipeline stage.",
            Query(_with_row(SHOWN.score), instant=True),
            rows="row",
            columns="pp",
            unit="percentunit",
            steps=_SCORES,
            height=max(6, min(24, ceil(3 + rows * _ROW))),
        ),
        lines(
            "Waiting for stragglers",
            "The share of each rank's time that it waits for ranks that come late. The straggler itself waits least.",
            Query(_rank_share("straggler", setup), "rank {{rank}}"),
            unit="percentunit",
            least=0,
        ),
        states(
            f"Stragglers over time{'' if setup.world_size <= MOST_ROWS else f': the {MOST_ROWS} slowest'}",
            f"The same score. Below {SLOW} for three steps, a rank is named.",
            Query(slowest, "dp {{dp}} tp {{tp}} pp {{pp}} (rank {{rank}})"),
            unit="percentunit",
            steps=_SCORES,
            height=max(6, min(24, ceil(3 + shown / 2))),
        ),
    ]


def _time(setup: Setup) -> list[Panel]:
    panels = [
        lines(
            "Computing, by rank",
            "The share of each rank's time in forward and backward. Lines far apart: stages are uneven.",
            Query(_rank_share("compute", setup), "rank {{rank}}"),
            unit="percentunit",
            least=0,
            most=1,
        ),
    ]
    if setup.pp > 1:
        panels.append(
            lines(
                "Bubble by stage",
                "The share of the pipeline's time in which a stage waits for others, as the schedule has it.",
                Query(SHOWN.series("pipeline_bubble_ratio"), "stage {{pp_rank}}"),
                unit="percentunit",
                least=0,
                most=1,
            )
        )
    return panels


def _communication() -> list[Panel]:
    return [
        lines(
            "Bytes by axis",
            "What collectives and messages carried, all ranks together.",
            Query(SHOWN.axis_bytes, "{{axis}}"),
            unit="Bps",
            stacked=True,
            least=0,
        ),
        lines(
            "Bus bandwidth",
            "As nccl-tests defines it, so that it compares with what the hardware can carry.",
            Query(SHOWN.series("collective_bus_bandwidth_bytes_per_second"), "{{op}} {{axis}} {{strategy}}"),
            unit="Bps",
            least=0,
        ),
        lines(
            "Time of a call",
            "From call to end; calls may overlap with computing. Half of the calls end within this.",
            Query(SHOWN.quantile(0.5, "collective_duration_seconds", "op, axis"), "{{op}} {{axis}}"),
            unit="s",
            least=0,
        ),
        lines(
            "Slowest calls",
            "All but one in a hundred end within this.",
            Query(SHOWN.quantile(0.99, "collective_duration_seconds", "op, axis"), "{{op}} {{axis}}"),
            unit="s",
            least=0,
        ),
    ]


def _with_row(expr: str) -> str:
    """A label for the grid's rows: replica and tensor-parallel rank in one."""
    return f'label_replace(label_join({expr}, "row", " tp ", "dp", "tp"), "row", "dp $1", "row", "(.*)")'


def _rank_share(phase: str, setup: Setup) -> str:
    """Of a rank's own accounted time; the largest only where ranks are too many for one picture."""
    one = SHOWN.rate("phase_seconds_total", "rank", f'phase="{phase}"')
    share = f"{one} / on ({RUN}, rank) ({SHOWN.rate('phase_seconds_total', 'rank')} > 0)"
    return share if setup.world_size <= MOST_ROWS else f"topk({MOST_ROWS}, {share})"
