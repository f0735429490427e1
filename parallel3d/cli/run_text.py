"""A run in words: the live line while it goes on, and where the time went at its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monitoring.events.time_parts import TimeParts, mean_of
from monitoring.messages import RunStep
from parallel3d.cli.line import Line
from parallel3d.json_lines import dump
from parallel3d.reports import text
from parallel3d.reports.drawing.words import show_bytes
from parallel3d.reports.report import ALL_RANKS, TimeRow
from parallel3d.runs.record import RunRecord

_SHOWN_SHARE = 0.0005  # what is not rounded to 0.0 %
_MOST_BOTTLENECKS = 3


class LiveLine(Line):
    """Of a run."""

    def show(self, record: RunRecord, step: RunStep, bubble: float | None = None) -> None:
        """A step was made. bubble: the ranks' mean of the latest step of which that is known."""
        self.tell(describe(record, step, bubble))


def describe(record: RunRecord, step: RunStep, bubble: float | None = None) -> list[tuple[str, str]]:
    """What the live line says of a step."""
    made, wanted = step.step + 1, record.config.train.steps
    pairs = [
        ("step", f"{made:>{len(str(wanted))}}/{wanted}"),
        ("loss", f"{step.loss:.4f}"),
        ("grad norm", f"{step.grad_norm:.3g}"),
        ("tokens/s", f"{step.tokens_per_second:,.0f}"),
    ]
    mfu, memory = record.mfu(step.tokens_per_second), record.memory()
    if mfu is not None:
        pairs.append(("MFU", f"{100 * mfu:.1f} %"))
    if bubble is not None and record.config.parallel.pp > 1:
        pairs.append(("bubble", f"{100 * bubble:.0f} %"))
    if memory is not None:
        pairs.append(("memory", show_bytes(memory)))
    return pairs


def time_table(record: RunRecord, metrics: Mapping[str, Any]) -> str:
    """Where each rank's time went, in percent; parts that took none are left out. Empty before the first step."""
    known = [rank for rank in metrics["ranks"] if rank["steps"]]
    if not known:
        return ""
    rows = [TimeRow(record.name(rank["rank"]), TimeParts.of(rank["seconds"])) for rank in known]
    rows += [TimeRow(ALL_RANKS, mean_of([row.parts for row in rows]))] if len(rows) > 1 else []
    return "\n".join(text.time_table(rows))


def _note(record: RunRecord, metrics: Mapping[str, Any]) -> str:
    """What one should know of the table."""
    told = [rank for rank in metrics["ranks"] if rank["steps"]]
    apart = max((abs(rank["remainder_seconds"]) / rank["total_seconds"] for rank in told), default=0.0)
    notes = [f"speed and times leave out {record.num_warm_up} steps of warm-up"] if record.num_warm_up else []
    notes += [f"the parts add up to the steps but for {100 * apart:.1f} %"] if apart >= _SHOWN_SHARE else []
    without = sum(rank["core_wait_seconds"] for rank in told) / (sum(rank["total_seconds"] for rank in told) or 1.0)
    notes += [f"of other, {100 * without:.0f} % of the time is computing without a core"] if without >= 0.1 else []
    return f"({'; '.join(notes)})" if notes else ""


def bottleneck_lines(metrics: Mapping[str, Any]) -> list[str]:
    """What cost the most and what to do, the worst first."""
    lines = []
    for found in metrics["bottlenecks"][:_MOST_BOTTLENECKS]:
        gain = "" if found["gain"] is None else f" (a step would take about {100 * found['gain']:.0f} % less)"
        key = found["key"] if found["value"] is None else f"{found['key']}: {found['value']}"
        lines += [f"{found['severity']:<9}{found['message']}", f"{'':<9}{found['remedy']} [{key}]{gain}"]
    return lines


def summary(record: RunRecord, folder: str, metrics: Mapping[str, Any]) -> str:
    """What is said when a run has ended. metrics: as in `metrics.json`."""
    steps = f"{len(record.steps)} of {record.config.train.steps} steps"
    lines = [f"{record.status}: {steps}"]
    if record.steps:
        first, last = record.steps[0].loss, record.steps[-1].loss
        lines[0] += f", loss {first:.4f} to {last:.4f}, {record.tokens_per_second:,.0f} tokens/s"
        table, note = time_table(record, metrics), _note(record, metrics)
        lines += ["", *filter(None, (table, note))] if table or note else []
    found = bottleneck_lines(metrics)
    lines += ["", *found] if found else []
    if record.error is not None and record.steps:  # what was said of it stands above the table, and far up
        lines += ["", record.error.message, *record.error.notes]
    return "\n".join(
        [*lines, "", f"files: {folder}/ (report.html, metrics.json, events.jsonl, trace.json.gz, config.yaml)"]
    )


def say_summary(record: RunRecord, folder: Path, metrics: Mapping[str, Any], as_json: bool) -> None:
    """Data on stdout, the rest on stderr."""
    print(summary(record, str(folder), metrics), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(dump(metrics))
