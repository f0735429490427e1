"""Sizes and durations of a rank's collectives, sends and receives: its latest calls, and totals."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitoring.events.recorder import Recorder

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "recv", "barrier")
MAX_EVENTS = 1024
_ROW = [str, str, str, int, int, float, float]  # types of a row on the wire: a key and its total

Key = tuple[str, str, str]
"""Group, kind and executed strategy."""


def bus_factor(kind: str, num_ranks: int) -> float:
    """Bytes that each rank's link moves per byte of the call's size, as nccl-tests defines both.

    The size is that of the tensor that is reduced, broadcast, exchanged or sent; for `reduce_scatter` the whole input,
    for `all_gather` the whole result. The factor is 2(n-1)/n for an all-reduce, (n-1)/n for reduce-scatter, all-gather
    and all-to-all, and 1 for all others.
    """
    match kind:
        case "all_reduce":
            return 2 * (num_ranks - 1) / num_ranks
        case "reduce_scatter" | "all_gather" | "all_to_all":
            return (num_ranks - 1) / num_ranks
        case _:
            return 1.0


@dataclass(frozen=True, slots=True)
class CollectiveEvent:
    """One successful call, as this rank saw it."""

    group: str
    kind: str
    """One of `KINDS`."""

    strategy: str
    """The executed strategy: default, ring, tree or hierarchical."""

    requested: str
    """The requested strategy, which may be adaptive."""

    num_bytes: int
    """The size as nccl-tests counts it, see `bus_factor`; 0 for a barrier."""

    num_ranks: int
    seconds: float
    """From the call until this rank's event loop saw its end; includes waiting for late ranks."""

    began: float
    """When it was called, on the clock of `time.monotonic`."""

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes a second; None if bytes or seconds are 0."""
        return self.num_bytes / self.seconds if self.num_bytes and self.seconds else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes a second over each rank's link, comparable between group sizes; None if bytes or seconds are 0."""
        bandwidth = self.algorithm_bandwidth
        return None if bandwidth is None else bandwidth * bus_factor(self.kind, self.num_ranks)


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """Sums over calls."""

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    bus_bytes: float = 0.0
    """Bytes times their bus factor."""

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes a second over each rank's link; None if bytes or seconds are 0."""
        return self.bus_bytes / self.seconds if self.num_bytes and self.seconds else None

    def __add__(self, other: CollectiveTotal) -> CollectiveTotal:
        return CollectiveTotal(
            self.calls + other.calls,
            self.num_bytes + other.num_bytes,
            self.seconds + other.seconds,
            self.bus_bytes + other.bus_bytes,
        )

    def __sub__(self, earlier: CollectiveTotal) -> CollectiveTotal:
        """The calls since `earlier`."""
        return CollectiveTotal(
            self.calls - earlier.calls,
            self.num_bytes - earlier.num_bytes,
            self.seconds - earlier.seconds,
            self.bus_bytes - earlier.bus_bytes,
        )


class CollectiveRecorder:
    """Records the calls of one mesh in one rank. Call `record` in the event loop's thread only."""

    __slots__ = ("_latest", "_sums", "events_into")

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self.events_into: Recorder | None = None
        """If set, each call is also recorded there as an event."""
        self._latest: deque[tuple[str, str, str, str, int, int, float, float]] = deque(maxlen=max_events)
        self._sums: dict[tuple[str, str, str, int], list[int | float]] = {}
        """Calls, bytes and seconds by group, kind, strategy and number of ranks, so each row has one bus factor."""

    def record(
        self,
        group: str,
        kind: str,
        strategy: str,
        requested: str,
        num_bytes: int,
        num_ranks: int,
        seconds: float,
        began: float,
    ) -> None:
        """Record one call. Takes the fields of `CollectiveEvent`; the object itself is built only when it is read."""
        self._latest.append((group, kind, strategy, requested, num_bytes, num_ranks, seconds, began))
        key = (group, kind, strategy, num_ranks)
        try:
            sums = self._sums[key]
        except KeyError:
            sums = self._sums[key] = [0, 0, 0.0]
        sums[0] += 1
        sums[1] += num_bytes
        sums[2] += seconds
        if self.events_into is not None:
            self.events_into.collective(group, kind, strategy, num_bytes, max(0.0, seconds), began)

    def events(self) -> list[CollectiveEvent]:
        """The latest calls (up to `max_events`), in the order in which they ended."""
        return [CollectiveEvent(*fields) for fields in self._latest.copy()]

    def since(self, moment: float) -> list[CollectiveEvent]:
        """The latest calls that ended at or after a time of `time.monotonic`, in the order in which they ended."""
        found = []
        for fields in reversed(self._latest.copy()):
            *_, seconds, began = fields
            if began + seconds < moment:
                break
            found.append(CollectiveEvent(*fields))
        return found[::-1]

    def totals(self) -> dict[Key, CollectiveTotal]:
        """All calls since the mesh was created, by group, kind and strategy."""
        totals: dict[Key, CollectiveTotal] = {}
        for (group, kind, strategy, num_ranks), (calls, num_bytes, seconds) in self._sums.copy().items():
            total = CollectiveTotal(int(calls), int(num_bytes), seconds, num_bytes * bus_factor(kind, num_ranks))
            totals[group, kind, strategy] = totals.get((group, kind, strategy), CollectiveTotal()) + total
        return totals

    def to_wire(self) -> dict[str, object]:
        """The totals for the control channel: one row per group, kind and strategy."""
        rows = [[*key, t.calls, t.num_bytes, t.seconds, t.bus_bytes] for key, t in self.totals().items()]
        return {"totals": rows}

    @staticmethod
    def from_wire(fields: Mapping[str, object]) -> dict[Key, CollectiveTotal]:
        """The totals that were sent. Raises ValueError for anything that `to_wire` could not have written."""
        rows = fields.get("totals")
        if not isinstance(rows, list):
            raise ValueError("collectives: totals are a list of rows")
        return dict(map(_read_row, rows))


def _read_row(row: Any) -> tuple[Key, CollectiveTotal]:
    if not isinstance(row, list) or [type(field) for field in row] != _ROW:
        raise ValueError("collectives: a row is group, kind, strategy, calls, bytes, seconds, bus bytes")
    group, kind, strategy, *numbers = row
    if kind not in KINDS or not (group.isprintable() and strategy.isprintable()):
        raise ValueError("collectives: there are no calls of such a group, kind and strategy")
    if not all(0 <= number < 2**63 for number in numbers):  # false for NaN too
        raise ValueError("collectives: totals are numbers from 0 up")
    return (group, kind, strategy), CollectiveTotal(*numbers)
