"""Every undocumented part of torch that process_groups uses, and what for; any torch release may change it.

A backend is made straight from a prefixed store, its rank and its size. The documented `dist.new_group` needs a global
default group and every rank's cooperation; this needs the members only, and two meshes can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from process_groups.call import Call

BACKSTOP = 5.0  # seconds: our own deadline comes first and names the rank; this one frees the backend's thread

_CALLS = {
    "allreduce": "all_reduce",
    "_reduce_scatter_base": "reduce_scatter of one tensor, without a list of parts",
    "_allgather_base": "all_gather into one tensor, without a list of parts",
    "broadcast": "broadcast",
    "alltoall_base": "all_to_all of one tensor, without a list of parts",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
BACKENDS = {
    "ProcessGroupGloo": "the backend for CPU tensors, made without a default process group",
    "ProcessGroupGloo.create_device": "sockets on a given address or interface",
    "ProcessGroupGloo.create_default_device": "sockets on the interface that gloo chooses",
    "ProcessGroupGloo._Options": "the settings of a gloo backend",
    "ProcessGroupGloo._Options._timeout": "how long its members may take to connect",
    "ProcessGroupGloo._Options._devices": "which sockets it uses",
    **{f"ProcessGroupGloo.{name}": use for name, use in _CALLS.items()},
    "AllreduceOptions": "op and timeout of an all_reduce",
    "ReduceScatterOptions": "op and timeout of a reduce_scatter",
    "AllgatherOptions": "timeout of an all_gather",
    "BroadcastOptions": "root and timeout of a broadcast",
    "AllToAllOptions": "timeout of an all_to_all",
    "BarrierOptions": "timeout of a barrier",
}
"""Names in torch.distributed.distributed_c10d, and what each is used for."""

NCCL_BACKENDS = {
    "ProcessGroupNCCL": "the backend for CUDA tensors, made without a default process group",
    "ProcessGroupNCCL.Options": "the settings of an NCCL backend",
    "ProcessGroupNCCL.Options._timeout": "how long making a communicator may take",
    "ProcessGroupNCCL.abort": "ends the calls under way",
    **{f"ProcessGroupNCCL.{name}": use for name, use in _CALLS.items()},
}
"""The same, where torch is built with NCCL."""

TENSORS = {"_is_zerotensor": "copies by address must leave out tensors that have no memory (torch's forward gradients)"}
"""Methods of torch.Tensor, and what each is used for."""

has_no_memory: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor is all zeros without memory of its own. Its `data_ptr()` must not be read from."""


class TorchWork(Protocol):
    """The part of torch.distributed's Work that is used here."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta = ...) -> bool: ...
    def get_future(self) -> Any: ...


class TorchBackend(Protocol):
    """The part of torch.distributed's backends that is used here."""

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> TorchWork: ...
    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, options: object) -> TorchWork: ...
    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, options: object) -> TorchWork: ...
    def broadcast(self, tensors: list[torch.Tensor], options: object) -> TorchWork: ...
    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, out_sizes: list[int], in_sizes: list[int], options: object
    ) -> TorchWork: ...
    def barrier(self, options: object) -> TorchWork: ...
    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> TorchWork: ...
    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> TorchWork: ...


def gloo_device(*, address: str | None = None, interface: str | None = None) -> Any:
    """Listening sockets for one gloo backend; by default on the interface that gloo chooses."""
    if address is not None:
        return dist.ProcessGroupGloo.create_device(hostname=address)
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def gloo_backend(store: dist.Store, rank: int, size: int, device: Any, timeout: float) -> TorchBackend:
    """Blocks until all members have connected."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._devices = [device]
    backend: Any = dist.ProcessGroupGloo(store, rank, size, options)  # torch's stubs say less than its backends do
    return backend  # type: ignore[no-any-return]


def nccl_backend(store: dist.Store, rank: int, size: int, timeout: float) -> Any:
    """A TorchBackend that also has `abort`; its communicator is made at its first call."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def issue(backend: TorchBackend, call: Call, tag: int) -> TorchWork:
    """Hand one call to a torch backend; returns at once. A send meets the receive that has the same tag."""
    source, target, peer = call.source, call.target, call.peer
    # Each kind needs only some of these, and Group gives them; checking again would cost time while peers wait.
    if TYPE_CHECKING:
        assert source is not None
        assert target is not None
        assert peer is not None
    match call.kind:
        case "all_reduce":
            return backend.allreduce([target], _options(c10d.AllreduceOptions, call.timeout, call.op))
        case "reduce_scatter":
            options = _options(c10d.ReduceScatterOptions, call.timeout, call.op)
            return backend._reduce_scatter_base(target, source, options)
        case "all_gather":
            options = _options(c10d.AllgatherOptions, call.timeout)
            return backend._allgather_base(_as_bytes(target), _as_bytes(source), options)
        case "broadcast":
            return backend.broadcast([_as_bytes(target)], _options(c10d.BroadcastOptions, call.timeout, root=peer))
        case "all_to_all":
            options = _options(c10d.AllToAllOptions, call.timeout)
            return backend.alltoall_base(_as_bytes(target), _as_bytes(source), [], [], options)
        case "barrier":
            return backend.barrier(_options(c10d.BarrierOptions, call.timeout))
        case "send":
            return backend.send([_as_bytes(source)], peer, tag)
        case "recv":
            return backend.recv([_as_bytes(target)], peer, tag)
    raise AssertionError(call)


_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


@lru_cache(maxsize=1024)  # torch copies them, and making them costs as much as a small call's own work
def _options(kind: type[Any], timeout: float, op: str | None = None, root: int | None = None) -> Any:
    options = kind()
    options.timeout = timedelta(seconds=timeout + BACKSTOP)
    if op is not None:
        options.reduceOp = _OPS[op]
    if root is not None:
        options.rootRank, options.rootTensor = root, 0
    return options


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Moving bytes does not depend on the dtype, so bool and complex work as well as float."""
    return tensor.reshape(-1).view(torch.uint8)
