"""Messages of protocol version 2: chunks with checksums, and a join that proves knowledge of the token.

worker: Hello  →  Challenge :server       Assignment ← server
        Proof  →  Welcome                 Table, Chunk …, GradientDone →
                                          Table, Chunk …, AverageDone ← server
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, TypeAlias

import numpy

from runtime.gradient_server.wire.fields import (
    F64,
    U16,
    U32,
    U64,
    Bytes,
    Flag,
    RawField,
    Rest,
    Source,
    Text,
    one_of,
)
from runtime.gradient_server.wire.refusals import Reason, WireError

VERSION = 2
MAX_CHUNK = 1 << 20
"""Most bytes of a chunk's unpacked elements."""
MAX_FRAME_V2 = MAX_CHUNK + 4096
MAX_PARTS = 65_536
"""Most parts of a table."""


class Kind(IntEnum):
    """What a table or chunk belongs to."""

    GRADIENT = 0
    AVERAGE = 1
    STATE = 2


class Codec(IntEnum):
    """How a chunk's elements are packed."""

    NONE = 0
    ZLIB = 1


class Dtype(IntEnum):
    """The type of a part's elements, little-endian."""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT64 = 4
    INT32 = 5
    UINT8 = 6
    BOOL = 7
    INT16 = 8
    INT8 = 9

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize

    @property
    def numpy(self) -> numpy.dtype[Any]:
        """The numpy dtype; uint16 for bfloat16, which numpy does not have."""
        return _NUMPY[self]


_NUMPY = [numpy.dtype(name) for name in ("<f4", "<f8", "<f2", "<u2", "<i8", "<i4", "u1", "?", "<i2", "i1")]
GRADIENT_DTYPES = frozenset({Dtype.FLOAT32, Dtype.FLOAT64, Dtype.FLOAT16, Dtype.BFLOAT16})


@dataclass(frozen=True, slots=True)
class Part:
    """One row of a table."""

    dtype: Dtype
    count: int


class PartsField:
    """u32 count, then dtype u8 and count u64 of each."""

    _row = struct.Struct("<BQ")

    def put(self, values: Sequence[Sequence[Part]]) -> Iterable[Bytes]:
        rows = (self._row.pack(part.dtype, part.count) for part in values[0])
        return struct.pack("<I", len(values[0])), b"".join(rows)

    def take(self, source: Source) -> Sequence[Any]:
        (count,) = struct.unpack("<I", source.take(4))
        if count > MAX_PARTS:
            raise WireError(Reason.TOO_LONG, f"a table of {count} parts, of at most {MAX_PARTS}.")
        rows = self._row.iter_unpack(source.take(count * self._row.size))
        return (tuple(Part(_dtype(dtype), count) for dtype, count in rows),)

    def span(self, data: Bytes | bytearray, at: int) -> int:
        return 4


def _dtype(number: int) -> Dtype:
    if number >= len(_NUMPY):
        raise WireError(Reason.BAD_DTYPE, f"number {number}, of {len(_NUMPY)}.")
    return Dtype(number)


KindField: TypeAlias = Annotated[Kind, one_of(Kind)]
CodecField: TypeAlias = Annotated[Codec, one_of(Codec)]
Nonce: TypeAlias = Annotated[bytes, RawField(16)]
Bytes32: TypeAlias = Annotated[bytes, RawField(32)]
Parts: TypeAlias = Annotated[tuple[Part, ...], PartsField()]


@dataclass(frozen=True, slots=True)
class Hello:
    """step: what the worker computes or waits for next. has_state: it has weights that a run can continue from."""

    version: U16
    node_id: Text
    nonce: Nonce
    step: U64
    has_state: Flag


@dataclass(frozen=True, slots=True)
class Challenge:
    nonce: Bytes32


@dataclass(frozen=True, slots=True)
class Proof:
    mac: Bytes32


@dataclass(frozen=True, slots=True)
class Welcome:
    worker_id: U32
    total_workers: U32
    mac: Bytes32
    heartbeat_ms: U32
    timeout_ms: U32
    chunk_bytes: U32
    codec: CodecField


@dataclass(frozen=True, slots=True)
class Refused:
    """reason: a key of REASONS; a newer server may have more."""

    reason: Text
    detail: Text


@dataclass(frozen=True, slots=True)
class Assignment:
    """Samples [start, end) of this step's total."""

    step: U64
    attempt: U32
    start: U64
    end: U64
    total: U64


@dataclass(frozen=True, slots=True)
class StateWanted:
    step: U64
    request: U32


@dataclass(frozen=True, slots=True)
class Table:
    """The parts whose chunks follow. For a state, `attempt` is the number of the request."""

    kind: KindField
    step: U64
    attempt: U32
    parts: Parts

    def check(self) -> Table:
        """Returns itself. Raises WireError if a gradient or an average is not of floating point numbers."""
        wrong = [part.dtype for part in self.parts if part.dtype not in GRADIENT_DTYPES]
        if self.kind is not Kind.STATE and wrong:
            raise WireError(Reason.BAD_DTYPE, f"{wrong[0].name.lower()} in a table of {self.kind.name.lower()}s.")
        return self


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` elements of a part, from `offset` on. checksum: xxh3_64 of the unpacked elements."""

    kind: KindField
    step: U64
    attempt: U32
    part: U32
    offset: U64
    codec: CodecField
    count: U32
    checksum: U64
    payload: Rest


@dataclass(frozen=True, slots=True)
class GradientDone:
    step: U64
    attempt: U32
    loss: F64
    correct: U64
    total: U64


@dataclass(frozen=True, slots=True)
class AverageDone:
    """seconds: from the step's first gradient byte to its last average."""

    step: U64
    attempt: U32
    loss: F64
    correct: U64
    total: U64
    seconds: F64


@dataclass(frozen=True, slots=True)
class Again:
    """The sum was dropped: send the kept gradient again, as this attempt."""

    step: U64
    attempt: U32
    reason: Text


@dataclass(frozen=True, slots=True)
class Beat:
    timestamp_ms: U64


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender of this will send nothing more."""

    reason: Text


@dataclass(frozen=True, slots=True)
class StateDone:
    step: U64
    request: U32


MessageV2: TypeAlias = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | Refused
    | Assignment
    | StateWanted
    | Table
    | Chunk
    | GradientDone
    | AverageDone
    | Again
    | Beat
    | Leave
    | StateDone
)

TAGS_V2: dict[int, type[MessageV2]] = {
    0x20: Hello,
    0x21: Challenge,
    0x22: Proof,
    0x23: Welcome,
    0x24: Refused,
    0x25: Assignment,
    0x26: StateWanted,
    0x27: Table,
    0x28: Chunk,
    0x29: GradientDone,
    0x2A: AverageDone,
    0x2B: Again,
    0x2C: Beat,
    0x2D: Leave,
    0x2E: StateDone,
}
