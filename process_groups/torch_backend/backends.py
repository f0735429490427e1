"""Opens what torch.distributed offers for a mesh: a store for all ranks, and one backend per group."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from process_groups.torch_backend.connections import Connections, exchange_endpoints, listening_endpoints
from process_groups.torch_internals import TorchBackend, gloo_backend, gloo_device, nccl_backend
from runtime.environment import InheritedFile, Nowhere, PrivateFile, RankEnvironment, StoreServer
from runtime.errors import DeadlineExceeded, LaunchError, Parallel3DError, PeerLost

BACKENDS = ("auto", "gloo", "nccl")


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
    if kind == "nccl":
        nccl = nccl_backend(store, rank, size, timeout)
        return OpenBackend(nccl, nccl.abort)
    if loopback is not None:  # nothing listens beyond this host
        gloo = gloo_backend(store, rank, size, gloo_device(address=loopback), timeout)
        return OpenBackend(gloo, Connections(loopback).cut)
    before = listening_endpoints()
    device = gloo_device(interface=os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0])
    mine = listening_endpoints() - before
    gloo = gloo_backend(store, rank, size, device, timeout)
    endpoints = exchange_endpoints(store, rank, size, mine, timeout)
    return OpenBackend(gloo, Connections(endpoints=endpoints).cut)


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
