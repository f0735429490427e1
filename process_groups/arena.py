"""A rank's registered memory: one sparse memory file that its peers on the same host map as a whole.

A buffer is an offset in that file, so peers find it by offset alone. Pages use memory only once they are touched, and
the system frees everything when the process ends, even if it is killed.
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
_GIVE_BACK = 1 << 20  # bytes; freed blocks of at least this size return their pages to the system
_MOST_ADDRESSES = 16 << 40  # bytes for the arenas of all ranks together; a process can address 128 TiB
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mremap.restype = ctypes.c_void_p
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value


class ArenaUnavailable(Exception):
    """Memory can't be shared here; the message says why, with numbers, and the remedy."""


class Mapping:
    """An arena mapped into this process: its own or a peer's."""

    def __init__(self, fd: int) -> None:
        self._mapping = mmap.mmap(fd, 0)
        with suppress(OSError):  # optional: most systems disable huge pages for shared memory
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._mapping)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self.size = len(self._mapping)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A view of `numel` elements at `offset`. It does not keep the underlying block from being freed."""
        if torch.is_inference_mode_enabled():  # the view may be used later outside inference mode
            with torch.inference_mode(False):
                return self.tensor(offset, numel, dtype)
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """The offset of a contiguous tensor; None if it is not in this arena."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.size else None


def open_peer(address: str) -> Mapping | None:
    """Map a peer's arena; None if that is not possible (another host, container or user)."""
    pid, number, nonce = address.split("/")
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:  # pid and fd may belong to another process here: the nonce identifies the arena
        return Mapping(fd) if os.pread(fd, NONCE, 0).hex() == nonce else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def join(parts: Sequence[tuple[Mapping, int, int]]) -> torch.Tensor:
    """Map page-aligned ranges (start, stop) of several arenas one after another, without copying. Returns the bytes."""
    region = mmap.mmap(-1, sum(stop - start for _, start, stop in parts))  # unmapped with the last tensor
    joined = torch.frombuffer(region, dtype=torch.uint8)
    place = joined.data_ptr()
    for mapping, start, stop in parts:
        # With an old length of 0, mremap maps shared pages a second time instead of moving them.
        found = _libc.mremap(
            mapping.address + start, 0, stop - start, _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(place)
        )
        if found == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        place += stop - start
    return joined


class Arena(Mapping):
    """This rank's own arena. The first `reserved` bytes are for callers to lay out; the rest is for allocation."""

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
        """Free ranges (start, stop), sorted."""
        self._returned: deque[tuple[int, int]] = deque()
        """Released ranges that are not yet in `_free`."""
        self._blocks: dict[int, weakref.ref[memoryview]] = {}
        self.num_bytes_used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A new registered buffer; None if there is not enough memory."""
        shape = tuple(map(index, shape))
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0 or min(shape, default=0) < 0:  # torch raises the error for a negative size
            return torch.empty(shape, dtype=dtype)
        size = _round_up(num_bytes, PAGE if num_bytes >= PAGE else _LINE)
        if size >= _GIVE_BACK and size > available_memory():
            return None
        start = self._allocate(size)
        if start is None:
            return None
        block = self.memory[start : start + size]
        tensor = torch.frombuffer(block, dtype=dtype, count=prod(shape)).view(shape)
        # The tensor's storage holds the block, and every view holds the storage. weakref.finalize would also run at
        # process exit, where a signal makes it print.
        self._blocks[start] = weakref.ref(block, partial(_let_go, weakref.ref(self), start, size))
        return tensor

    def _allocate(self, size: int) -> int | None:
        self._take_back()
        with self._lock:
            for i, (first, stop) in enumerate(self._free):
                start = _round_up(first, PAGE) if size >= PAGE else first  # so that its pages can be returned
                if stop - start >= size:
                    left = (first, start), (start + size, stop)
                    self._free[i : i + 1] = [(a, b) for a, b in left if a < b]
                    self.num_bytes_used += size
                    return start
        return None

    def release(self, start: int, size: int) -> None:
        """Free a buffer. The garbage collector calls this in any thread, even one that holds the lock."""
        if os.getpid() != self._pid:  # a forked child must not free memory that belongs to its parent
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
        """Prevent further mappings by peers. The memory is freed with the last buffer and mapping."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _let_go(arena: weakref.ref[Arena], start: int, size: int, _: object) -> None:
    if (owner := arena()) is not None:
        owner.release(start, size)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges."""
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
    """The host's physical memory, limited so that every rank has addresses to map all arenas."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _round_up(min(memory, _MOST_ADDRESSES // num_ranks), PAGE)


def available_memory() -> int:
    """Bytes still available, according to the system and this process's control group."""
    return min(_system_available(), *_group_available())


def _system_available() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_available(folder: str = "/sys/fs/cgroup") -> list[int]:
    """Bytes left under the limits of cgroup v2 and v1, and a very large number in case there are none. Containers see
    their own control group at the root."""
    found = [1 << 62]
    for limit, used, stat, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError, StopIteration):
            most, now = (int(Path(folder, file).read_text()) for file in (limit, used))
            # Cached file pages count as used, but the kernel reclaims them on demand.
            lines = (line.split() for line in Path(folder, stat).read_text().splitlines())
            found.append(max(0, most - now + next(int(value) for key, value in lines if key == name)))
    return found


def no_memory(what: str, num_bytes: int) -> CommunicationError:
    """The error for an operation that needs a registered buffer of this size and can't get one."""
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
    """Why an address limit of this process prevents mapping the arenas of all ranks on its host; None if it doesn't."""
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
