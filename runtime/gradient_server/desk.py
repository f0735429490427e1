"""Where what workers send goes: the part of a gradient server that its intakes see."""

from __future__ import annotations

from typing import Protocol

from runtime.gradient_server.buffers import Key
from runtime.gradient_server.step_sum import StepSum
from runtime.gradient_server.wire.frame_reader import Item


class Desk(Protocol):
    """Told of what has come, in the midst of reading it."""

    @property
    def sum(self) -> StepSum | None:
        """What is added to now."""

    @property
    def step(self) -> int:
        """That is computed now, or will be next."""

    def begun(self) -> None:
        """A gradient has begun to come."""

    def averaged(self, total: StepSum, key: Key) -> None:
        """All workers have sent this one."""

    def told_loss(self, total: StepSum) -> None:
        """A worker that sends blocks has told its loss."""

    def reported(self, worker: int) -> None:
        """A worker has sent all that it has to."""

    def left(self, worker: int, reason: str) -> None:
        """A worker says that it leaves."""

    def state(self, worker: int, item: Item) -> None:
        """A part of a worker's state."""
