"""A run's report in words, for a terminal; and the words that the report as a page shares with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from monitoring.events.time_parts import PARTS
from monitoring.text import printable
from parallel3d.reports.drawing.words import count, percent, show_bytes
from parallel3d.reports.report import (
    ALL_RANKS,
    AXES,
    EFFICIENCY_MEANINGS,
    Report,
    TimeRow,
    remainder_share,
    time_rows,
)
from parallel3d.reports.snapshot import RankInfo

_WIDTH = 12
_LEAST_SHARE = 0.0005  # what is shown as 0.0 % in every row has no column
WHOLE = "process"
"""The kind of memory that contains all others."""


def report_text(report: Report) -> str:
    """All sections that have something to tell."""
    sections = (
        _overall(report),
        _section("efficiency by axis", _efficiency(report)),
        _times(report),
        _section("memory", _memory(report)),
        _section("bottlenecks", _bottlenecks(report)),
        _section("statistics", _statistics(report)),
    )
    return "\n\n".join(plain("\n".join(lines)) for section in sections if (lines := list(section)))


def plain(text: str) -> str:
    """Without what a terminal would obey: a folder may come from elsewhere."""
    return printable(text, keep="\n")


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number == 0:
            yield title
        yield f"  {line}"


def _line(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}}{text}"


def _overall(report: Report) -> Iterator[str]:
    run, totals = report.run, report.totals
    wanted = f" of {run.steps:,}" if type(run.steps) is int else ""
    yield f"run {run.run_id}: {run.status}, {totals.steps:,}{wanted} steps"
    for name, text in facts(report):
        yield "  " + _line(name, text)
    if run.error is not None:
        yield "  " + _line("error", str(run.error["message"]))
        yield from ("  " + _line("", line) for note in run.error["notes"] for line in note.splitlines())


def _efficiency(report: Report) -> Iterator[str]:
    for axis in AXES:
        if (value := report.efficiency[axis]) is not None:
            yield f"{axis}  {percent(value):>8}  {EFFICIENCY_MEANINGS[axis]}"


def _times(report: Report) -> Iterator[str]:
    if report.parts.total:
        yield from time_table(time_rows(report), ("remainder", "score"))


def time_table(rows: Sequence[TimeRow], more: Sequence[Literal["remainder", "score"]] = ()) -> Iterator[str]:
    """Where the time went: a row a rank, a column for each part that took any time. more: columns after those."""
    shown = [part for part in PARTS if any(row.parts.shares()[part] >= _LEAST_SHARE for row in rows)]
    title = "where the time went"
    width = max(len(title), *(len(row.name) for row in rows))
    yield f"{title:<{width}}" + "".join(f"{name:>11}" for name in (*shown, *more))
    for row in rows:
        rest = remainder_share(row.parts, row.remainder)
        last = {
            "remainder": "" if rest is None else percent(rest),
            "score": "" if row.score is None else f"{row.score:.2f}",
        }
        cells = [*(percent(row.parts.shares()[part]) for part in shown), *(last[name] for name in more)]
        yield (f"{row.name:<{width}}" + "".join(f"{cell:>11}" for cell in cells)).rstrip()


def _memory(report: Report) -> Iterator[str]:
    memory, budget = report.memory, report.memory_budget
    for rank in report.ranks:
        if (used := memory.get(rank.rank)) is not None:
            share = f"  {percent(used / budget)} of {show_bytes(budget)}" if budget else ""
            yield f"{rank.name}  {show_bytes(used):>10}{share}{_memory_kinds(rank)}"
    if len(memory) > 1:
        yield f"{ALL_RANKS}  {show_bytes(sum(memory.values()))}"


def _bottlenecks(report: Report) -> Iterator[str]:
    if not report.bottlenecks and report.was_watched and report.statistics is not None:
        yield "none was found"
    for each in report.bottlenecks:
        yield f"{each.get('severity', '')}: {each.get('kind', '')}: {each.get('message', '')}"
        yield f"    {remedy(each)}"


def _statistics(report: Report) -> Iterator[str]:
    found = report.statistics
    if found is None:
        return
    named = (("mean", found.mean), ("median", found.median), ("p95", found.p95), ("p99", found.p99))
    yield _line("a step", ", ".join(f"{name} {milliseconds(value)}" for name, value in named))
    yield _line("", f"from {milliseconds(found.least)} to {milliseconds(found.most)}")
    left_out = f"; {count(found.num_warm_up, 'step')} of warm-up left out" if found.num_warm_up else ""
    yield _line("counted", f"{count(found.num_steps, 'step')}{left_out}")


# What the page says, too.


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """The run as pairs of a name and a text, the same in words and on the page."""
    run, totals = report.run, report.totals
    mesh = " x ".join(f"{axis} {size}" for axis, size in run.mesh.items())
    yield "mesh", f"{count(run.world_size, 'rank')} = {mesh}"
    if run.model is not None:
        parameters = f", {run.parameters:,} parameters" if type(run.parameters) is int else ""
        yield "model", f"{run.model}{parameters}"
    if run.mesh["pp"] > 1 and type(run.microbatches) is int:
        yield "schedule", f"{run.schedule}, {count(run.microbatches, 'microbatch')}"
    if totals.final_loss is not None:
        first = "" if report.first_loss is None else f"{report.first_loss:.4f} to "
        yield "loss", f"{first}{totals.final_loss:.4f}"
    if totals.tokens_per_second:
        yield "tokens/s", f"{totals.tokens_per_second:,.0f}"
    if totals.mfu is not None:
        yield "MFU", percent(totals.mfu)
    if report.bandwidth is not None:
        yield "all-reduce", f"{report.bandwidth:.2f} GB/s"


def remedy(bottleneck: Mapping[str, Any]) -> str:
    """What to do, which key to set, and what it would gain."""
    text = str(bottleneck.get("remedy") or "")
    key, value, gain = (bottleneck.get(name) for name in ("key", "value", "gain"))
    if key:
        text += f" [{key}: {value}]" if value is not None else f" [{key}]"
    if isinstance(gain, float) and gain > 0:
        text += f" Saves about {percent(gain)} of the step."
    return text.strip()


def _memory_kinds(rank: RankInfo) -> str:
    """What a rank's memory is for, as far as that is known; what ranks share is divided in the whole only."""
    kinds = ((kind, size) for kind, size in rank.memory_kinds.items() if size and kind != WHOLE)
    text = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in kinds)
    return f" ({text})" if text else ""


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
