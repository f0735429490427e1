"""What workers send, checked and added to the step's sum: a receiver for each version."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import numpy

from runtime.gradient_server.buffers import Key
from runtime.gradient_server.step_sum import WHOLE, GradientRefused, Plan, StepSum, block, component, part
from runtime.gradient_server.wire.frames import Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.messages import (
    Beat,
    BlockGradientPayload,
    Chunk,
    Dtype,
    GradientDone,
    GradientPayload,
    Heartbeat,
    Kind,
    Leave,
    NonBlockGradientPayload,
    Reason,
    Shutdown,
    StateDone,
    Table,
)

_ITEM_BYTES_V1 = 4


class GradientSink(Protocol):
    """The part of a gradient server that receivers report to. Called while a frame is being read."""

    @property
    def sum(self) -> StepSum | None:
        """The sum that gradients are added to now; None between steps."""

    @property
    def step(self) -> int:
        """The step that is computed now, or next."""

    def on_gradient_started(self) -> None:
        """A worker's gradient has started to arrive."""

    def on_key_complete(self, total: StepSum, key: Key) -> None:
        """All workers have sent this key: its average is complete."""

    def on_loss(self, total: StepSum) -> None:
        """A worker that sends blocks has reported its loss."""

    def on_gradient_done(self, worker: int) -> None:
        """A worker has sent its whole gradient."""

    def on_leave(self, worker: int, reason: str) -> None:
        """A worker leaves normally."""

    def on_state(self, worker: int, item: Item) -> None:
        """An item of a worker's state has arrived."""


class ReceiverV1:
    """One worker's frames of version 1. Raises GradientRefused."""

    def __init__(self, sink: GradientSink, worker: int) -> None:
        self._sink, self._worker = sink, worker
        self._sum: StepSum | None = None
        self._key: Key | None = None
        self._sent_blocks_of: StepSum | None = None
        """The latest step that it sent as blocks."""

    def take(self, item: Item) -> None:
        match item:
            case VectorPiece():
                if self._sum is not None and self._key is not None and self._sum is self._sink.sum:
                    values = numpy.frombuffer(item.data, "<f4")
                    self._sum.add(self._worker, self._key, item.offset_bytes // _ITEM_BYTES_V1, values)
            case VectorBegins():
                self._begin(item.head, item.count)
            case VectorEnds():
                self._end(item.message)
            case Heartbeat():
                pass
            case Shutdown():
                self._sink.on_leave(self._worker, "")
            case _:
                self._refuse(Reason.UNEXPECTED, f"{type(item).__name__}.")

    def _refuse(self, reason: Reason, detail: str) -> NoReturn:
        raise GradientRefused(reason, detail, self._worker)

    def _begin(self, head: Any, count: int) -> None:
        before = self._sent_blocks_of
        if isinstance(head, GradientPayload) and count == 0 and before is not None and head.step == before.step:
            self._check_worker(head.worker_id)
            self._sum, self._key = before, None
            return  # its loss follows its blocks, which may have completed the step
        total = self._current(head.step, head.worker_id)
        self._sum, self._key = total, None
        self._sink.on_gradient_started()
        if isinstance(head, GradientPayload) and count == 0 and (total.plan is None or total.plan.kind == "blocks"):
            return  # a worker that sends blocks: this is only its loss
        self._key, plan, sizes = self._key_of(head, count)
        if plan is not None:
            total.settle(self._worker, plan)
        total.begin(self._worker, self._key, count, sizes=sizes)

    def _key_of(self, head: Any, count: int) -> tuple[Key, Plan | None, tuple[int, ...]]:
        """(key, plan, tensor sizes) of a message; plan is None where the message does not say how many keys follow."""
        if isinstance(head, GradientPayload):
            return WHOLE, Plan("whole"), ()
        if isinstance(head, NonBlockGradientPayload):
            return component(head.component), None, ()
        assert isinstance(head, BlockGradientPayload)
        if head.block >= head.num_blocks:
            self._refuse(Reason.WRONG_BLOCK, f"block {head.block} of {head.num_blocks}.")
        if (added := sum(head.sizes)) != count:
            self._refuse(Reason.WRONG_SIZES, f"block {head.block}: sizes add up to {added}, not {count}.")
        return block(head.block), Plan("blocks", head.num_blocks), head.sizes

    def _current(self, step: int, worker: int) -> StepSum:
        total, now = self._sink.sum, self._sink.step
        self._check_worker(worker)
        if step < now:
            self._refuse(Reason.OLD_STEP, f"{step}, in step {now}.")
        if step > now or total is None:
            self._refuse(Reason.FUTURE_STEP, f"{step}, in step {now}.")
        return total

    def _check_worker(self, worker: int) -> None:
        if worker != self._worker:
            self._refuse(Reason.WRONG_WORKER, f"{worker}, from worker {self._worker}.")

    def _end(self, message: Any) -> None:
        total, key = self._sum, self._key
        self._sum = self._key = None
        if total is None or total not in (self._sink.sum, self._sent_blocks_of):
            return
        if isinstance(message, GradientPayload):
            total.report(self._worker, message.loss, message.correct, message.total)
        if key is None:
            self._sink.on_loss(total)
        elif total.end(self._worker, key):
            self._sink.on_key_complete(total, key)
        if key is not None and key != WHOLE:
            self._sent_blocks_of = total
        if total is self._sink.sum and total.has_all_of(self._worker):
            self._sink.on_gradient_done(self._worker)


class ReceiverV2:
    """One connection's frames of version 2. Frames of an attempt that is over are ignored. Raises GradientRefused."""

    def __init__(self, sink: GradientSink, worker: int) -> None:
        self._sink, self._worker = sink, worker
        self.requested: tuple[int, int] | None = None
        """(step, attempt) of the latest gradient that the worker was asked for."""
        self._sum: StepSum | None = None
        """The sum of the chunk that is arriving; None if the attempt is over, or if the chunk is of a state."""
        self._is_state = False
        self._chunk: Chunk
        self._dtype = Dtype.FLOAT32.numpy
        self._refusal: GradientRefused | None = None

    def take(self, item: Item) -> None:
        match item:
            case VectorPiece():
                if self._is_state:
                    self._sink.on_state(self._worker, item)
                elif self._sum is not None:
                    self._piece(self._sum, item)
            case VectorBegins(head=Chunk(kind=kind)):
                self._is_state = kind is Kind.STATE
                self._take(kind, item)
            case VectorEnds(message=Chunk(kind=kind)) | Table(kind=kind):
                self._take(kind, item)
            case StateDone():
                self._sink.on_state(self._worker, item)
            case GradientDone():
                self._done(item)
            case Leave():
                self._sink.on_leave(self._worker, item.reason)
            case Beat():
                pass
            case _:
                self._refuse(Reason.UNEXPECTED, f"{type(item).__name__}.")

    def _take(self, kind: Kind, item: VectorBegins | VectorEnds | Table) -> None:
        if kind is Kind.STATE:
            self._sink.on_state(self._worker, item)
        elif kind is Kind.AVERAGE:
            self._refuse(Reason.UNEXPECTED, "an average, from a worker.")
        elif isinstance(item, VectorBegins):
            self._begin(item)
        elif isinstance(item, VectorEnds):
            self._end()
        else:
            self._table(item)

    def _refuse(self, reason: Reason, detail: str) -> NoReturn:
        raise GradientRefused(reason, detail, self._worker)

    def _current(self, step: int, attempt: int) -> StepSum | None:
        """The sum that this attempt is added to; None if the attempt is over."""
        if self.requested is None or step > self.requested[0]:
            self._refuse(Reason.FUTURE_STEP, f"{step}, in step {self._sink.step}.")
        if step < self.requested[0]:
            self._refuse(Reason.OLD_STEP, f"{step}, in step {self.requested[0]}.")
        if attempt > self.requested[1]:
            self._refuse(Reason.WRONG_ATTEMPT, f"{attempt} at step {step}, which is at {self.requested[1]}.")
        total = self._sink.sum
        is_wanted = total is not None and (total.step, total.attempt) == (step, attempt)
        return total if is_wanted else None

    def _table(self, table: Table) -> None:
        total = self._current(table.step, table.attempt)
        if total is None:
            return
        self._sink.on_gradient_started()
        total.settle(self._worker, Plan("parts", len(table.parts)))
        for number, row in enumerate(table.parts):
            total.begin(self._worker, part(number), row.count, row.dtype)
        for number, row in enumerate(table.parts):
            if row.count == 0:
                self._end_part(total, number)

    def _begin(self, begins: VectorBegins) -> None:
        assert isinstance(begins.head, Chunk)
        chunk = begins.head
        self._sum = self._current(chunk.step, chunk.attempt)
        if self._sum is None:
            return
        shape = self._sum.shape_from(self._worker, part(chunk.part))
        if begins.count and begins.item_bytes != shape.dtype.num_bytes:
            detail = f"part {chunk.part}: elements of {begins.item_bytes} bytes where {shape.dtype.name.lower()} has "
            self._refuse(Reason.WRONG_LENGTH, f"{detail}{shape.dtype.num_bytes}.")
        self._chunk, self._dtype = chunk, shape.dtype.numpy

    def _piece(self, total: StepSum, piece: VectorPiece) -> None:
        if total is not self._sink.sum or self._refusal is not None:
            return
        offset = self._chunk.offset + piece.offset_bytes // self._dtype.itemsize
        try:
            total.add(self._worker, part(self._chunk.part), offset, numpy.frombuffer(piece.data, self._dtype))
        except GradientRefused as refusal:
            self._refusal = refusal  # raised at the chunk's end: a wrong checksum there means the network damaged it

    def _end(self) -> None:
        total, refusal, self._sum, self._refusal = self._sum, self._refusal, None, None
        if total is None or total is not self._sink.sum:
            return
        if refusal is not None:
            raise refusal
        if total.has_come(self._worker, part(self._chunk.part)):
            self._end_part(total, self._chunk.part)

    def _end_part(self, total: StepSum, number: int) -> None:
        if total.end(self._worker, part(number)):
            self._sink.on_key_complete(total, part(number))

    def _done(self, done: GradientDone) -> None:
        total = self._current(done.step, done.attempt)
        if total is None:
            return
        total.report(self._worker, done.loss, done.correct, done.total)
        if not total.has_all_of(self._worker):
            self._refuse(Reason.WRONG_LENGTH, "it ends before all of its parts have come.")
        self._sink.on_gradient_done(self._worker)
