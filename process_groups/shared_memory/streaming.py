"""Copies that bypass the cache (non-temporal stores), for memory that another core reads next.

An ordinary store to a cache line that another core has read waits until that core gives the line up: 27 ns a line where
the two cores share no cache, as on most large hosts. A non-temporal store does not wait, so a core writes ten times as
fast there, and the other core reads from memory.

Neither torch nor Python's standard library has such stores, and memcpy uses them only from tens of MiB up. So this
module contains 56 bytes of x86_64 machine code, listed below with their meaning, and maps them as read-only executable
memory when it is imported. There is one switch, `CAN_STREAM`; where it is False `stream` is `target.copy_(source)`:

- on processors other than x86_64, where ranks share no memory anyway (`signals.CAN_WAIT`);
- where the system refuses executable mappings;
- where the environment has `PARALLEL3D_STREAMING=0` when the ranks start.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

import numpy as np
import torch

from process_groups.torch_internals import has_no_memory

_LINE = 64  # bytes of a cache line: what is less than a line is left to memmove
_FEW = 64 << 10  # bytes copied without releasing the GIL: another thread that took it might keep it for 5 ms
_ALIGNED = 16  # bytes: the size and alignment of one such store

LISTING = """
f3 0f 6f 06     movdqu  xmm0, [rsi]         # a line of the source, wherever it begins
f3 0f 6f 4e 10  movdqu  xmm1, [rsi+0x10]
f3 0f 6f 56 20  movdqu  xmm2, [rsi+0x20]
f3 0f 6f 5e 30  movdqu  xmm3, [rsi+0x30]
66 0f e7 07     movntdq [rdi], xmm0         # bypasses the cache
66 0f e7 4f 10  movntdq [rdi+0x10], xmm1
66 0f e7 57 20  movntdq [rdi+0x20], xmm2
66 0f e7 5f 30  movntdq [rdi+0x30], xmm3
48 83 c6 40     add     rsi, 0x40
48 83 c7 40     add     rdi, 0x40
48 83 ea 40     sub     rdx, 0x40
75 cc           jne     0x0                 # the next line
0f ae f8        sfence                      # a core that sees later stores sees the copy too
c3              ret
"""
"""copy_lines(target rdi, source rsi, bytes rdx): the machine code, and what it means."""

CODE = bytes.fromhex("".join(line[:14] for line in LISTING.splitlines()))


def _map_code() -> mmap.mmap | None:
    """The instructions where they can be called; None where that is not allowed or not wanted."""
    if platform.machine() != "x86_64" or os.environ.get("PARALLEL3D_STREAMING") == "0":
        return None
    try:  # never writable and executable at once, which hardened systems refuse
        fd = os.memfd_create("parallel3d-copy-lines", os.MFD_CLOEXEC)
        try:
            os.write(fd, CODE)
            return mmap.mmap(fd, len(CODE), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
        finally:
            os.close(fd)
    except OSError:
        return None


_code = _map_code()
_copy_lines = _copy_few_lines = None
if _code is not None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_code))  # never unmapped: a thread may run it when Python exits
    _arguments = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _address = np.frombuffer(_code, np.uint8).ctypes.data
    _copy_lines = ctypes.CFUNCTYPE(*_arguments)(_address)  # releases the GIL
    _copy_few_lines = ctypes.PYFUNCTYPE(*_arguments)(_address)

CAN_STREAM = _code is not None
"""Whether `stream` bypasses the cache here."""


def stream(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a contiguous tensor to another one of the same dtype and size that does not overlap it.

    torch does not count this as a write to the target. It pays from some KiB up, if another core reads the target
    next."""
    place, begin, num_bytes = target.data_ptr(), source.data_ptr(), source.nbytes
    copy = _copy_few_lines if num_bytes <= _FEW else _copy_lines
    if copy is None or place % _ALIGNED or num_bytes < _LINE or has_no_memory(source):
        target.copy_(source)
        return
    whole = num_bytes - num_bytes % _LINE
    copy(place, begin, whole)
    if whole < num_bytes:
        ctypes.memmove(place + whole, begin + whole, num_bytes - whole)
