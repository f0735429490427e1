"""Small calls that are made again and again on one tensor: what there is to find out about them is found once.

Small calls take about as long as Python needs to prepare them, so this way is kept as short as it can be. It does
exactly what the long one does, and leaves to that whatever is not the usual case.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from process_groups.call_queue import Quick
from process_groups.transport import Call
from process_groups.work import Work
from runtime.errors import CommunicationError

if TYPE_CHECKING:
    from process_groups.group import Group
    from process_groups.shared_memory.transport import SharedMemoryTransport


class EndedWork(Work):
    """A call that was carried out when it was made."""

    __slots__ = ("_ended_at",)

    def __init__(self, group: Group, call: Call, result: torch.Tensor, began: float, ended: float) -> None:
        self._group, self.call, self._result = group, call, result
        self.began, self._ended_at = began, ended

    def __repr__(self) -> str:
        return f"<Work: {self.call.describe()} on group {self._group.name}, ended>"

    def done(self) -> bool:
        return True

    def ended_at(self) -> float:
        return self._ended_at

    def __await__(self) -> Generator[object, None, torch.Tensor]:
        if self._group._has_kept_the_loop():
            yield None
        assert self._result is not None
        return self._result


class Repeated:
    """One kind of call on one tensor."""

    __slots__ = (
        "_call", "_channel", "_data_ptr", "_dtype", "_group", "_num_bytes", "_op", "_order", "_quick", "_shape",
        "_strategy", "_tensor", "_transport",
    )  # fmt: skip

    def __init__(
        self,
        group: Group,
        transport: SharedMemoryTransport,
        quick: Quick,
        tensor: torch.Tensor,
        strategy: str | None,
        call: Call,
    ) -> None:
        self._group, self._transport, self._quick = group, transport, quick
        self._op, self._strategy, self._channel = call.op, strategy, group._channel(call.kind, call.peer)
        self._order = transport.order_of(call)
        known, key = group._repeated, (call.kind, call.peer, id(tensor))
        self._tensor = weakref.ref(tensor, lambda _: known.pop(key, None))  # or its memory would stay in use
        self._data_ptr, self._shape, self._num_bytes = tensor.data_ptr(), tensor.shape, tensor.nbytes
        self._dtype = tensor.dtype
        values = tensor.detach().view(-1)  # the user may ask for gradients of the tensor later on
        source, target = (values if side is not None else None for side in (call.source, call.target))
        memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(values.data_ptr())).cast("B")
        self._call = replace(call, source=source, target=target, timeout=group.timeout, memory=memory)

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
        """Make the call; None, and nothing done, where the long way is needed."""
        group, call, quick = self._group, self._call, self._quick
        if group._closed is not None or not quick.is_next():
            return None
        began = time.monotonic()
        call.number = group._numbers[self._channel] + 1
        try:
            if not self._transport.post_at_once(call, self._order):
                return None
            left = quick.begin(call)
        except CommunicationError as refused:
            group._numbers[self._channel] = call.number
            work = Work(group, call.copy(), tensor, None, began)
            group._fail(work, refused)
            return work
        group._numbers[self._channel] = call.number
        if left is not None:
            under_way = call.copy()  # this one's number shall not change
            work = Work(group, under_way, tensor, None, began, quick.lane.add_waiting(under_way, left))
            group._under_way.add(work)
            return work
        self._order.mine.finish()
        ended = time.monotonic()
        if group._recorder is not None:
            group._recorder.record(
                group.name, call.kind, "default", call.strategy, self._num_bytes, group.size, ended - began, began
            )
        return EndedWork(group, call, tensor, began, ended)
