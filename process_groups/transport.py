"""The contract of whatever moves a group's bytes: shared memory, a torch backend, or one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from process_groups.call import Call, Completion, Explanation
from process_groups.call_queue import Channel, Quick
from process_groups.pipes import Pipe
from process_groups.tensor_exchange import TensorExchange
from runtime.errors import CommunicationError


class Transport(Protocol):
    """Moves the bytes of one group, for one of its ranks. Subclasses inherit that they have no shortcuts."""

    name: str
    device: torch.device
    """Where tensors must live."""

    repeats_up_to: int = 0
    """Bytes up to which `repeatable` may have a shortcut."""

    def start(self, call: Call) -> Completion:
        """Put the call in order and return at once. Raises Mismatch where a peer has called something else."""
        raise NotImplementedError

    def trouble(self, call: Call) -> CommunicationError | None:
        """Why a call under way will never end: a peer died, left, or aborted the group. Cheap; asked while waiting."""
        raise NotImplementedError

    def culprit(self, call: Call) -> tuple[int, str] | None:
        """For a call that took too long: a group rank that keeps it from ending, and how, as `not_made` says it."""
        raise NotImplementedError

    def explain(self, strategy: str, num_bytes: int) -> Explanation:
        """Which strategy an all-reduce that asks for this one uses, and why."""
        raise NotImplementedError

    def extra_seconds(self, num_bytes: int) -> float:
        """How much longer than its own work an adaptive all-reduce of this size may take if it is made now."""
        return 0.0

    def finished(self, call: Call) -> None:
        """The call ended without error, and this rank has seen it."""
        raise NotImplementedError

    def abort(self, error: CommunicationError) -> None:
        """Abort the group on all ranks, with the reason. Calls under way end soon; a second abort does nothing."""
        raise NotImplementedError

    async def close(self, deadline: float) -> None:
        """Close normally: wait, at most until this moment, until the peers have all they need from this rank."""
        raise NotImplementedError

    # Shortcuts, for transports that share memory.

    def repeatable(self, call: Call) -> tuple[Quick, Channel] | None:
        """How to make this call again and again on the same small tensor; None if only `start` can make it."""
        return None

    def pipe(self, peer: int) -> Pipe | None:
        """A pipe to and from a group rank; None if the group's sends and receives are the only way."""
        return None

    def tensor_exchange(self, timeout: float, abort: Callable[[CommunicationError], object]) -> TensorExchange | None:
        """An exchange with all ranks of the group; None if the group's collectives are the only way.

        `abort` aborts the group, from any thread."""
        return None
