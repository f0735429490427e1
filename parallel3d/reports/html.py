"""A run as one HTML page that needs nothing else: its curves, where the time went, what held it up, its pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from monitoring.events.time_parts import MEANINGS, PARTS, TimeParts
from parallel3d.pipeline.simulation.measured import compare
from parallel3d.reports.drawing.charts import line_chart, stacked_chart
from parallel3d.reports.drawing.frame import html_page, html_table, safe
from parallel3d.reports.drawing.lanes import lanes_of, lanes_of_measured
from parallel3d.reports.drawing.picture import draw
from parallel3d.reports.drawing.svg import MONO, SANS, to_svg
from parallel3d.reports.drawing.words import count, percent, plain, show_bytes
from parallel3d.reports.report import AXES, EFFICIENCY_MEANINGS, Report, remainder_share, time_rows
from parallel3d.reports.run_reader import FinishedRun
from parallel3d.reports.snapshot import RankInfo, thinned
from parallel3d.reports.text import WHOLE, facts, milliseconds, remedy
from runtime.errors import InvalidCall

_LOG_LINES = 100
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


def to_page(run: FinishedRun) -> str:
    """Well-formed as XML too."""
    report = run.report()
    name, status = f"run {run.run_id}", run.status
    sections = (
        f'<h1>{safe(name)} <span class="status {safe(status)}">{safe(status)}</span></h1>',
        _error(report),
        _facts(report),
        _charts(run),
        _bottlenecks(report),
        _efficiency(report),
        f"<h2>Where the time went</h2>\n{_time(run, report)}",
        _ranks(report),
        _memory(report),
        _statistics(report),
        _pipeline(run),
        _log(run),
        f"<h2>Configuration</h2>\n<pre>{safe(run.config_text)}</pre>" if run.config_text else "",
    )
    return html_page(name, "\n".join(section for section in sections if section), _STYLE)


def _error(report: Report) -> str:
    error = report.run.error
    if error is None:
        return ""
    told = "".join(f"<p>{safe(text)}</p>" for text in (str(error["message"]), *error["notes"]))
    trace = f"<pre>{safe(str(error['traceback']))}</pre>" if error["traceback"] else ""
    return f'<section class="error">{told}{trace}</section>'


def _facts(report: Report) -> str:
    pairs = [*facts(report)]
    wanted = f" of {report.run.steps:,}" if type(report.run.steps) is int else ""
    pairs.append(("steps", f"{report.totals.steps:,}{wanted}"))
    if report.statistics is not None:
        pairs.append(("a step", milliseconds(report.statistics.mean)))
    if memory := report.memory:
        pairs.append(("memory", show_bytes(sum(memory.values()))))
    rows = "".join(f"<div><dt>{safe(key)}</dt><dd>{safe(value)}</dd></div>" for key, value in pairs)
    return f'<dl class="facts">\n{rows}\n</dl>'


def _charts(run: FinishedRun) -> str:
    loss = [(step["step"], step["loss"]) for step in run.steps if step["loss"] is not None]
    speed = [
        (step["step"], step["tokens"] / step["seconds"])
        for step in run.steps
        if step["tokens"] is not None and (step["seconds"] or 0) > 0
    ]
    known = thinned([step for step in run.counted if step["parts"] is not None])
    layers = {part: (COLOURS[part], [1e3 * step["parts"][part] for step in known]) for part in PARTS}
    charts = (
        line_chart("Loss", "mean of the batch", loss),
        line_chart("Throughput", "tokens/s", speed),
        stacked_chart("Parts of a step", "ms, mean of the ranks", [step["step"] for step in known], layers),
    )
    return f'<div class="charts">\n{"".join(charts)}\n</div>'


# What held it up.


def _bottlenecks(report: Report) -> str:
    if not report.bottlenecks and not report.was_watched:
        return ""
    items = "".join(map(_bottleneck, report.bottlenecks))
    shown = f'<ul class="bottlenecks">{items}</ul>' if items else "<p>None was found.</p>"
    return f"<h2>Bottlenecks</h2>\n{shown}"


def _bottleneck(found: Mapping[str, Any]) -> str:
    severity, kind, message = (safe(str(found.get(key) or "")) for key in ("severity", "kind", "message"))
    evidence = ", ".join(f"{key} {_shown(value)}" for key, value in _evidence(found))
    note = f'<p class="note">{safe(evidence)}</p>' if evidence else ""
    return (
        f'<li><span class="severity {severity}">{severity}</span> <strong>{kind}</strong>: {message}'
        f"<p>{safe(remedy(found))}</p>{note}</li>"
    )


def _evidence(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    evidence = found.get("evidence")
    return iter(evidence.items()) if isinstance(evidence, Mapping) else iter(())


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _efficiency(report: Report) -> str:
    known = [(axis, value) for axis in AXES if (value := report.efficiency[axis]) is not None]
    rows = ((axis, f"{_gauge(value)}{percent(value)}", safe(EFFICIENCY_MEANINGS[axis])) for axis, value in known)
    return f'<h2>Efficiency by axis</h2>\n<div class="words">{html_table(("", "", ""), rows)}</div>' if known else ""


def _gauge(share: float) -> str:
    width = 100 * min(1.0, max(0.0, share))
    return f'<span class="gauge"><i style="width:{width:.1f}%"></i></span>'


# Tables.


def _time(run: FinishedRun, report: Report) -> str:
    if not report.parts.total:
        return "<p>No step was made.</p>" if not run.steps else "<p>Nothing was noted of it.</p>"
    legend = "".join(
        f'<span><i style="background:{COLOURS[part]}"></i>{safe(part)}: {safe(MEANINGS[part])}</span>' for part in PARTS
    )
    rows = time_rows(report)
    cells = ((safe(row.name), _bar(row.parts), *_shares(row.parts, row.remainder)) for row in rows)
    table = html_table(("", "", *PARTS, "remainder"), cells)
    left_out = f"{count(run.num_warm_up, 'step')} of warm-up are left out." if run.num_warm_up else ""
    return f'<p class="legend">{legend}</p><div class="wide">{table}</div><p class="note">{left_out}</p>'


def _shares(parts: TimeParts, remainder: float | None) -> list[str]:
    rest = remainder_share(parts, remainder)
    return [*(percent(share) for share in parts.shares().values()), "" if rest is None else percent(rest)]


def _bar(parts: TimeParts) -> str:
    pieces = "".join(
        f'<i style="width:{100 * share:.2f}%;background:{COLOURS[part]}" title="{part} {percent(share)}"></i>'
        for part, share in parts.shares().items()
    )
    return f'<span class="bar">{pieces}</span>'


def _ranks(report: Report) -> str:
    if not report.ranks:
        return ""
    times = ("straggler score", "processor time", "without a core")
    head = ("", "host", "device", "parameters", "bubble", *times)
    rows = (tuple(map(safe, _rank(rank))) for rank in report.ranks)
    return f'<h2>Ranks</h2>\n<div class="wide">{html_table(head, rows)}</div>'


def _rank(rank: RankInfo) -> Iterator[str]:
    def shown(value: Any, form: str, unit: str = "") -> str:
        return format(value, form) + unit if type(value) in (int, float) else ""

    yield rank.name
    yield rank.host or ""
    yield rank.device or ""
    yield shown(rank.parameters, ",")
    yield percent(rank.bubble) if type(rank.bubble) is float else ""
    yield shown(rank.straggler_score, ".2f")
    yield shown(rank.compute_cpu_seconds, ".2f", " s")
    yield shown(rank.core_wait_seconds, ".2f", " s")


def _memory(report: Report) -> str:
    """The most of each rank, and what its memory is for."""
    memory, budget = report.memory, report.memory_budget
    told = [rank for rank in report.ranks if rank.rank in memory]
    kinds = sorted({kind for rank in told for kind in rank.memory_kinds} - {WHOLE})
    rows = []
    for rank in told:
        used, of_kinds = memory[rank.rank], rank.memory_kinds
        share = (percent(used / budget),) if budget else ()
        sizes = (show_bytes(of_kinds[kind]) if kind in of_kinds else "" for kind in kinds)
        rows.append((safe(rank.name), show_bytes(used), *share, *sizes))
    head = ("", "the most", *((f"of {show_bytes(budget)}",) if budget else ()), *map(safe, kinds))
    return f'<h2>Memory</h2>\n<div class="wide">{html_table(head, rows)}</div>' if told else ""


def _statistics(report: Report) -> str:
    found = report.statistics
    if found is None:
        return ""
    values = (found.mean, found.median, found.p95, found.p99, found.least, found.most)
    row = (str(found.num_steps), *map(milliseconds, values))
    table = html_table(("steps", "mean", "median", "p95", "p99", "least", "most"), [row])
    return f'<h2>Step times</h2>\n<div class="wide">{table}</div>'


# The last step, and what was said.


def _pipeline(run: FinishedRun) -> str:
    found = run.last_step()
    if found is None:
        return ""
    number, measured = found[0], found[1].in_milliseconds()
    try:
        planned = compare(measured).planned
    except (InvalidCall, ValueError, ArithmeticError):  # a table that is not whole, of a run that was cut short
        return ""
    bubbles = f"bubble planned {percent(planned.bubble_ratio)}, measured {percent(measured.bubble_ratio)}"
    picture = draw(
        lanes_of(planned),
        lanes_of_measured(measured),
        title=f"step {number}: {plain(run.schedule)}",
        subtitle=f"milliseconds; {bubbles}",
    )
    return f'<h2>The last step\'s pipeline</h2>\n<figure class="wide">\n{to_svg(picture)}</figure>'


def _log(run: FinishedRun) -> str:
    lines = "\n".join(map(log_line, run.log[-_LOG_LINES:]))
    return f"<h2>Log</h2>\n<pre>{safe(lines)}</pre>" if lines else ""


def log_line(line: Mapping[str, Any]) -> str:
    """One record, as a terminal would have it."""
    known = ("time", "level", "event")
    rest = " ".join(f"{key}={value}" for key, value in line.items() if key not in known and value is not None)
    level, event = str(line.get("level", "")), str(line.get("event", ""))
    return f"{_clock(line.get('time'))}{level:<8} {event}  {rest}".rstrip()


def _clock(moment: Any) -> str:
    if type(moment) not in (int, float) or not 0 <= moment < 1e11:
        return ""
    return f"{datetime.fromtimestamp(moment, UTC):%H:%M:%S} "


_STYLE = f"""
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
