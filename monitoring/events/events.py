"""Events of a rank and their fixed-size binary records."""

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
"""Struct formats of a record: the fields of `Event` in the same order, little-endian and without padding."""
RECORD = struct.Struct("<" + "".join(_FORMATS.values()))
RECORD_BYTES = RECORD.size
_COLUMNS = numpy.dtype([(name, f"<{code}") for name, code in _FORMATS.items()])


class What(IntEnum):
    """The kinds of events. Actions have the same names as in a schedule's table."""

    STEP = 0
    """A whole step, from the end of the previous one. It is the rank's last event of the step."""
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
    """Handing a stage's gradients to the reducer."""
    REDUCE = 11
    """From a rank's last action to the end of the gradients' reduction. Also before its first action, where replicas
    exchange the weights of their parts of the batch. With the axis TP or PP: ranks of one replica sum the gradients of
    parameters that they share."""
    MEET = 12
    """Waiting for all ranks of the mesh to exchange norm and loss; two events per step if these are separate passes."""
    OPTIMIZER = 13
    """The norm and the update without waiting for other ranks; with a sharded state also gathering the weights."""
    CHECKPOINT = 14
    COLLECTIVE = 15
    """One call on a group, or several of one kind combined. It may overlap any other event."""


COMPUTE = frozenset((What.F, What.B, What.I, What.W))
SENDS = frozenset((What.SEND_F, What.SEND_B))
RECEIVES = frozenset((What.RECV_F, What.RECV_B))
ACTIONS = COMPUTE | SENDS | RECEIVES | {What.REDUCE_GRAD}


class Axis(IntEnum):
    """An axis of the mesh, or the whole mesh."""

    WORLD = 0
    DP = 1
    TP = 2
    PP = 3

    @property
    def label(self) -> str:
        return self.name.lower()


AXES = tuple(axis.label for axis in Axis)
"""Labels of `Axis`, in the order of its values."""


class Event(NamedTuple):
    """One record. Times are seconds of time.monotonic, on the rank's own clock until they are aligned."""

    what: int
    """A value of `What`."""
    step: int
    start: float
    end: float
    stage: int = NO_STAGE
    microbatch: int = NO_MICROBATCH
    cpu: float = 0.0
    """Computing actions: CPU seconds that the rank's thread used. Receives: seconds spent on weight gradients while the
    message had not arrived."""
    waited: float = 0.0
    """Seconds in which the rank waited for its tensor-parallel peers. COLLECTIVE: seconds that its calls took, which
    can be less than end - start if several calls are combined."""
    num_bytes: int = 0
    axis: int = Axis.WORLD
    """A value of `Axis`."""
    op: int = 0
    """COLLECTIVE: index into `OPS`."""
    strategy: int = 0
    """COLLECTIVE: index into `STRATEGIES`."""
    calls: int = 1
    """COLLECTIVE: number of calls. Sends: 0 if the message is also recorded as a COLLECTIVE."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def action(self) -> str:
        """The name in a schedule's table, such as 1F0 or 0SEND_F2."""
        microbatch = "" if self.microbatch == NO_MICROBATCH else self.microbatch
        return f"{self.stage}{What(self.what).name}{microbatch}"


_LIMITS = {"what": len(What), "axis": len(Axis), "op": len(OPS), "strategy": len(STRATEGIES)}
_LIMITS |= dict.fromkeys(("start", "end", "cpu", "waited"), 10**12)


def pack_into(buffer: bytearray, offset: int, event: Event) -> None:
    RECORD.pack_into(buffer, offset, *event)


def unpack(data: bytes, offset: float = 0.0) -> list[Event]:
    """The events in these bytes, with `offset` added to their times. Raises ValueError for data that `pack_into` could
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
