"""What the report in words and the report as a page say alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from monitoring.report import Report
from parallel3d.reports.drawing.words import count, percent, show_bytes

__all__ = ["WHOLE", "facts", "memory_kinds", "milliseconds", "remedy", "show_bytes"]

WHOLE = "process"
"""The kind of memory in which all others are contained."""


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """The run in pairs of a name and what there is to tell."""
    run, totals = report.run, report.totals
    mesh = " x ".join(f"{axis} {size}" for axis, size in run["mesh"].items())
    yield "mesh", f"{count(run['world_size'], 'rank')} = {mesh}"
    if run["model"] is not None:
        parameters = f", {run['parameters']:,} parameters" if type(run["parameters"]) is int else ""
        yield "model", f"{run['model']}{parameters}"
    if run["mesh"]["pp"] > 1 and type(run["microbatches"]) is int:
        yield "schedule", f"{run['schedule']}, {count(run['microbatches'], 'microbatch')}"
    if totals["final_loss"] is not None:
        first = "" if report.first_loss is None else f"{report.first_loss:.4f} to "
        yield "loss", f"{first}{totals['final_loss']:.4f}"
    if totals["tokens_per_second"]:
        yield "tokens/s", f"{totals['tokens_per_second']:,.0f}"
    if totals["mfu"] is not None:
        yield "MFU", percent(totals["mfu"])
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


def memory_kinds(rank: Mapping[str, Any]) -> str:
    """What a rank's memory is for, as far as that is known; what ranks share is divided in the whole only."""
    kinds = ((kind, size) for kind, size in rank["memory_kinds"].items() if size and kind != WHOLE)
    text = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in kinds)
    return f" ({text})" if text else ""


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
