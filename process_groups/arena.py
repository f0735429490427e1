"""A rank's registered memory: one sparse memory file, mapped whole by its peers on the same host.

A buffer is an offset in that file, so an offset is all that peers need to find it. Pages cost memory only once
they are touched, and nothing is left behind when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import secrets
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import prod
from operator import index
from pathlib import Path

import torch

from runtime.errors import CommunicationError

NONCE = 16
PAGE = 4096
_LINE = 64  # bytes of a cache line: buffers never share one
_GIVE_BACK = 1 << 20  # a freed block from this size up returns its pages to the system
_MOST_ADDRESSES = 16 << 40  # of the 128 TiB that a process has, for the arenas of all ranks together
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mremap.restype = ctypes.c_void_p
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


class ArenaUnavailable(Exception):
    """Memory can't be shared here; the text says why, with numbers, and what would help."""


class Mapping:
    """An arena as one process sees it: its own, or a peer's."""

    def __init__(self, fd: int) -> None:
        self._mapping = mmap.mmap(fd, 0)
        with suppress(OSError):  # only a wish: huge pages for shared memory are off on most systems
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._mapping)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self.size = len(self._mapping)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A view of some elements; does not keep the block that it shows from being freed."""
        if torch.is_inference_mode_enabled():  # it may be kept for calls outside of that mode
            with torch.inference_mode(False):
                return self.tensor(offset, numel, dtype)
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a contiguous tensor lies; None when it is not in here."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.size else None


def open_peer(address: str) -> Mapping | None:
    """Map a peer's arena; None where that can't be done: another host, container or user."""
    pid, number, nonce = address.split("/")
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:  # the same pid and number may mean something else here: the nonce decides
        return Mapping(fd) if os.pread(fd, NONCE, 0).hex() == nonce else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def join(parts: Sequence[tuple[Mapping, int, int]]) -> torch.Tensor:
    """Ranges (start, stop) of whole pages in several arenas, as if they lay in a row: bytes that nobody copies."""
    region = mmap.mmap(-1, sum(stop - start for _, start, stop in parts))  # addresses; unmapped with the last tensor
    joined = torch.frombuffer(region, dtype=torch.uint8)
    place = joined.data_ptr()
    for mapping, start, stop in parts:
        # Of length 0, a shared mapping is not moved but mapped a second time.
        found = _libc.mremap(
            mapping.address + start, 0, stop - start, _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(place)
        )
        if found == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        place += stop - start
    return joined


class Arena(Mapping):
    """This rank's own memory. `reserved` bytes at its beginning are laid out by others; the rest is handed out."""

    def __init__(self, reserved: int, num_ranks: int) -> None:
        size = _virtual_size(num_ranks)
        fd = os.memfd_create("parallel3d-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            nonce = secrets.token_bytes(NONCE)
            os.pwrite(fd, nonce, 0)
            super().__init__(fd)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ArenaUnavailable(_explain(error, size)) from error
        self.address_for_peers = f"{os.getpid()}/{fd}/{nonce.hex()}"
        self._fd, self._pid = fd, os.getpid()
        self._lock = threading.Lock()
        self._free = [(_round_up(reserved, PAGE), size)]
        """Free ranges (start, stop) in order."""
        self._returned: deque[tuple[int, int]] = deque()
        """Ranges that are not in use any more, and not among the free ones yet."""
        self._blocks: dict[int, weakref.ref[memoryview]] = {}
        self.num_bytes_used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A new registered buffer; None when there is too little memory for it."""
        shape = tuple(map(index, shape))
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0 or min(shape, default=0) < 0:  # torch says what is wrong with a negative size
            return torch.empty(shape, dtype=dtype)
        size = _round_up(num_bytes, PAGE if num_bytes >= PAGE else _LINE)
        if size >= _GIVE_BACK and size > available_memory():
            return None
        start = self._allocate(size)
        if start is None:
            return None
        block = self.memory[start : start + size]
        tensor = torch.frombuffer(block, dtype=dtype, count=prod(shape)).view(shape)
        # The tensor's storage holds the block, and every view holds the storage. (weakref.finalize would do the same,
        # but it also runs when the process ends, where a signal makes it print.)
        self._blocks[start] = weakref.ref(block, partial(_let_go, weakref.ref(self), start, size))
        return tensor

    def _allocate(self, size: int) -> int | None:
        self._take_back()
        with self._lock:
            for i, (first, stop) in enumerate(self._free):
                start = _round_up(first, PAGE) if size >= PAGE else first  # whole pages can be given back
                if stop - start >= size:
                    left = (first, start), (start + size, stop)
                    self._free[i : i + 1] = [(a, b) for a, b in left if a < b]
                    self.num_bytes_used += size
                    return start
        return None

    def release(self, start: int, size: int) -> None:
        """A buffer is no longer used. The garbage collector calls this in any thread, even one that has the lock."""
        if os.getpid() != self._pid:  # a forked child lets go of its copy only; the memory is its parent's
            return
        if size >= _GIVE_BACK:
            _libc.madvise(self.address + start, size, mmap.MADV_REMOVE)
        del self._blocks[start]
        self._returned.append((start, start + size))
        self._take_back()

    def _take_back(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    start, stop = self._returned.popleft()
                    self.num_bytes_used -= stop - start
                    insort(self._free, (start, stop))
                    self._free = _joined(self._free)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Peers that have not mapped it can't any more. The memory goes with the last buffer and mapping."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _let_go(arena: weakref.ref[Arena], start: int, size: int, _: object) -> None:
    if (owner := arena()) is not None:
        owner.release(start, size)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring ranges as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _virtual_size(num_ranks: int) -> int:
    """All memory of this host, as far as every rank can map every other's."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _round_up(min(memory, _MOST_ADDRESSES // num_ranks), PAGE)


def available_memory() -> int:
    """Bytes that can still be used here, as the system and this process's control group say."""
    return min(_system_available(), *_group_available())


def _system_available() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_available(folder: str = "/sys/fs/cgroup") -> list[int]:
    """What is left of the control group's limit: version 2, then version 1. Containers see their own at the root."""
    found = [1 << 62]
    for limit, used, stat, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError, StopIteration):
            most, now = (int(Path(folder, file).read_text()) for file in (limit, used))
            # Files that were read are kept in memory as long as nobody needs it: that much can be had back.
            lines = (line.split() for line in Path(folder, stat).read_text().splitlines())
            found.append(max(0, most - now + next(int(value) for key, value in lines if key == name)))
    return found


def no_memory(what: str, num_bytes: int) -> CommunicationError:
    """For what can't be done without a registered buffer of this size."""
    needed, available = (each / (1 << 20) for each in (num_bytes, available_memory()))
    return CommunicationError(
        f"no memory for {what} of {needed:.1f} MiB: {available:.1f} MiB are available here. Give the ranks more "
        "memory (a container's --memory), start fewer on this host, or make microbatches smaller; with comm.backend: "
        "gloo nothing is kept in shared memory."
    )


_LIMITS = {"file size (ulimit -f)": resource.RLIMIT_FSIZE, "addresses (ulimit -v)": resource.RLIMIT_AS}


def _explain(error: OSError | ValueError, size: int) -> str:
    for name in _LIMITS:
        if (limited := _limited(name, size)) is not None:
            return limited
    return f"{size / (1 << 30):.1f} GiB of addresses are needed, and the system says: {error}."


def why_not_mapped(num_ranks_here: int, num_ranks: int) -> str | None:
    """Why this process can't map the arenas of all ranks on its host, if that is a limit of its own."""
    need = num_ranks_here * _virtual_size(num_ranks)
    name = "addresses (ulimit -v)"
    return _limited(name, need)


def _limited(name: str, need: int) -> str | None:
    soft = resource.getrlimit(_LIMITS[name])[0]
    if soft == resource.RLIM_INFINITY or soft >= need:
        return None
    return (
        f"{need / (1 << 30):.1f} GiB of addresses are needed, but this process may have {soft / (1 << 30):.3g} GiB of "
        f"{name}. Raise that limit."
    )
