"""What happened in a rank, as records of fixed size: what it was, where, when, and how many bytes it moved."""

from __future__ import annotations

import struct
from enum import IntEnum
from itertools import repeat
from typing import NamedTuple

import numpy

from monitoring.events.collectives import KINDS

OPS = KINDS
NO_STAGE = NO_MICROBATCH = -1
STRATEGIES = ("default", "ring", "tree", "hierarchical")
_FORMATS = {
    "what": "B",
    "step": "I",
    "start": "d",
    "end": "d",
    "stage": "i",
    "microbatch": "i",
    "cpu": "d",
    "waited": "d",
    "num_bytes": "Q",
    "axis": "B",
    "op": "B",
    "strategy": "B",
    "calls": "I",
}
"""Of a record's fields, which are an `Event`'s in its order; little-endian, and nothing between them."""
RECORD = struct.Struct("<" + "".join(_FORMATS.values()))
RECORD_BYTES = RECORD.size
_COLUMNS = numpy.dtype([(name, f"<{code}") for name, code in _FORMATS.items()])


class What(IntEnum):
    """The kinds of events. Names of actions are those of a schedule's table."""

    STEP = 0
    """A whole step, from the end of the one before; a rank's last event of the step."""
    DATA = 1
    """Waiting for the step's batch."""
    F = 2
    B = 3
    I = 4  # noqa: E741
    W = 5
    SEND_F = 6
    SEND_B = 7
    RECV_F = 8
    RECV_B = 9
    REDUCE_GRAD = 10
    """Handing a stage's gradients over to be reduced."""
    REDUCE = 11
    """From a rank's last action to the end of the gradients' reduction; and before its first action, where replicas
    tell each other how much their parts of the batch count. With the axis TP or PP: ranks of one replica add up the
    gradients of parameters that several of them have."""
    MEET = 12
    """Waiting for all ranks of the mesh, which tell each other the norm and the loss; twice where passes are apart."""
    OPTIMIZER = 13
    """The norm and the update without waiting for others; where the state is sharded, gathering weights too."""
    CHECKPOINT = 14
    COLLECTIVE = 15
    """A call on a group, or several of one kind together; it may overlap all others."""


COMPUTE = frozenset((What.F, What.B, What.I, What.W))
SENDS = frozenset((What.SEND_F, What.SEND_B))
RECEIVES = frozenset((What.RECV_F, What.RECV_B))
ACTIONS = COMPUTE | SENDS | RECEIVES | {What.REDUCE_GRAD}


class Axis(IntEnum):
    """Of the mesh, or all of it."""

    WORLD = 0
    DP = 1
    TP = 2
    PP = 3

    @property
    def label(self) -> str:
        return self.name.lower()


AXES = tuple(axis.label for axis in Axis)
"""Their labels, in the order of their values."""


class Event(NamedTuple):
    """One record. Moments are seconds of time.monotonic, in the rank's own clock until they are aligned."""

    what: int
    """A value of `What`."""
    step: int
    start: float
    end: float
    stage: int = NO_STAGE
    microbatch: int = NO_MICROBATCH
    cpu: float = 0.0
    """Of a computing action: seconds of the processor that the rank's thread used meanwhile. Of a receive: seconds in
    which weight gradients were computed because nothing had come yet."""
    waited: float = 0.0
    """Seconds of it in which the rank waited for its tensor-parallel peers; of a COLLECTIVE, the seconds that its calls
    took, which is less than end - start where several are told together."""
    num_bytes: int = 0
    axis: int = Axis.WORLD
    """A value of `Axis`."""
    op: int = 0
    """Of a COLLECTIVE: its place in `OPS`."""
    strategy: int = 0
    """Of a COLLECTIVE: its place in `STRATEGIES`."""
    calls: int = 1
    """Of a COLLECTIVE: calls. Of a send: 0 where its message is told as a COLLECTIVE too."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def action(self) -> str:
        """As a schedule's table names it, such as 1F0 or 0SEND_F2."""
        microbatch = "" if self.microbatch == NO_MICROBATCH else self.microbatch
        return f"{self.stage}{What(self.what).name}{microbatch}"


_LIMITS = {"what": len(What), "axis": len(Axis), "op": len(OPS), "strategy": len(STRATEGIES)}
_LIMITS |= dict.fromkeys(("start", "end", "cpu", "waited"), 10**12)


def pack_into(buffer: bytearray, offset: int, event: Event) -> None:
    RECORD.pack_into(buffer, offset, *event)


def unpack(data: bytes, offset: float = 0.0) -> list[Event]:
    """The events in these bytes, their moments later by `offset`. Raises ValueError for anything that `pack_into` could
    not have written."""
    if len(data) % RECORD_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of events")
    records = numpy.frombuffer(data, _COLUMNS)
    for name, limit in _LIMITS.items():
        if not ((records[name] >= 0) & (records[name] < limit)).all():
            raise ValueError(f"an event's {name} is out of range")
    if not (records["start"] <= records["end"]).all():
        raise ValueError("an event ends before it starts")
    if offset:
        records = records.copy()
        records["start"] += offset
        records["end"] += offset
        data = records.tobytes()
    return list(map(tuple.__new__, repeat(Event), RECORD.iter_unpack(data)))
