"""The seam to torch.distributed: opens a store and one backend per group, and issues calls on it.

A backend is made straight from a prefixed store, its rank and its size. `dist.new_group` would need a global
default group and every rank's cooperation; this needs the members only, and two meshes can live in one process.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d  # some options are not re-exported

from process_groups.torch_backend.connections import Connections, exchange_endpoints, listening_endpoints
from process_groups.transport import Call
from runtime.environment import InheritedFile, Nowhere, PrivateFile, RankEnvironment, StoreServer
from runtime.errors import DeadlineExceeded, LaunchError, Parallel3DError, PeerLost

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
BACKENDS = ("auto", "gloo", "nccl")
BACKSTOP = 5.0  # seconds: our own deadline comes first and names the rank; this one frees the backend's thread


def open_store(environment: RankEnvironment, timeout: float) -> dist.Store:
    """Where the ranks of this run leave small notes for each other."""
    match environment.meeting_place:
        case Nowhere():
            return dist.HashStore()
        case InheritedFile(fd):
            return dist.FileStore(f"/proc/self/fd/{fd}", environment.world_size)
        case PrivateFile(path):
            _make_private(os.path.dirname(path))
            return dist.FileStore(path, environment.world_size)
        case StoreServer(host, port, served_by_agent):
            serves = environment.rank == 0 and not served_by_agent
            return dist.TCPStore(
                host,
                port,
                environment.world_size,
                is_master=serves,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                master_listen_fd=_listen_on_loopback(host, port) if serves else None,
            )


def _listen_on_loopback(host: str, port: int) -> int | None:
    """Left to itself, a TCPStore listens on every interface, whatever address it is given."""
    with contextlib.suppress(OSError):  # not a name of this host, or taken: torch says it better
        address = socket.gethostbyname(host)
        if address.startswith("127."):
            return socket.create_server((address, port), backlog=1024).detach()
    return None


def explain_store_error(error: dist.DistNetworkError, environment: RankEnvironment, timeout: float) -> Parallel3DError:
    """Why the start-up failed when its store could not be served, reached, or was gone: torch names no rank."""
    place = environment.meeting_place
    assert isinstance(place, StoreServer)  # only that one has a network
    where, text = f"the store at {place.host}:{place.port}", str(error).partition("\n")[0]
    if environment.rank == 0 and not place.served_by_agent:
        return LaunchError(f"start-up: rank 0 can't serve {where}: {text} Choose another MASTER_PORT.")
    server, rank = ("The agent", None) if place.served_by_agent else ("Rank 0", 0)
    if "timed out" in text:
        return DeadlineExceeded(
            f"start-up: {where} could not be reached within {timeout:g} s. {server} serves it: look at its output, or "
            "raise comm.startup_timeout.",
            rank=rank,
            action="start-up",
        )
    return PeerLost(f"start-up: {where} is gone. {server} served it: look at its output.", rank=rank, action="start-up")


def _make_private(folder: str) -> None:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(f"{folder} must be a folder that only you can open (chmod 700); ranks meet there.")


class TorchWork(Protocol):
    """The part of torch.distributed's Work that we use."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta = ...) -> bool: ...
    def get_future(self) -> Any: ...


class TorchBackend(Protocol):
    """The part of torch.distributed's backends that we use."""

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


def choose_backend(wanted: str) -> str:
    """`auto`: nccl where this process has a CUDA device, else gloo."""
    if wanted == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise LaunchError("backend nccl: this process has no CUDA device, or its torch no NCCL. Use gloo, or auto.")
    if wanted != "auto":
        return wanted
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def device_of(backend: str, local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class OpenBackend:
    """A torch backend whose members have met."""

    backend: TorchBackend
    cut: Callable[[], None]
    """Makes calls under way end, on both sides."""


def open_backend(
    kind: str, store: dist.Store, rank: int, size: int, *, loopback: str | None, timeout: float
) -> OpenBackend:
    """Meet the other members of one group. `loopback`: the address to use where all of them are on this host."""
    limit = timedelta(seconds=timeout)
    backend: Any  # torch's stubs say less than its backends do
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        return OpenBackend(backend, backend.abort)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    if loopback is not None:  # nothing listens beyond this host
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=loopback)]
        backend = dist.ProcessGroupGloo(store, rank, size, options)
        return OpenBackend(backend, Connections(loopback).cut)
    before = listening_endpoints()
    options._devices = [_network_device()]
    mine = listening_endpoints() - before
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    endpoints = exchange_endpoints(store, rank, size, mine, timeout)
    return OpenBackend(backend, Connections(endpoints=endpoints).cut)


def nccl_algorithm(name: str) -> str:
    """What NCCL_ALGO must be for all-reduces to go this way: `ring` or `tree`.

    NCCL before 2.24 (torch 2.6) does not know `allreduce:`, and would choose by itself without a word.
    """
    return f"allreduce:{name}" if torch.cuda.nccl.version() >= (2, 24) else name  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def beside_current_stream(device: torch.device) -> Iterator[None]:
    """For calls that wait for each other on the device: what the user puts on the current stream next does not."""
    if device.type != "cuda":
        yield
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def _network_device() -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


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
            return backend.allreduce([target], _options(dist.AllreduceOptions, call.timeout, call.op))
        case "reduce_scatter":
            options = _options(dist.ReduceScatterOptions, call.timeout, call.op)
            return backend._reduce_scatter_base(target, source, options)
        case "all_gather":
            options = _options(c10d.AllgatherOptions, call.timeout)
            return backend._allgather_base(_as_bytes(target), _as_bytes(source), options)
        case "broadcast":
            return backend.broadcast([_as_bytes(target)], _options(dist.BroadcastOptions, call.timeout, root=peer))
        case "all_to_all":
            options = _options(dist.AllToAllOptions, call.timeout)
            return backend.alltoall_base(_as_bytes(target), _as_bytes(source), [], [], options)
        case "barrier":
            return backend.barrier(_options(dist.BarrierOptions, call.timeout))
        case "send":
            return backend.send([_as_bytes(source)], peer, tag)
        case "recv":
            return backend.recv([_as_bytes(target)], peer, tag)
    raise AssertionError(call)


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
    """Moving bytes needs no knowledge of their dtype, so bool and complex work as well as float."""
    return tensor.reshape(-1).view(torch.uint8)
