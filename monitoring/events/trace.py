"""A run's last steps as a Chrome trace for Perfetto and chrome://tracing; each rank is a process."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS, ACTIONS, COLLECTIVES = 0, 1, 2
"""Rows of a rank. Overlapping collectives use further rows below."""
_ROW_NAMES = {STEPS: "steps", ACTIONS: "actions"}


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval in seconds of time.monotonic, which is one clock for all processes of a host."""

    row: int
    name: str
    category: str
    start: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    sends: str = ""
    """Name of the message sent by this span, unique in the trace; empty if none."""
    receives: str = ""

    def to_wire(self) -> list[Any]:
        return [self.row, self.name, self.category, self.start, self.end, dict(self.facts), self.sends, self.receives]

    @staticmethod
    def from_wire(row: Any) -> Span:
        """Raises ValueError for anything that `to_wire` could not have written."""
        kinds = [int, str, str, float, float, dict, str, str]
        if not isinstance(row, list) or [type(value) for value in row] != kinds:
            raise ValueError("a span has a row, a name, a category, start, end, facts and two messages")
        return Span(*row)


def chrome_trace(ranks: Mapping[int, Sequence[Span]], names: Mapping[int, str]) -> dict[str, Any]:
    """The trace as a JSON document. Time 0 is the start of the first span."""
    first = min((span.start for spans in ranks.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for rank, spans in sorted(ranks.items()):
        events += _titles(rank, names.get(rank, f"rank {rank}"), spans)
        for row, span in _in_rows(spans):
            events += _events(rank, row, span, first, numbers)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def to_bytes(trace: Mapping[str, Any]) -> bytes:
    """Gzipped JSON; the same bytes for the same trace."""
    return gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=6, mtime=0)


def _in_rows(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Assign rows: viewers nest spans within a row, so overlapping collectives need separate rows."""
    free: list[float] = []  # end time of the last span in each row of collectives
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        if span.row != COLLECTIVES:
            yield span.row, span
            continue
        place = next((at for at, moment in enumerate(free) if moment <= span.start), len(free))
        free[place : place + 1] = [span.end]
        yield COLLECTIVES + place, span


def _titles(rank: int, name: str, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for row in sorted({row for row, _ in _in_rows(spans)}):
        title = _ROW_NAMES.get(row, "collectives")
        yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": title}}


def _events(rank: int, row: int, span: Span, first: float, numbers: dict[str, int]) -> Iterator[dict[str, Any]]:
    where = {"pid": rank, "tid": row}
    start, length = _microseconds(span.start - first), _microseconds(span.end - span.start)
    event = {"ph": "X", **where, "name": span.name, "cat": span.category, "ts": start, "dur": length}
    yield {**event, "args": dict(span.facts)} if span.facts else event
    # The arrow ends at the end of the receive, because a receive starts before its message arrives.
    arrow = {**where, "name": "message", "cat": "message"}
    if span.sends:
        yield {"ph": "s", **arrow, "id": _number(span.sends, numbers), "ts": start}
    if span.receives:
        inside = max(start, round(start + length - 0.001, 3))  # at the very end it would bind to the next span
        yield {"ph": "f", "bp": "e", **arrow, "id": _number(span.receives, numbers), "ts": inside}


def _number(message: str, numbers: dict[str, int]) -> int:
    """Perfetto identifies arrows by numbers only."""
    return numbers.setdefault(message, len(numbers) + 1)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
