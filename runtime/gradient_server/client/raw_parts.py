"""Parts of a gradient or a state as raw memory: cut into chunks to send, reassembled from received chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from runtime.gradient_server.wire.frames import VectorBegins
from runtime.gradient_server.wire.messages import MAX_CHUNK, Chunk, Dtype, Part, Reason, Table, WireError


class RawPart(NamedTuple):
    """Elements of one dtype, in the caller's memory."""

    dtype: Dtype
    data: memoryview
    """Bytes; writable for parts that are received."""

    @property
    def row(self) -> Part:
        """Its row in a table."""
        return Part(self.dtype, self.data.nbytes // self.dtype.num_bytes)


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements of one chunk."""

    offset: int
    count: int
    data: memoryview


def rows(parts: Sequence[RawPart]) -> tuple[Part, ...]:
    """The rows of these parts in a table."""
    return tuple(part.row for part in parts)


def slices(part: RawPart, chunk_bytes: int) -> Iterator[Slice]:
    """A part cut into slices of at most `chunk_bytes`, in order."""
    size = part.dtype.num_bytes
    most = max(1, min(chunk_bytes, MAX_CHUNK) // size)
    count = part.data.nbytes // size
    for offset in range(0, count, most):
        end = min(offset + most, count)
        yield Slice(offset, end - offset, part.data[offset * size : end * size])


def room_for(table: Table) -> list[RawPart]:
    """New memory for a table's parts; the system provides its pages as they are written to. Raises WireError."""
    try:
        return [RawPart(part.dtype, _room(part.count * part.dtype.num_bytes)) for part in table.parts]
    except (MemoryError, ValueError):
        raise WireError(Reason.OVER_BUDGET, f"no room for {_described(table.parts)}.") from None


def _room(num_bytes: int) -> memoryview:
    return numpy.empty(num_bytes, numpy.uint8).data  # bytearray would fill it with zeros


class Incoming:
    """Reassembles the parts of a table from chunks, which arrive in order for each part."""

    def __init__(self, table: Table, homes: Sequence[RawPart]) -> None:
        if rows(homes) != table.parts:
            raise WireError(
                Reason.WRONG_SIZES, f"{_described(table.parts)} of step {table.step}, not {_described(rows(homes))}."
            )
        self.table, self.homes = table, homes
        self._filled = [0] * len(homes)
        """How many elements of each part have arrived."""

    def fits(self, chunk: Chunk) -> bool:
        """Whether the chunk belongs to this table."""
        table = self.table
        return (chunk.kind, chunk.step, chunk.attempt) == (table.kind, table.step, table.attempt)

    def begin(self, begins: VectorBegins) -> memoryview:
        """The memory for the bytes of the chunk that begins. Raises WireError if it is not the part's next one."""
        chunk = begins.head
        assert isinstance(chunk, Chunk)
        if chunk.part >= len(self.homes):
            raise WireError(Reason.WRONG_BLOCK, f"part {chunk.part} of {len(self.homes)}.")
        home, filled = self.homes[chunk.part], self._filled[chunk.part]
        size, end = home.dtype.num_bytes, chunk.offset + chunk.count
        if chunk.offset != filled or end > home.row.count or (chunk.count and begins.item_bytes != size):
            raise WireError(
                Reason.WRONG_LENGTH,
                f"{begins.num_bytes} bytes for elements {chunk.offset} to {end} of part {chunk.part}, which "
                f"has {filled} of {home.row.count} so far.",
            )
        return home.data[chunk.offset * size : end * size]

    def end(self, chunk: Chunk) -> None:
        """The chunk is complete, and its checksum right."""
        self._filled[chunk.part] += chunk.count

    @property
    def is_complete(self) -> bool:
        return all(filled == home.row.count for filled, home in zip(self._filled, self.homes, strict=True))


def _described(parts: Sequence[Part]) -> str:
    return f"{len(parts)} parts with {sum(part.count for part in parts)} elements"
