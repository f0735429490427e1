"""A run in words: the live line while it lasts, and where the time went at its end."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from monitoring.events.time_parts import TimeParts, mean_of
from parallel3d.formatting import json_lines
from parallel3d.reports import text
from parallel3d.reports.drawing.words import show_bytes
from parallel3d.reports.report import ALL_RANKS, TimeRow

if TYPE_CHECKING:
    from monitoring.messages import RunStep
    from parallel3d.runs.record import RunRecord

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 1.0
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_SHOWN_SHARE = 0.0005  # smaller shares are rounded to 0.0 %
_MAX_BOTTLENECKS = 3


class Line:
    """Progress in one line: redrawn on a terminal; elsewhere a line a second, and always the first and the last."""

    def __init__(
        self,
        stream: TextIO,
        environment: Mapping[str, str],
        columns: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._columns, self._now = stream, columns, now
        self._redraws = stream.isatty() and environment.get("TERM") != "dumb"
        self._colours = self._redraws and not environment.get("NO_COLOR")
        self._shown_at = float("-inf")
        self._latest = self._shown = ""

    @classmethod
    def on_stderr(cls) -> Self:
        return cls(sys.stderr, os.environ, shutil.get_terminal_size().columns)

    def update(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Show these names and values."""
        text = "  ".join(f"{name} {value}" for name, value in pairs)
        if self._redraws and len(text) >= self._columns:
            text = text[: self._columns - 1]
        elif self._colours:
            text = "  ".join(f"{_DIM}{name}{_PLAIN} {value}" for name, value in pairs)
        self._latest = text
        if self._now() - self._shown_at >= (_REDRAW_SECONDS if self._redraws else _LINE_SECONDS):
            self._draw()

    def _draw(self) -> None:
        self._shown, self._shown_at = self._latest, self._now()
        self._write(f"\r\x1b[K{self._latest}" if self._redraws else f"{self._latest}\n")

    def close(self) -> None:
        """Show the latest values, and end the line."""
        if self._latest != self._shown:
            self._draw()
        if self._redraws and self._shown:
            self._write("\n")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a closed pipe must not end the run
            self._stream.write(text)
            self._stream.flush()


class LiveLine(Line):
    """The progress of a run."""

    def show(self, record: RunRecord, step: RunStep, bubble: float | None = None) -> None:
        """Show a step. bubble: mean over ranks, of the latest analysed step."""
        self.update(describe(record, step, bubble))


def describe(record: RunRecord, step: RunStep, bubble: float | None = None) -> list[tuple[str, str]]:
    """Names and values of a step for the live line."""
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
    """What the table leaves out."""
    known = [rank for rank in metrics["ranks"] if rank["steps"]]
    apart = max((abs(rank["remainder_seconds"]) / rank["total_seconds"] for rank in known), default=0.0)
    notes = [f"speed and times leave out {record.num_warm_up} steps of warm-up"] if record.num_warm_up else []
    notes += [f"the parts add up to the steps but for {100 * apart:.1f} %"] if apart >= _SHOWN_SHARE else []
    without = sum(rank["core_wait_seconds"] for rank in known) / (sum(rank["total_seconds"] for rank in known) or 1.0)
    notes += [f"of other, {100 * without:.0f} % of the time is computing without a core"] if without >= 0.1 else []
    return f"({'; '.join(notes)})" if notes else ""


def bottleneck_lines(metrics: Mapping[str, Any]) -> list[str]:
    """What cost the most and the remedy, the worst first."""
    lines = []
    for found in metrics["bottlenecks"][:_MAX_BOTTLENECKS]:
        gain = "" if found["gain"] is None else f" (a step would take about {100 * found['gain']:.0f} % less)"
        key = found["key"] if found["value"] is None else f"{found['key']}: {found['value']}"
        lines += [f"{found['severity']:<9}{found['message']}", f"{'':<9}{found['remedy']} [{key}]{gain}"]
    return lines


def summary(record: RunRecord, folder: str, metrics: Mapping[str, Any]) -> str:
    """The text at the end of a run. metrics: the content of `metrics.json`."""
    steps = f"{len(record.steps)} of {record.config.train.steps} steps"
    lines = [f"{record.status}: {steps}"]
    if record.steps:
        first, last = record.steps[0].loss, record.steps[-1].loss
        lines[0] += f", loss {first:.4f} to {last:.4f}, {record.tokens_per_second:,.0f} tokens/s"
        table, note = time_table(record, metrics), _note(record, metrics)
        lines += ["", *filter(None, (table, note))] if table or note else []
    found = bottleneck_lines(metrics)
    lines += ["", *found] if found else []
    if record.error is not None and record.steps:  # it was printed first, far above this
        lines += ["", record.error.message, *record.error.notes]
    return "\n".join(
        [*lines, "", f"files: {folder}/ (report.html, metrics.json, events.jsonl, trace.json.gz, config.yaml)"]
    )


def print_summary(record: RunRecord, folder: Path, metrics: Mapping[str, Any], as_json: bool) -> None:
    """With `--json`, stdout has only the metrics."""
    print(summary(record, str(folder), metrics), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json_lines(metrics))
