"""A run as one HTML page that needs nothing else: how the loss went, how fast it was, where the time went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from monitoring.time_parts import MEANINGS, PARTS, TimeParts, mean_of
from parallel3d.drawing.palette import THEMES
from parallel3d.drawing.svg import MONO, SANS
from parallel3d.run_record import RunRecord, Status

_COLOURS = {
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
_WIDTH, _HEIGHT = 640, 220
_LEFT, _BOTTOM, _TOP, _RIGHT = 62, 26, 12, 12
_MOST_POINTS = 1000  # more than the picture has pixels


def to_page(record: RunRecord, run_id: str) -> str:
    """Well-formed as XML too."""
    name = f"run {run_id}"
    return f"""<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{escape(name)}</title>
<style>{_style()}</style>
</head>
<body>
<main>
<h1>{escape(name)} <span class="status {escape(record.status)}">{escape(record.status)}</span></h1>
{_error(record)}
<dl class="facts">
{"".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in _facts(record))}
</dl>
<div class="charts">
{_chart("Loss", "loss", [step.loss for step in record.steps])}
{_chart("Throughput", "tokens/s", [step.tokens_per_second for step in record.steps])}
</div>
<h2>Where the time went</h2>
{_time(record)}
<h2>Ranks</h2>
{_ranks(record)}
<h2>Configuration</h2>
<pre>{escape(_printable(record.config.to_yaml()))}</pre>
</main>
</body>
</html>
"""


def _error(record: RunRecord) -> str:
    if record.error is None:
        return ""
    trace = f"<pre>{escape(_printable(record.error.traceback))}</pre>" if record.error.traceback else ""
    return f'<section class="error"><p>{escape(_printable(record.error.message))}</p>{trace}</section>'


def _printable(text: str) -> str:
    """Without control characters, which XML does not allow and nobody wants to see."""
    return "".join(char if char == "\n" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    mesh = record.config.parallel
    yield "ranks", f"{record.config.world_size} (dp {mesh.dp}, tp {mesh.tp}, pp {mesh.pp})"
    yield "model", f"{record.config.model.factory}, {record.facts.parameters:,} parameters"
    yield "steps", f"{len(record.steps):,} of {record.config.train.steps:,}"
    if not record.steps:
        return
    yield "final loss", f"{record.steps[-1].loss:.4f}"
    yield "tokens/s", f"{record.tokens_per_second:,.0f}"
    counted = [step.seconds for step in record.counted]
    yield "a step", f"{1e3 * sum(counted) / len(counted):.1f} ms"
    if (mfu := record.mfu(record.tokens_per_second)) is not None:
        yield "MFU", f"{100 * mfu:.1f} %"
    if record.bandwidths:
        mean = sum(record.bandwidths) / len(record.bandwidths)
        yield "all-reduce", f"{mean:.2f} GB/s"
    if (memory := record.memory()) is not None:
        yield "memory", f"{memory / 2**30:.2f} GiB"


# Charts.


def _chart(title: str, unit: str, values: Sequence[float]) -> str:
    points = [(step, value) for step, value in enumerate(values) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    every = -(-len(points) // _MOST_POINTS)
    shown = [*points[:-1:every], points[-1]]
    low, high = min(value for _, value in shown), max(value for _, value in shown)
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    last = points[-1][0]

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / ((high - low) or 1.0)

    grid = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,.6g}</text>'
        for tick in ticks
    )
    steps = "".join(
        f'<text x="{x(step):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{label}</text>'
        for step, anchor, label in ((0, "start", "step 0"), (last, "end", f"{last:,}"))
    )
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in shown)
    return (
        f'<figure><figcaption>{escape(title)} <span class="unit">{escape(unit)}</span></figcaption>'
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)} over steps" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><g class="grid">{grid}{steps}</g>'
        f'<polyline class="curve" points="{line}"/></svg></figure>'
    )


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between the two, in steps of 1, 2 or 5 times a power of ten; at least one."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)] or [low]


# Tables.


def _time(record: RunRecord) -> str:
    told = record.told
    if not told:
        return "<p>No step was made.</p>"
    each = [record.parts(rank) for rank in told]
    legend = "".join(
        f'<span><i style="background:{_COLOURS[part]}"></i>{escape(part)}: {escape(MEANINGS[part])}</span>'
        for part in PARTS
    )
    rows = [(record.name(rank), parts) for rank, parts in zip(told, each, strict=True)]
    rows += [("all ranks", mean_of(each))] if len(told) > 1 else []
    cells = ((escape(name), _bar(parts), *(f"{100 * share:.1f} %" for share in _shares(parts))) for name, parts in rows)
    left_out = f"{record.num_warm_up} steps of warm-up are left out." if record.num_warm_up else ""
    return f'<p class="legend">{legend}</p>{_table(("", "", *PARTS), cells)}<p class="note">{left_out}</p>'


def _shares(parts: TimeParts) -> list[float]:
    return [parts.shares()[part] for part in PARTS]


def _bar(parts: TimeParts) -> str:
    shares = {part: 100 * share for part, share in parts.shares().items()}
    pieces = "".join(
        f'<i style="width:{share:.2f}%;background:{_COLOURS[part]}" title="{part} {share:.1f} %"></i>'
        for part, share in shares.items()
    )
    return f'<span class="bar">{pieces}</span>'


def _ranks(record: RunRecord) -> str:
    rows = []
    for rank in sorted(record.ranks):
        totals, found = record.ranks[rank], record.metrics_of(rank)
        memory = "" if totals.memory is None else f"{totals.memory / 2**20:,.0f} MiB"
        bubble = f"{100 * found['bubble']:.1f} %"
        rows.append((escape(record.name(rank)), escape(totals.device), f"{totals.parameters:,}", memory, bubble))
    return _table(("", "device", "parameters", "memory", "bubble"), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _style() -> str:
    def variables(theme: str) -> str:
        return "".join(f"--{role}:{colour};" for role, colour in THEMES[theme].items())

    good, bad = Status.COMPLETED, ",".join(f".status.{each}" for each in (Status.FAILED, Status.HUNG))
    return f"""
:root {{ {variables("light")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables("dark")} }} }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.5 {SANS}; }}
main {{ max-width: 1100px; margin: 0 auto; padding: 24px; }}
h1 {{ font-size: 22px; }}
h2 {{ font-size: 16px; margin-top: 32px; }}
.status {{ font-size: 13px; font-weight: 600; padding: 2px 10px; border-radius: 10px; background: var(--row); }}
.status.{good} {{ background: #4cc29a; color: #0f1720; }}
{bad} {{ background: var(--critical); color: #ffffff; }}
.error {{ border-left: 4px solid var(--critical); padding-left: 14px; }}
.facts {{ display: flex; flex-wrap: wrap; gap: 8px 36px; margin: 0; }}
dt {{ color: var(--muted); }}
dd {{ margin: 0; font-size: 17px; font-variant-numeric: tabular-nums; }}
.charts {{ display: flex; flex-wrap: wrap; gap: 16px 24px; margin-top: 24px; }}
figure {{ margin: 0; flex: 1 1 420px; }}
figcaption {{ font-weight: 600; }}
.unit, .note {{ color: var(--muted); font-weight: 400; }}
svg {{ width: 100%; height: auto; font: 11px {SANS}; }}
.grid line {{ stroke: var(--grid); }}
.grid text {{ fill: var(--muted); }}
.curve {{ fill: none; stroke: #3b87d1; stroke-width: 1.8; stroke-linejoin: round; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 20px; color: var(--muted); }}
.legend i {{ display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 2px; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 16px 4px 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ color: var(--muted); font-weight: 500; }}
.bar {{ display: inline-flex; width: 260px; height: 14px; border-radius: 3px; overflow: hidden;
  background: var(--row); }}
.bar i {{ display: block; height: 100%; }}
pre {{ background: var(--row); padding: 14px; border-radius: 6px; overflow-x: auto; font: 12px/1.5 {MONO}; }}
"""
