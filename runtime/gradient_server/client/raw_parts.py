"""Parts of a gradient or a state as raw memory: cut into chunks going out, put together from pieces coming in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from runtime.gradient_server.wire.frames import VectorBegins
from runtime.gradient_server.wire.messages import MAX_CHUNK, Chunk, Dtype, Part, Reason, Table, WireError


class RawPart(NamedTuple):
    """Elements of one dtype, where they lie."""

    dtype: Dtype
    data: memoryview
    """Bytes. Writable where they come in."""

    @property
    def row(self) -> Part:
        """As a table has it."""
        return Part(self.dtype, self.data.nbytes // self.dtype.num_bytes)


@dataclass(frozen=True, slots=True)
class Slice:
    """What one chunk carries."""

    offset: int
    count: int
    data: memoryview


def rows(parts: Sequence[RawPart]) -> tuple[Part, ...]:
    """The table of these parts."""
    return tuple(part.row for part in parts)


def slices(part: RawPart, chunk_bytes: int) -> Iterator[Slice]:
    """A part in order, so many bytes at a time at most."""
    size = part.dtype.num_bytes
    most = max(1, min(chunk_bytes, MAX_CHUNK) // size)
    count = part.data.nbytes // size
    for offset in range(0, count, most):
        end = min(offset + most, count)
        yield Slice(offset, end - offset, part.data[offset * size : end * size])


def room_for(table: Table) -> list[RawPart]:
    """New memory for what a table announces, which the system gives only as it is written to. Raises WireError."""
    try:
        return [RawPart(part.dtype, _room(part.count * part.dtype.num_bytes)) for part in table.parts]
    except (MemoryError, ValueError):
        raise WireError(Reason.OVER_BUDGET, f"no room for {_described(table.parts)}.") from None


def _room(num_bytes: int) -> memoryview:
    return numpy.empty(num_bytes, numpy.uint8).data  # bytearray would fill it with zeros


class Incoming:
    """Chunks that come, each part's in order, until all of the table is there."""

    def __init__(self, table: Table, homes: Sequence[RawPart]) -> None:
        if rows(homes) != table.parts:
            raise WireError(
                Reason.WRONG_SIZES, f"{_described(table.parts)} of step {table.step}, not {_described(rows(homes))}."
            )
        self.table, self.homes = table, homes
        self._filled = [0] * len(homes)
        """Elements of each part that are there."""

    def fits(self, chunk: Chunk) -> bool:
        """Whether the chunk belongs to this."""
        table = self.table
        return (chunk.kind, chunk.step, chunk.attempt) == (table.kind, table.step, table.attempt)

    def begin(self, begins: VectorBegins) -> memoryview:
        """Where the bytes of a chunk, which are next, belong."""
        chunk = begins.head
        assert isinstance(chunk, Chunk)
        if chunk.part >= len(self.homes):
            raise WireError(Reason.WRONG_BLOCK, f"part {chunk.part} of {len(self.homes)}.")
        home, filled = self.homes[chunk.part], self._filled[chunk.part]
        size, end = home.dtype.num_bytes, chunk.offset + chunk.count
        if chunk.offset != filled or end > home.row.count or (chunk.count and begins.item_bytes != size):
            raise WireError(
                Reason.WRONG_LENGTH,
                f"{begins.num_bytes} bytes for elements {chunk.offset} to {end} of part {chunk.part}, of which "
                f"{filled} of {home.row.count} are there.",
            )
        return home.data[chunk.offset * size : end * size]

    def end(self, chunk: Chunk) -> None:
        """The chunk was whole, and its checksum right."""
        self._filled[chunk.part] += chunk.count

    @property
    def is_complete(self) -> bool:
        return all(filled == home.row.count for filled, home in zip(self._filled, self.homes, strict=True))


def _described(parts: Sequence[Part]) -> str:
    return f"{len(parts)} parts with {sum(part.count for part in parts)} elements"
