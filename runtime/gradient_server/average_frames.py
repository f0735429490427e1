"""The frames of a step's averages: made once, and sent to every worker straight from the averages' memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.gradient_server.buffers import Key
from runtime.gradient_server.step_sum import WHOLE, StepSum, part
from runtime.gradient_server.wire.chunks import make_chunk
from runtime.gradient_server.wire.messages import (
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    Bytes,
    Codec,
    Component,
    Kind,
    Message,
    Part,
    Table,
    encode_parts,
)

WRITE_BYTES = 512 * 1024
"""Of a long frame at a time: a good part of what a link may have waiting."""


class AverageFrames:
    """Of one sum, in both versions. One that is dropped yields no more of version 2's, which are many small frames."""

    def __init__(self, total: StepSum, codec: Codec, chunk_bytes: int) -> None:
        self._sum, self._codec, self._chunk_bytes = total, codec, chunk_bytes
        self._made: dict[tuple[Key, int], tuple[Sequence[Bytes], int]] = {}

    # Version 1.

    def whole_frame(self, key: Key) -> Iterator[Sequence[Bytes]]:
        """One frame, in pieces."""
        for parts in encode_parts(self._message(key)):
            if len(parts) <= WRITE_BYTES:
                yield (parts,)
                continue
            for begin in range(0, len(parts), WRITE_BYTES):
                yield (memoryview(parts)[begin : begin + WRITE_BYTES],)

    def _message(self, key: Key) -> Message:
        step, vector, (kind, number) = self._sum.step, self._sum.average(key), key
        if key == WHOLE:
            return AveragedGradient(step, vector, self._sum.loss)
        if kind == "block":
            return AveragedBlockGradient(step, number, self._sum.shape(key).sizes, vector)
        return AveragedNonBlockGradient(step, Component(number), vector)

    # Version 2.

    @property
    def table(self) -> Table:
        """Of all parts: the same that the gradients have."""
        assert self._sum.plan is not None
        shapes = [self._sum.shape(part(number)) for number in range(self._sum.plan.number)]
        parts = tuple(Part(shape.dtype, shape.count) for shape in shapes)
        return Table(Kind.AVERAGE, self._sum.step, self._sum.attempt, parts)

    def chunks(self, key: Key) -> Iterator[Sequence[Bytes]]:
        """A part's frames, as long as they are wanted."""
        shape = self._sum.shape(key)
        at_once = max(1, self._chunk_bytes // shape.dtype.num_bytes)
        for offset in range(0, shape.count, at_once):
            if self._sum.is_dropped:
                return
            yield self._chunk(key, offset, min(at_once, shape.count - offset))

    def _chunk(self, key: Key, offset: int, count: int) -> Sequence[Bytes]:
        frame, uses = self._made.pop((key, offset), ((), 0))
        frame = frame or self._encoded(key, offset, count)
        # What is packed takes memory of its own: the last worker that is sent it needs it no more.
        if uses + 1 < len(self._sum.shares):
            self._made[key, offset] = frame, uses + 1
        return frame

    def _encoded(self, key: Key, offset: int, count: int) -> Sequence[Bytes]:
        data = self._sum.average(key)[offset : offset + count].data.cast("B")
        chunk = make_chunk(
            data,
            count=count,
            kind=Kind.AVERAGE,
            step=self._sum.step,
            attempt=self._sum.attempt,
            part=key[1],
            offset=offset,
            codec=self._codec,
        )
        return encode_parts(chunk)
