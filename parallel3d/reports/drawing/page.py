"""A simulated schedule as one HTML page that needs nothing else: picture, tables, and the critical path on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from parallel3d.pipeline.schedules.actions import Kind
from parallel3d.pipeline.simulation.outcome import Reason, Simulation
from parallel3d.reports.drawing.frame import html_page, html_table, safe
from parallel3d.reports.drawing.lanes import Lane, lanes_of
from parallel3d.reports.drawing.picture import draw
from parallel3d.reports.drawing.svg import to_svg
from parallel3d.reports.drawing.words import count, facts, number, percent, title


def to_page(simulation: Simulation, measured: Sequence[Lane] | None = None) -> str:
    """Well-formed as XML too. A checkbox and CSS show the critical path, so nothing has to run."""
    name = title(simulation.table)
    critical = [step.action for step in simulation.critical_path]
    picture = draw(lanes_of(simulation), measured, title=name, subtitle=facts(simulation), critical=critical)
    body = f"""<input type="checkbox" id="critical" checked="checked"/>
<label for="critical">critical path</label>
<figure>
{to_svg(picture)}</figure>
<p class="critical-path">{safe(_critical_path(simulation))}</p>
<div class="tables">
{html_table(("rank", "stages", "busy", "idle", "bubble"), _ranks(simulation), "Ranks")}
{html_table(("stage", "rank", "peak activations"), _stages(simulation), "Stages")}
</div>"""
    return html_page(name, body, _STYLE)


def _critical_path(simulation: Simulation) -> str:
    steps = simulation.critical_path
    kinds = Counter(step.action.kind for step in steps)
    moves = sum(step.reason is Reason.DATA for step in steps)
    travel = sum(step.transfer for step in steps)
    parts = ", ".join(f"{kinds[kind]} {kind}" for kind in Kind if kind in kinds)
    return (
        f"Critical path: {count(len(steps), 'action')} ({parts}), {count(moves, 'change')} of rank, "
        f"{number(travel)} of {number(simulation.makespan)} on the way between ranks."
    )


def _ranks(simulation: Simulation) -> Iterator[tuple[str, ...]]:
    rows = zip(simulation.busy, simulation.idle, simulation.rank_bubble_ratios, strict=True)
    for rank, (busy, idle, bubble) in enumerate(rows):
        stages = " ".join(map(str, simulation.table.stages_of_rank(rank)))
        bar = f'<span class="bar"><span style="width:{100 * bubble:.1f}%"></span></span>'
        yield str(rank), stages, number(busy), number(idle), f"{bar}{percent(bubble)}"


def _stages(simulation: Simulation) -> Iterator[tuple[str, ...]]:
    most = max(simulation.peak_activations, default=0) or 1
    for stage, peak in enumerate(simulation.peak_activations):
        bar = f'<span class="bar"><span style="width:{100 * peak / most:.1f}%"></span></span>'
        yield str(stage), str(simulation.table.rank_of_stage[stage]), f"{bar}{peak}"


_STYLE = """
main { max-width: max-content; margin: 0 auto; padding: 16px; }
label { margin-left: 4px; cursor: pointer; }
#critical { margin-left: 24px; accent-color: var(--critical); }
figure { margin: 0; overflow-x: auto; }
.critical-path { display: none; margin: 0 24px 16px; color: var(--muted); }
.p3d .path, .p3d .box.critical rect { stroke: none; }
.p3d .path { display: none; }
#critical:checked ~ .critical-path { display: block; }
#critical:checked ~ figure .path { display: inline; }
#critical:checked ~ figure .box:not(.critical) { opacity: 0.45; }
#critical:checked ~ figure .box.critical rect { stroke: var(--critical); stroke-width: 2; }
.tables { display: flex; flex-wrap: wrap; gap: 16px 56px; margin: 8px 24px 24px; align-items: flex-start; }
.bar { display: inline-block; width: 72px; height: 8px; margin-right: 10px; border-radius: 4px;
  background: var(--row); overflow: hidden; }
.bar span { display: block; height: 100%; background: var(--muted); }
"""
