"""A small all-reduce that is made again and again on one tensor: what there is to find out about it is found once.

Small calls take about as long as Python needs to prepare them, so this way is kept as short as it can be. It does
exactly what the long one does, and leaves to that whatever is not the usual case.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from process_groups.transport import Call
from process_groups.work import Work
from runtime.errors import CommunicationError

if TYPE_CHECKING:
    from process_groups.group import Group
    from process_groups.shared_memory import SharedMemoryTransport


class EndedWork(Work):
    """A call that was carried out when it was made."""

    __slots__ = ()

    def __init__(self, group: Group, call: Call, result: torch.Tensor) -> None:
        self._group, self.call, self._result = group, call, result

    def __repr__(self) -> str:
        return f"<Work: {self.call.describe()} on group {self._group.name}, ended>"

    def done(self) -> bool:
        return True

    def __await__(self) -> Generator[object, None, torch.Tensor]:
        if self._group._has_kept_the_loop():
            yield None
        assert self._result is not None
        return self._result


class RepeatedAllReduce:
    """One tensor, one op, and the default strategy."""

    __slots__ = (
        "_call", "_data_ptr", "_group", "_is_alive", "_num_bytes", "_op", "_shape", "_strategy", "_transport",
    )  # fmt: skip

    def __init__(
        self, group: Group, transport: SharedMemoryTransport, tensor: torch.Tensor, strategy: str | None, call: Call
    ) -> None:
        assert call.target is not None
        self._group, self._transport, self._op, self._strategy = group, transport, call.op, strategy
        self._is_alive = weakref.ref(tensor)
        self._data_ptr, self._shape, self._num_bytes = tensor.data_ptr(), tensor.shape, tensor.nbytes
        target = call.target.detach().view(-1)  # the user may ask for gradients of the tensor later on
        self._call = replace(call, source=target, target=target, timeout=group.timeout)

    def is_for(self, tensor: torch.Tensor, op: str, strategy: str | None) -> bool:
        """Whether this is still that tensor, as it was."""
        return (
            self._is_alive() is tensor
            and self._op == op
            and self._strategy == strategy
            and self._data_ptr == tensor.data_ptr()
            and self._shape == tensor.shape
            and tensor.is_contiguous()
        )

    def start(self, tensor: torch.Tensor) -> Work | None:
        """Make the call; None, and nothing done, where the long way is needed."""
        group, transport, call = self._group, self._transport, self._call
        if not transport.is_idle:
            return None
        began = time.monotonic()
        call.number = group._numbers[None] + 1
        try:
            if not transport.post_at_once(call):
                return None
        except CommunicationError as refused:
            group._numbers[None] = call.number
            work = Work(group, replace(call), tensor, None, began)
            group._fail(work, refused)
            return work
        group._numbers[None] = call.number
        flat = transport.begin_flat(call)
        if not flat.at_once():
            under_way = replace(call)  # this one's number shall not change
            work = Work(group, under_way, tensor, None, began, transport.go_on(under_way, flat))
            group._under_way.add(work)
            return work
        transport.finished(call)
        if group._recorder is not None:
            seconds = time.monotonic() - began
            group._recorder.record(
                group.name, "all_reduce", "default", "default", self._num_bytes, group.size, seconds, began
            )
        return EndedWork(group, call, tensor)
