"""The comparison of all schedules as a table, and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel3d.pipeline.simulation.comparison import Entry, Outcome
from parallel3d.reports.drawing.words import count, number, percent

_HEAD = ("schedule", "virtual stages", "makespan", "x 1f1b", "bubble", "peak activations")


def as_text(ranks: int, microbatches: int, entries: Sequence[Entry]) -> str:
    """A line a schedule."""
    rows = [_HEAD, *(_row(entry) for entry in entries)]
    widths = [max(len(row[place]) for row in rows if place < len(row)) for place in range(len(_HEAD))]
    widths[2:] = [max(len(row[place]) for row in rows if len(row) == len(_HEAD)) for place in range(2, len(_HEAD))]
    lines = [
        f"{count(ranks, 'rank')}, {count(microbatches, 'microbatch')}, the same work for a rank in each schedule",
        "",
    ]
    for name, stages, *rest in rows:
        cells = [f"{name:<{widths[0]}}", f"{stages:>{widths[1]}}"]
        if len(rest) > 1:
            cells += (f"{text:>{width}}" for text, width in zip(rest, widths[2:], strict=True))
        else:
            cells += rest
        lines.append("  ".join(cells))
    return "\n".join((*lines, "", "peak activations: of the rank that keeps the most, in microbatches of a whole rank"))


def _row(entry: Entry) -> tuple[str, ...]:
    result = entry.result
    start = (entry.schedule, str(entry.virtual_stages))
    if not isinstance(result, Outcome):
        return (*start, f"not possible: {result.reason}")
    return (
        *start,
        number(result.makespan),
        f"{result.relative_makespan:.3f}",
        percent(result.bubble_ratio),
        number(result.peak_activations),
    )


def as_document(ranks: int, microbatches: int, entries: Sequence[Entry]) -> dict[str, Any]:
    """For JSON. An entry has figures, or `not_possible` with the nearest sizes that are."""
    return {"pp": ranks, "microbatches": microbatches, "schedules": [_values(entry, ranks) for entry in entries]}


def _values(entry: Entry, ranks: int) -> dict[str, Any]:
    start = {"schedule": entry.schedule, "virtual_stages": entry.virtual_stages}
    if isinstance(entry.result, Outcome):
        return {**start, **entry.result._asdict()}
    reason, microbatches, virtual_stages = entry.result
    nearest = {"pp": ranks, "microbatches": microbatches, "virtual_stages": virtual_stages}
    return {**start, "not_possible": reason, "nearest": nearest}
