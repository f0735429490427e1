"""Another process's own memory, read by the kernel: for tensors that lie outside of what ranks share."""

from __future__ import annotations

import ctypes
import errno
import os

import torch


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_Ranges = ctypes.POINTER(_Range)
_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.argtypes = (ctypes.c_int, _Ranges, ctypes.c_ulong, _Ranges, ctypes.c_ulong, ctypes.c_ulong)
_readv.restype = ctypes.c_ssize_t


def read_into(target: torch.Tensor, pid: int, address: int) -> None:
    """Fill a contiguous tensor with what a process has there.

    ProcessLookupError where it has ended; another OSError where this process may not read that one (another user's, or
    where only a debugger may: `kernel.yama.ptrace_scope`), or it has nothing there."""
    here, there = _Range(target.data_ptr(), target.nbytes), _Range(address, target.nbytes)
    num_read = _readv(pid, here, 1, there, 1, 0)
    if num_read != target.nbytes:
        number = ctypes.get_errno() if num_read < 0 else errno.EFAULT
        raise OSError(number, os.strerror(number))
