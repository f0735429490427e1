"""How a run's page looks: a colour for each part of a step, and the style sheet."""

from __future__ import annotations

from monitoring.events.time_parts import PARTS
from parallel3d.reports.drawing.svg import MONO, SANS

# Told apart by people who see fewer colours too.
COLOURS = {
    "compute": "#62a8ea",
    "tp_comm": "#e58fbc",
    "pp_comm": "#f2a93b",
    "dp_comm": "#4cc29a",
    "bubble": "#d9dee6",
    "straggler": "#c2413b",
    "data": "#e2725b",
    "optimizer": "#a993e8",
    "checkpoint": "#8a6d3b",
    "other": "#b3bac5",
}
assert tuple(COLOURS) == PARTS

STYLE = f"""
main {{ max-width: 1280px; margin: 0 auto; padding: 24px; }}
h1 {{ font-size: 22px; }}
h2 {{ font-size: 16px; margin-top: 32px; }}
.status, .severity {{ font-size: 13px; font-weight: 600; padding: 2px 10px; border-radius: 10px;
  background: var(--row); }}
.status.completed {{ background: #4cc29a; color: #0f1720; }}
.status.failed, .status.hung, .status.killed, .severity.critical {{ background: var(--critical); color: #ffffff; }}
.severity.high {{ background: #e2725b; color: #0f1720; }}
.severity.medium {{ background: #f2a93b; color: #0f1720; }}
.error {{ border-left: 4px solid var(--critical); padding-left: 14px; }}
.facts {{ display: flex; flex-wrap: wrap; gap: 8px 36px; margin: 0; }}
dt {{ color: var(--muted); }}
dd {{ margin: 0; font-size: 17px; font-variant-numeric: tabular-nums; }}
.charts {{ display: flex; flex-wrap: wrap; gap: 16px 24px; margin-top: 24px; }}
.charts figure {{ margin: 0; flex: 1 1 420px; max-width: 628px; }}
.charts svg {{ width: 100%; height: auto; font: 11px {SANS}; }}
figure {{ margin: 0; }}
figcaption {{ font-weight: 600; }}
.unit, .note {{ color: var(--muted); font-weight: 400; }}
.grid line {{ stroke: var(--grid); }}
.grid text {{ fill: var(--muted); }}
.curve {{ fill: none; stroke: #3b87d1; stroke-width: 1.8; stroke-linejoin: round; }}
.bottlenecks {{ list-style: none; padding: 0; }}
.bottlenecks li {{ padding: 10px 0; border-bottom: 1px solid var(--grid); }}
.bottlenecks p {{ margin: 6px 0 0; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 20px; color: var(--muted); }}
.legend i {{ display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 2px; }}
.wide {{ overflow-x: auto; }}
.wide th, .wide td {{ white-space: nowrap; }}
th:first-child, td:first-child, .words td:last-child {{ text-align: left; }}
.bar {{ display: inline-flex; width: 200px; height: 14px; border-radius: 3px; overflow: hidden;
  background: var(--row); }}
.bar i, .gauge i {{ display: block; height: 100%; }}
.gauge {{ display: inline-block; width: 160px; height: 10px; margin-right: 12px; border-radius: 5px; overflow: hidden;
  background: var(--row); }}
.gauge i {{ background: #4cc29a; }}
pre {{ background: var(--row); padding: 14px; border-radius: 6px; overflow-x: auto; font: 12px/1.5 {MONO}; }}
"""
