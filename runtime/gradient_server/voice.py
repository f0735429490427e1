"""What a gradient server says to one worker, in the version that it speaks."""

from __future__ import annotations

import time
from typing import Protocol

import numpy

from runtime.gradient_server.average_frames import AverageFrames
from runtime.gradient_server.buffers import Key
from runtime.gradient_server.outbox import Outbox
from runtime.gradient_server.sample_shares import Share
from runtime.gradient_server.step_sum import StepSum
from runtime.gradient_server.wire.messages import (
    Again,
    Assignment,
    AveragedGradient,
    AverageDone,
    Beat,
    Heartbeat,
    Leave,
    Reason,
    Refused,
    ShardAssignment,
    Shutdown,
)

_NAME = "gradient server"
_NO_VECTOR = numpy.empty(0, numpy.float32)


class Voice(Protocol):
    """All of it goes through the worker's outbox, so that it comes in order."""

    def assign(self, total: StepSum, share: Share, samples: int) -> None:
        """Compute these samples of the step."""

    def again(self, total: StepSum, why: str) -> None:
        """Send what was computed once more."""

    def average(self, frames: AverageFrames, total: StepSum, key: Key) -> None:
        """A key's average is there."""

    def losses(self, total: StepSum) -> None:
        """All have told their loss, before all of their gradients have come."""

    def done(self, frames: AverageFrames, total: StepSum, seconds: float) -> None:
        """All averages of the step have been sent."""

    def beat(self) -> None:
        """The server is there."""

    def leave(self, reason: str) -> None:
        """The server ends, in order."""

    def refuse(self, reason: Reason, detail: str) -> None:
        """This worker is not wanted, or the run has failed."""


class VoiceV1:
    """Version 1 knows one word for each end, whatever its reason."""

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
        pass  # it counts the averages itself

    def beat(self) -> None:
        self._outbox.put(Heartbeat(_NAME, _milliseconds()))

    def leave(self, reason: str) -> None:
        self._outbox.put(Shutdown())

    def refuse(self, reason: Reason, detail: str) -> None:
        self._outbox.put(Shutdown())


class VoiceV2:
    """Averages come as a table, then chunks of its parts as they get ready, then `AverageDone`."""

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
        pass  # they come with the end of the step

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
