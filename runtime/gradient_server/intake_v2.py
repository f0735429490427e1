"""What a worker of version 2 sends, taken into the step's sum: checked against what it was told."""

from __future__ import annotations

from typing import NoReturn

import numpy

from runtime.gradient_server.desk import Desk
from runtime.gradient_server.step_sum import GradientRefused, Plan, StepSum, part
from runtime.gradient_server.wire.frame_reader import Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.messages import (
    Beat,
    Chunk,
    Dtype,
    GradientDone,
    Kind,
    Leave,
    Reason,
    StateDone,
    Table,
)


class IntakeV2:
    """One worker's connection. What it sends of an attempt that is over is passed over. Raises GradientRefused."""

    def __init__(self, desk: Desk, worker: int) -> None:
        self._desk, self._worker = desk, worker
        self.told: tuple[int, int] | None = None
        """Step and attempt that it was asked for last."""
        self._sum: StepSum | None = None
        """That the chunk which comes now is for; None where it is wanted no more, or a state's."""
        self._is_state = False
        self._chunk: Chunk
        self._dtype = Dtype.FLOAT32.numpy
        self._refusal: GradientRefused | None = None

    def take(self, item: Item) -> None:
        match item:
            case VectorPiece():
                if self._is_state:
                    self._desk.state(self._worker, item)
                elif self._sum is not None:
                    self._piece(self._sum, item)
            case VectorBegins(head=Chunk(kind=kind)):
                self._is_state = kind is Kind.STATE
                self._take(kind, item)
            case VectorEnds(message=Chunk(kind=kind)) | Table(kind=kind):
                self._take(kind, item)
            case StateDone():
                self._desk.state(self._worker, item)
            case GradientDone():
                self._done(item)
            case Leave():
                self._desk.left(self._worker, item.reason)
            case Beat():
                pass
            case _:
                self._refuse(Reason.UNEXPECTED, f"{type(item).__name__}.")

    def _take(self, kind: Kind, item: VectorBegins | VectorEnds | Table) -> None:
        if kind is Kind.STATE:
            self._desk.state(self._worker, item)
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
        """What a gradient of this attempt is added to; None where it is wanted no more."""
        if self.told is None or step > self.told[0]:
            self._refuse(Reason.FUTURE_STEP, f"{step}, in step {self._desk.step}.")
        if step < self.told[0]:
            self._refuse(Reason.OLD_STEP, f"{step}, in step {self.told[0]}.")
        if attempt > self.told[1]:
            self._refuse(Reason.WRONG_ATTEMPT, f"{attempt} at step {step}, which is at {self.told[1]}.")
        total = self._desk.sum
        is_wanted = total is not None and (total.step, total.attempt) == (step, attempt)
        return total if is_wanted else None

    def _table(self, table: Table) -> None:
        total = self._current(table.step, table.attempt)
        if total is None:
            return
        self._desk.begun()
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
        if total is not self._desk.sum or self._refusal is not None:
            return
        offset = self._chunk.offset + piece.offset_bytes // self._dtype.itemsize
        try:
            total.add(self._worker, part(self._chunk.part), offset, numpy.frombuffer(piece.data, self._dtype))
        except GradientRefused as refusal:
            self._refusal = refusal  # unless the checksum says that it is not the worker's fault

    def _end(self) -> None:
        total, refusal, self._sum, self._refusal = self._sum, self._refusal, None, None
        if total is None or total is not self._desk.sum:
            return
        if refusal is not None:
            raise refusal
        if total.has_come(self._worker, part(self._chunk.part)):
            self._end_part(total, self._chunk.part)

    def _end_part(self, total: StepSum, number: int) -> None:
        if total.end(self._worker, part(number)):
            self._desk.averaged(total, part(number))

    def _done(self, done: GradientDone) -> None:
        total = self._current(done.step, done.attempt)
        if total is None:
            return
        total.report(self._worker, done.loss, done.correct, done.total)
        if not total.has_all_of(self._worker):
            self._refuse(Reason.WRONG_LENGTH, "it ends before all of its parts have come.")
        self._desk.reported(self._worker)
