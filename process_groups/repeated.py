"""Small calls that are made again and again on one tensor: what there is to find out about them is found once.

Small calls take about as long as Python needs to prepare them, so this path is kept as short as possible. It does
exactly what `Issuer.start` does, and returns None wherever the usual case does not apply.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Generator
from dataclasses import replace

import torch

from process_groups.call import Call
from process_groups.call_queue import Channel, Quick
from process_groups.issuing import Issuer, numbering
from process_groups.work import Work
from runtime.errors import CommunicationError

_MOST_KNOWN = 256  # tensors

Key = tuple[str, int | None, int]
"""The call's kind, its peer, and the tensor's id."""


class EndedWork(Work):
    """A call that was carried out when it was made."""

    __slots__ = ("_ended_at",)

    def __init__(self, issuer: Issuer, call: Call, result: torch.Tensor, began: float, ended: float) -> None:
        self._owner, self.call, self._result = issuer, call, result
        self.began, self._ended_at = began, ended

    def __repr__(self) -> str:
        return f"<Work: {self.call.describe()} on group {self._owner.name}, ended>"

    def done(self) -> bool:
        return True

    def ended_at(self) -> float:
        return self._ended_at

    def __await__(self) -> Generator[object, None, torch.Tensor]:
        if self._owner.has_kept_the_loop():
            yield None
        assert self._result is not None
        return self._result


class RepeatedCalls:
    """A group's small calls that may be made again."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer, self._transport = issuer, issuer.transport
        self._up_to = -1 if issuer.transport is None else issuer.transport.repeats_up_to
        self._known: dict[Key, Repeated | None] = {}

    def knows(self, kind: str, tensor: torch.Tensor, peer: int | None = None) -> bool:
        """Whether the next such call takes the short path."""
        return self._known.get((kind, peer, id(tensor))) is not None

    def start(
        self, kind: str, tensor: torch.Tensor, peer: int | None, op: str | None = None, strategy: str | None = None
    ) -> Work | None:
        """Make the call if it is known; None, and nothing done, if it has to be made the usual way."""
        repeated = self._known.get((kind, peer, id(tensor)))
        return repeated.start(tensor) if repeated is not None and repeated.is_for(tensor, op, strategy) else None

    def remember(self, tensor: torch.Tensor, strategy: str | None, call: Call) -> None:
        """Prepare for the next call on this tensor, if it is small and contiguous. The second call does so: most
        tensors are used once."""
        if tensor.nbytes > self._up_to or self._transport is None or not tensor.is_contiguous():
            return
        if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
            return
        found = self._transport.repeatable(call)
        if found is None:
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        key = (call.kind, call.peer, id(tensor))
        if key not in self._known:
            self._known[key] = None
        else:
            self._known[key] = Repeated(self._issuer, *found, self._forgetting(tensor, key), strategy, call)

    def _forgetting(self, tensor: torch.Tensor, key: Key) -> weakref.ref[torch.Tensor]:
        known = self._known
        return weakref.ref(tensor, lambda _: known.pop(key, None))  # a strong one would keep its memory in use


class Repeated:
    """One kind of call on one tensor."""

    __slots__ = (
        "_call", "_channel", "_data_ptr", "_dtype", "_issuer", "_num_bytes", "_numbering", "_op", "_quick", "_shape",
        "_strategy", "_tensor",
    )  # fmt: skip

    def __init__(
        self,
        issuer: Issuer,
        quick: Quick,
        channel: Channel,
        reference: weakref.ref[torch.Tensor],
        strategy: str | None,
        call: Call,
    ) -> None:
        tensor = reference()
        assert tensor is not None
        self._issuer, self._quick, self._channel = issuer, quick, channel
        self._op, self._strategy, self._numbering = call.op, strategy, numbering(call.kind, call.peer)
        self._tensor = reference
        self._data_ptr, self._shape, self._num_bytes = tensor.data_ptr(), tensor.shape, tensor.nbytes
        self._dtype = tensor.dtype
        values = tensor.detach().view(-1)  # the user may ask for gradients of the tensor later on
        source, target = (values if side is not None else None for side in (call.source, call.target))
        memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(values.data_ptr())).cast("B")
        self._call = replace(call, source=source, target=target, timeout=issuer.timeout, memory=memory)

    def is_for(self, tensor: torch.Tensor, op: str | None, strategy: str | None) -> bool:
        """Whether this is still that tensor, as it was."""
        return (
            self._tensor() is tensor
            and self._op == op
            and self._strategy == strategy
            and self._data_ptr == tensor.data_ptr()
            and self._shape == tensor.shape
            and self._dtype is tensor.dtype
            and tensor.is_contiguous()
        )

    def start(self, tensor: torch.Tensor) -> Work | None:
        """Make the call; None, and nothing done, if it has to be made the usual way."""
        issuer, call, quick = self._issuer, self._call, self._quick
        if issuer.closed is not None or not quick.is_next():
            return None
        began = time.monotonic()
        call.number = issuer.numbers[self._numbering] + 1
        try:
            if not self._channel.post_at_once(call):
                return None
            left = quick.begin(call)
        except CommunicationError as refused:
            issuer.numbers[self._numbering] = call.number
            work = Work(issuer, call.copy(), tensor, None, began)
            issuer.fail(work, refused)
            return work
        issuer.numbers[self._numbering] = call.number
        if left is not None:
            under_way = call.copy()  # the number of this one must not change
            work = Work(issuer, under_way, tensor, None, began, quick.queue.add_waiting(under_way, left))
            issuer.under_way.add(work)
            return work
        self._channel.finish()
        ended = time.monotonic()
        if issuer.recorder is not None:
            issuer.recorder.record(
                issuer.name, call.kind, "default", call.strategy, self._num_bytes, issuer.size, ended - began, began
            )
        return EndedWork(issuer, call, tensor, began, ended)
