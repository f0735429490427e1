"""What a gradient server sends to one worker: its queue, the frames of averages, and a sender for each version."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy

from runtime.gradient_server.buffers import Key
from runtime.gradient_server.sample_shares import Share
from runtime.gradient_server.step_sum import WHOLE, StepSum, part
from runtime.gradient_server.wire.chunks import make_chunk
from runtime.gradient_server.wire.link import Link, LinkLost
from runtime.gradient_server.wire.messages import (
    Again,
    Assignment,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    AverageDone,
    Beat,
    Bytes,
    Codec,
    Component,
    Heartbeat,
    Kind,
    Leave,
    Message,
    Part,
    Reason,
    Refused,
    ShardAssignment,
    Shutdown,
    Table,
    encode_parts,
)

WRITE_BYTES = 512 * 1024
"""Bytes of a long frame that are written at once: half of what a link may have waiting."""
_SERVER_NAME = "gradient server"
_NO_VECTOR = numpy.empty(0, numpy.float32)

Frames: TypeAlias = Iterable[Sequence[Bytes]]
"""Each is written at once; the next one waits until the link has room."""


class Outbox:
    """A worker's send queue: messages and long averages in order, within the link's budget. `run` it in a task.

    Frames are made when they are about to be sent, so a slow worker costs no memory.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: deque[Iterator[Sequence[Bytes]]] = deque()
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._is_ending = self._is_over = False

    @property
    def is_empty(self) -> bool:
        """Whether the queue is empty; the link may still have bytes to send."""
        return not self._waiting

    def put(self, message: Message) -> None:
        """Send a small message: at once if the queue is empty."""
        parts = encode_parts(message)
        if self._waiting:
            self._waiting.append(iter((parts,)))
        else:
            self._link.write(*parts)

    def put_all(self, frames: Frames) -> None:
        """Queue long frames. They are dropped once the link is gone."""
        if self._is_over:
            return
        self._waiting.append(iter(frames))
        self._empty.clear()
        self._wake.set()

    def end(self) -> None:
        """Close the link once everything is sent."""
        self._is_ending = True
        self._wake.set()

    async def emptied(self) -> None:
        """Return when the queue is empty and the link has room, or is gone."""
        await self._empty.wait()

    async def run(self) -> None:
        """Send until the link is gone, or until everything is sent after `end`."""
        try:
            while True:
                await self._send()
                if self._is_ending:
                    self._link.close()
                    return
                self._wake.clear()
                await self._wake.wait()
        except LinkLost:
            pass  # the link reports it to the server too
        finally:
            self._is_over = True
            self._waiting.clear()
            self._empty.set()

    async def _send(self) -> None:
        while self._waiting:
            for parts in self._waiting[0]:
                self._link.write(*parts)
                await self._link.drain()
            self._waiting.popleft()
        self._empty.set()


class AverageFrames:
    """The frames of one sum's averages in both versions: views of the averages' memory, shared by all workers."""

    def __init__(self, total: StepSum, codec: Codec, chunk_bytes: int) -> None:
        self._sum, self._codec, self._chunk_bytes = total, codec, chunk_bytes
        self._made: dict[tuple[Key, int], tuple[Sequence[Bytes], int]] = {}

    def whole_frame(self, key: Key) -> Iterator[Sequence[Bytes]]:
        """Version 1: one frame, in pieces."""
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

    @property
    def table(self) -> Table:
        """Version 2: the table of all parts, the same as the gradients'."""
        assert self._sum.plan is not None
        shapes = [self._sum.shape(part(number)) for number in range(self._sum.plan.number)]
        parts = tuple(Part(shape.dtype, shape.count) for shape in shapes)
        return Table(Kind.AVERAGE, self._sum.step, self._sum.attempt, parts)

    def chunks(self, key: Key) -> Iterator[Sequence[Bytes]]:
        """Version 2: the frames of a part; ends early when the sum is dropped."""
        shape = self._sum.shape(key)
        at_once = max(1, self._chunk_bytes // shape.dtype.num_bytes)
        for offset in range(0, shape.count, at_once):
            if self._sum.is_dropped:
                return
            yield self._chunk(key, offset, min(at_once, shape.count - offset))

    def _chunk(self, key: Key, offset: int, count: int) -> Sequence[Bytes]:
        frame, uses = self._made.pop((key, offset), ((), 0))
        frame = frame or self._encoded(key, offset, count)
        # A packed chunk has memory of its own, which is freed after the last worker's use.
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


class Sender(Protocol):
    """The server's messages to one worker, in the worker's version. All go through its outbox, so in order."""

    def assign(self, total: StepSum, share: Share, samples: int) -> None:
        """Ask for the gradient of this share of the step's samples."""

    def again(self, total: StepSum, why: str) -> None:
        """Ask for the gradient that was computed already once more."""

    def average(self, frames: AverageFrames, total: StepSum, key: Key) -> None:
        """Send a key's average."""

    def losses(self, total: StepSum) -> None:
        """Send the mean loss: all workers reported theirs before all of their gradients arrived."""

    def done(self, frames: AverageFrames, total: StepSum, seconds: float) -> None:
        """End the step: all of its averages are queued."""

    def beat(self) -> None:
        """Send a heartbeat."""

    def leave(self, reason: str) -> None:
        """Say that the server ends normally."""

    def refuse(self, reason: Reason, detail: str) -> None:
        """Say that this worker is refused, or that the run failed."""


class SenderV1:
    """Version 1 has one message, Shutdown, for every kind of end. is_assigning: whether shares are sent at all."""

    def __init__(self, outbox: Outbox, is_assigning: bool = True) -> None:
        self._outbox, self._is_assigning = outbox, is_assigning

    def assign(self, total: StepSum, share: Share, samples: int) -> None:
        if self._is_assigning:
            self._outbox.put(ShardAssignment(total.step, share.start, share.end))

    def again(self, total: StepSum, why: str) -> None:
        raise AssertionError("version 1 cannot send again")

    def average(self, frames: AverageFrames, total: StepSum, key: Key) -> None:
        self._outbox.put_all(frames.whole_frame(key))

    def losses(self, total: StepSum) -> None:
        if total.plan is None or total.plan.kind == "blocks":
            self._outbox.put(AveragedGradient(total.step, _NO_VECTOR, total.loss))

    def done(self, frames: AverageFrames, total: StepSum, seconds: float) -> None:
        pass  # the worker counts the averages itself

    def beat(self) -> None:
        self._outbox.put(Heartbeat(_SERVER_NAME, _milliseconds()))

    def leave(self, reason: str) -> None:
        self._outbox.put(Shutdown())

    def refuse(self, reason: Reason, detail: str) -> None:
        self._outbox.put(Shutdown())


class SenderV2:
    """Averages go out as a table, chunks of its parts as they are completed, and `AverageDone`."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._table_of: StepSum | None = None

    def assign(self, total: StepSum, share: Share, samples: int) -> None:
        self._outbox.put(Assignment(total.step, total.attempt, share.start, share.end, samples))

    def again(self, total: StepSum, why: str) -> None:
        self._outbox.put(Again(total.step, total.attempt, why))

    def average(self, frames: AverageFrames, total: StepSum, key: Key) -> None:
        self._begin(frames, total)
        self._outbox.put_all(frames.chunks(key))

    def _begin(self, frames: AverageFrames, total: StepSum) -> None:
        if self._table_of is not total:
            self._table_of = total
            self._outbox.put(frames.table)

    def losses(self, total: StepSum) -> None:
        pass  # they are part of AverageDone

    def done(self, frames: AverageFrames, total: StepSum, seconds: float) -> None:
        self._begin(frames, total)
        done = AverageDone(total.step, total.attempt, total.loss, total.correct, total.total, seconds)
        self._outbox.put(done)
        self._table_of = None

    def beat(self) -> None:
        self._outbox.put(Beat(_milliseconds()))

    def leave(self, reason: str) -> None:
        self._outbox.put(Leave(reason))

    def refuse(self, reason: Reason, detail: str) -> None:
        self._outbox.put(Refused(reason, detail))


def _milliseconds() -> int:
    """Since the epoch."""
    return int(time.time() * 1000)
