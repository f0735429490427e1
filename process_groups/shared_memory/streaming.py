"""Copies that go round the cache: for what this core writes, another one reads, and this core writes anew.

An ordinary store to a cache line that another core has read waits until that core has let go of it: 27 ns a line where
the two share no cache, which is what most large hosts look like inside. A store that goes round the cache doesn't wait,
so a core writes ten times as fast there, and the other one reads from memory.

Neither torch nor Python's standard library has such stores, and memcpy has them only for tens of MiB. So here are the
few instructions themselves, of SSE2, which every x86_64 processor knows; elsewhere ranks share no memory at all
(`signals.CAN_WAIT`). Where the system lets nobody map code of his own, copies are ordinary ones.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

import numpy as np
import torch

_LINE = 64  # bytes of a cache line: fewer are left to memmove
_FEW = 64 << 10  # bytes: copied before another thread could have begun, which may then not give the GIL back for 5 ms
_ALIGNED = 16  # bytes: what such a store writes, and where it may

LISTING = """
f3 0f 6f 06     movdqu  xmm0, [rsi]         # a line of the source, wherever it begins
f3 0f 6f 4e 10  movdqu  xmm1, [rsi+0x10]
f3 0f 6f 56 20  movdqu  xmm2, [rsi+0x20]
f3 0f 6f 5e 30  movdqu  xmm3, [rsi+0x30]
66 0f e7 07     movntdq [rdi], xmm0         # round the cache
66 0f e7 4f 10  movntdq [rdi+0x10], xmm1
66 0f e7 57 20  movntdq [rdi+0x20], xmm2
66 0f e7 5f 30  movntdq [rdi+0x30], xmm3
48 83 c6 40     add     rsi, 0x40
48 83 c7 40     add     rdi, 0x40
48 83 ea 40     sub     rdx, 0x40
75 cc           jne     0x0                 # the next line
0f ae f8        sfence                      # whoever sees what is stored after this sees the copy too
c3              ret
"""
"""copy_lines(target rdi, source rsi, bytes rdx): machine code, and what it means."""

CODE = bytes.fromhex("".join(line[:14] for line in LISTING.splitlines()))


def _map_code() -> mmap.mmap | None:
    """The instructions where they can be called; None where that is not allowed."""
    if platform.machine() != "x86_64":
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
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_code))  # never unmapped: a thread may be there when Python ends
    _arguments = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _address = np.frombuffer(_code, np.uint8).ctypes.data
    _copy_lines = ctypes.CFUNCTYPE(*_arguments)(_address)  # other threads run meanwhile
    _copy_few_lines = ctypes.PYFUNCTYPE(*_arguments)(_address)

CAN_STREAM = _code is not None
"""Whether `stream` is more than an ordinary copy here."""


def stream(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a contiguous tensor to another one of the same dtype and size, which does not overlap it. torch does not
    learn that the target has changed.

    Worth it from some KiB up, where another core is the next to read the target."""
    place, begin, num_bytes = target.data_ptr(), source.data_ptr(), source.nbytes
    copy = _copy_few_lines if num_bytes <= _FEW else _copy_lines
    if copy is None or place % _ALIGNED or num_bytes < _LINE or source._is_zerotensor():  # those have no memory at all
        target.copy_(source)
        return
    whole = num_bytes - num_bytes % _LINE
    copy(place, begin, whole)
    if whole < num_bytes:
        ctypes.memmove(place + whole, begin + whole, num_bytes - whole)
