"""A run's report in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from monitoring.events.time_parts import PARTS
from monitoring.report import AXES, EFFICIENCY_MEANINGS, Report, parts_of, remainder_share
from monitoring.text import printable
from parallel3d.reports.drawing.words import count, percent
from parallel3d.reports.report_words import facts, memory_kinds, milliseconds, remedy, show_bytes
from parallel3d.reports.run_reader import rank_name

_WIDTH = 12
_LEAST_SHARE = 0.0005  # what is shown as 0.0 % in every row has no column


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
    wanted = f" of {run['steps']:,}" if type(run["steps"]) is int else ""
    yield f"run {run['run_id']}: {run['status']}, {totals['steps']:,}{wanted} steps"
    for name, text in facts(report):
        yield "  " + _line(name, text)
    if run["error"] is not None:
        yield "  " + _line("error", str(run["error"]["message"]))
        yield from ("  " + _line("", line) for note in run["error"]["notes"] for line in note.splitlines())


def _efficiency(report: Report) -> Iterator[str]:
    for axis in AXES:
        if (value := report.efficiency[axis]) is not None:
            yield f"{axis}  {percent(value):>8}  {EFFICIENCY_MEANINGS[axis]}"


def _times(report: Report) -> Iterator[str]:
    """A row a rank and a column a part that took any time; what is in no part, and how fast the rank is."""
    if not report.parts.total:
        return
    rows = [
        (rank_name(rank), parts, rank["remainder_seconds"], rank["straggler_score"])
        for rank in report.ranks
        if (parts := parts_of(rank)) is not None
    ]
    rows += [("all ranks", report.parts, report.remainder, None)] if len(rows) != 1 else []
    shown = [part for part in PARTS if any(parts.shares()[part] >= _LEAST_SHARE for _, parts, _, _ in rows)]
    title = "where the time went"
    width = max(len(title), *(len(row[0]) for row in rows))
    yield f"{title:<{width}}" + "".join(f"{name:>11}" for name in (*shown, "remainder", "score"))
    for name, parts, remainder, score in rows:
        cells = [percent(parts.shares()[part]) for part in shown]
        rest = remainder_share(parts, remainder)
        cells += ["" if rest is None else percent(rest), "" if score is None else f"{score:.2f}"]
        yield (f"{name:<{width}}" + "".join(f"{cell:>11}" for cell in cells)).rstrip()


def _memory(report: Report) -> Iterator[str]:
    memory, budget = report.memory, report.memory_budget
    for rank in report.ranks:
        if (used := memory.get(rank["rank"])) is not None:
            share = f"  {percent(used / budget)} of {show_bytes(budget)}" if budget else ""
            yield f"{rank_name(rank)}  {show_bytes(used):>10}{share}{memory_kinds(rank)}"
    if len(memory) > 1:
        yield f"all ranks  {show_bytes(sum(memory.values()))}"


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
