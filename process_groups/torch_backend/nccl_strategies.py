"""All-reduce strategies on NCCL: which communicator carries a call, and with which settings it was made."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from process_groups.call import Call
from process_groups.torch_backend.backends import (
    OpenBackend,
    beside_current_stream,
    nccl_algorithm,
    open_backend,
)
from process_groups.torch_internals import TorchBackend, TorchWork, issue
from runtime.errors import DeadlineExceeded, GroupClosed

_MAKING = threading.Lock()  # the environment is the process's, so at most one communicator is being made in it


class NcclStrategies:
    """The communicators of one NCCL group, each made when first asked for; every member asks at the same call.

    default       the group's own communicator
    ring, tree    one that was made with NCCL_ALGO, and carries all-reduces only
    hierarchical  one inside each host, and one across hosts for each place on a host

                  host 0 | 0 1    inside/0, inside/1: reduce-scatter, later all-gather
                  host 1 | 2 3    across/0 of 0 and 2, across/1 of 1 and 3: all-reduce

    Making a communicator waits for its members, so a thread calls `connect` and `issue`: one thread for all groups
    of a mesh, in the order of the program's calls. The lock is held meanwhile, and two ranks that make the
    communicators of two groups in different orders would wait for each other until the time is up.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        hosts: Sequence[int],
        device: torch.device,
        backend: TorchBackend,
        timeout: float,
        open_backend: Callable[..., OpenBackend] = open_backend,
    ) -> None:
        """`hosts[i]` is the number of group rank i's host; `timeout`, in seconds, is for making one communicator."""
        self._store, self._rank, self._everyone, self._device = store, rank, list(range(size)), device
        self._own, self._timeout, self._open_backend = backend, timeout, open_backend
        self._opened: dict[str, OpenBackend] = {}
        self._ready: dict[str, TorchBackend] = {}
        self._is_aborted = False

        ranks_on: dict[int, list[int]] = {}
        for member, host in enumerate(hosts):
            ranks_on.setdefault(host, []).append(member)
        self._host = hosts[rank]
        self._inside = ranks_on[self._host]
        self._place = self._inside.index(rank)
        self._hosts_are_alike = len({len(ranks) for ranks in ranks_on.values()}) == 1
        # Where hosts differ, the first rank of each goes across for all of its host.
        goes_across = self._hosts_are_alike or self._place == 0
        self._across = [ranks[self._place] for ranks in ranks_on.values()] if goes_across else [rank]

    def connect(self) -> None:
        """Make the group's own communicator, before its first call of any kind.

        Left to its first call, it could be made while another group's has NCCL_ALGO set.
        """
        with _making("own", None, self._timeout):
            self._call_once(self._own)

    def issue(self, call: Call, strategy: str) -> TorchWork:
        """Hand an all-reduce over. Returns at once, except that a communicator's first call waits for its members."""
        assert call.kind == "all_reduce", f"{call.kind} on a communicator for all-reduces"
        match strategy:
            case "default":
                return issue(self._own, call, tag=0)
            case "ring" | "tree":
                return issue(self._communicator(strategy, self._everyone, nccl_algorithm(strategy)), call, tag=0)
            case "hierarchical":
                with beside_current_stream(self._device):
                    return self._by_parts(call) if self._hosts_are_alike else self._by_first_ranks(call)
        raise AssertionError(strategy)

    def abort(self) -> None:
        """Make calls under way on these communicators end. The group's own is not touched."""
        self._is_aborted = True
        for opened in list(self._opened.values()):
            opened.cut()

    # Hierarchical, in place. Each step is enqueued after the one before; nothing here waits for the device.

    def _by_parts(self, call: Call) -> TorchWork:
        """Each rank of a host takes an equal part of the tensor across, and then hands it to the others."""
        num_parts = len(self._inside)
        if num_parts == 1:
            return issue(self._own, call, tag=0)
        inside, across = self._inside_communicator(), self._across_communicator()
        assert call.target is not None
        assert inside is not None
        flat = call.target.view(-1)
        cut = flat.numel() // num_parts * num_parts
        whole, rest = flat[:cut], flat[cut:]
        if rest.numel():  # less than an element a rank: reducing it costs less than a padded copy of all the rest
            work = issue(self._own, replace(call, source=rest, target=rest), tag=0)
            if not whole.numel():
                return work
            work.wait()
        part = whole.view(num_parts, -1)[self._place]
        _issue_and_hold_stream(inside, Call("reduce_scatter", whole, part, op=_op_of_parts(call), timeout=call.timeout))
        self._reduce_across(across, part, call)
        return issue(inside, Call("all_gather", part, whole, timeout=call.timeout), tag=0)

    def _by_first_ranks(self, call: Call) -> TorchWork:
        """The first rank of a host takes the whole tensor across: parts of hosts that differ would not match."""
        inside, across = self._inside_communicator(), self._across_communicator()
        whole = call.target
        assert whole is not None
        if inside is not None:
            _issue_and_hold_stream(inside, replace(call, op=_op_of_parts(call)))
        work = self._reduce_across(across, whole, call) if across is not None else None
        if inside is not None:
            return issue(inside, Call("broadcast", whole, whole, peer=0, timeout=call.timeout), tag=0)
        assert work is not None  # alone on its host, so the first there
        return work

    def _reduce_across(self, across: TorchBackend | None, part: torch.Tensor, call: Call) -> TorchWork | None:
        if call.op == "mean":
            # Once, and before it grows further: float16 ends at 65504. NCCL's own mean multiplies by 1/n rounded
            # to the tensor's dtype, 0.2 % beside it for bfloat16 and three hosts.
            part.div_(len(self._everyone))
        if across is None:
            return None
        return _issue_and_hold_stream(across, replace(call, source=part, target=part, op=_op_of_parts(call)))

    def _inside_communicator(self) -> TorchBackend | None:
        return self._communicator_of(f"inside/{self._host}", self._inside)

    def _across_communicator(self) -> TorchBackend | None:
        return self._communicator_of(f"across/{self._place}", self._across)

    # Communicators.

    def _communicator_of(self, name: str, members: list[int]) -> TorchBackend | None:
        """None for a rank alone; and a group needs no second communicator of all its members."""
        if len(members) == 1:
            return None
        return self._own if members == self._everyone else self._communicator(name, members, None)

    def _communicator(self, name: str, members: list[int], algorithm: str | None) -> TorchBackend:
        if name not in self._ready:
            with _making(name, algorithm, self._timeout):
                backend = self._open(name, members)
                self._call_once(backend)
            self._ready[name] = backend
        return self._ready[name]

    def _open(self, name: str, members: list[int]) -> TorchBackend:
        store, me = dist.PrefixStore(name, self._store), members.index(self._rank)
        opened = self._open_backend("nccl", store, me, len(members), loopback=None, timeout=self._timeout)
        self._opened[name] = opened
        if self._is_aborted:  # looked at after it was put where `abort` looks: one of the two sees the other
            opened.cut()
            raise GroupClosed("the group was aborted")
        return opened.backend

    def _call_once(self, backend: TorchBackend) -> None:
        """NCCL makes a communicator at the first call on it, and reads the environment then."""
        one = torch.zeros(1, device=self._device)
        work = issue(backend, Call("all_reduce", one, one, op="sum", timeout=self._timeout), tag=0)
        work.wait(timedelta(seconds=self._timeout))


def _issue_and_hold_stream(backend: TorchBackend, call: Call) -> TorchWork:
    """Issue a call whose result the next one needs. Given no timeout, NCCL's wait holds the stream, not the thread."""
    work = issue(backend, call, tag=0)
    work.wait()
    return work


def _op_of_parts(call: Call) -> str | None:
    return "sum" if call.op == "mean" else call.op


@contextmanager
def _making(name: str, algorithm: str | None, timeout: float) -> Iterator[None]:
    """While this lasts nobody else makes a communicator, and NCCL_ALGO is `algorithm`, or what the user has set."""
    if not _MAKING.acquire(timeout=timeout):
        raise DeadlineExceeded(
            f"the NCCL communicator {name} could not be made within {timeout:g} s: this process still makes another. "
            "All ranks must make the first calls on their groups in the same order."
        )
    try:
        with _nccl_algo(algorithm):
            yield
    finally:
        _MAKING.release()


@contextmanager
def _nccl_algo(value: str | None) -> Iterator[None]:
    """Set it where NCCL looks. Not in os.environ, which does not show what torch has set: `^NVLS`, if deterministic."""
    if value is None:
        yield
        return
    before = _getenv(b"NCCL_ALGO")
    os.putenv(b"NCCL_ALGO", value.encode())
    try:
        yield
    finally:
        if before is None:
            os.unsetenv(b"NCCL_ALGO")
        else:
            os.putenv(b"NCCL_ALGO", before)


def _getenv(name: bytes) -> bytes | None:
    getenv = ctypes.CDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_char_p
    value: bytes | None = getenv(name)
    return value
