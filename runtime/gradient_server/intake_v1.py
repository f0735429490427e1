"""What a worker of version 1 sends, taken into the step's sum: checked against what it was told."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy

from runtime.gradient_server.buffers import Key
from runtime.gradient_server.desk import Desk
from runtime.gradient_server.step_sum import WHOLE, GradientRefused, Plan, StepSum, block, component
from runtime.gradient_server.wire.frame_reader import Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.messages import (
    BlockGradientPayload,
    GradientPayload,
    Heartbeat,
    NonBlockGradientPayload,
    Reason,
    Shutdown,
)

_ITEM_BYTES = 4


class IntakeV1:
    """One worker. Raises GradientRefused."""

    def __init__(self, desk: Desk, worker: int) -> None:
        self._desk, self._worker = desk, worker
        self._sum: StepSum | None = None
        self._key: Key | None = None
        self._sent_blocks_of: StepSum | None = None
        """The latest step that it sent as blocks."""

    def take(self, item: Item) -> None:
        match item:
            case VectorPiece():
                if self._sum is not None and self._key is not None and self._sum is self._desk.sum:
                    values = numpy.frombuffer(item.data, "<f4")
                    self._sum.add(self._worker, self._key, item.offset_bytes // _ITEM_BYTES, values)
            case VectorBegins():
                self._begin(item.head, item.count)
            case VectorEnds():
                self._end(item.message)
            case Heartbeat():
                pass
            case Shutdown():
                self._desk.left(self._worker, "")
            case _:
                self._refuse(Reason.UNEXPECTED, f"{type(item).__name__}.")

    def _refuse(self, reason: Reason, detail: str) -> NoReturn:
        raise GradientRefused(reason, detail, self._worker)

    def _begin(self, head: Any, count: int) -> None:
        before = self._sent_blocks_of
        if isinstance(head, GradientPayload) and count == 0 and before is not None and head.step == before.step:
            self._check_worker(head.worker_id)
            self._sum, self._key = before, None
            return  # it tells its loss after its blocks, with which the step may have ended
        total = self._current(head.step, head.worker_id)
        self._sum, self._key = total, None
        self._desk.begun()
        if isinstance(head, GradientPayload) and count == 0 and (total.plan is None or total.plan.kind == "blocks"):
            return  # of one that sends blocks: it tells its loss, and no more
        self._key, plan, sizes = self._key_of(head, count)
        if plan is not None:
            total.settle(self._worker, plan)
        total.begin(self._worker, self._key, count, sizes=sizes)

    def _key_of(self, head: Any, count: int) -> tuple[Key, Plan | None, tuple[int, ...]]:
        """And how many others there are, where that is told, and the sizes of its tensors."""
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
        total, now = self._desk.sum, self._desk.step
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
        if total is None or total not in (self._desk.sum, self._sent_blocks_of):
            return
        if isinstance(message, GradientPayload):
            total.report(self._worker, message.loss, message.correct, message.total)
        if key is None:
            self._desk.told_loss(total)
        elif total.end(self._worker, key):
            self._desk.averaged(total, key)
        if key is not None and key != WHOLE:
            self._sent_blocks_of = total
        if total is self._desk.sum and total.has_all_of(self._worker):
            self._desk.reported(self._worker)
