"""Another process's own memory, read by the kernel: for tensors that lie outside of what ranks share."""

from __future__ import annotations

import ctypes

import torch


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_Ranges = ctypes.POINTER(_Range)
_readv = ctypes.CDLL(None).process_vm_readv
_readv.argtypes = (ctypes.c_int, _Ranges, ctypes.c_ulong, _Ranges, ctypes.c_ulong, ctypes.c_ulong)
_readv.restype = ctypes.c_ssize_t


def read_into(target: torch.Tensor, pid: int, address: int) -> bool:
    """Fill a contiguous tensor with what a process has there. False when it has nothing there, has ended, or this
    process may not read it: another user's, or where only a debugger may (`kernel.yama.ptrace_scope`)."""
    here, there = _Range(target.data_ptr(), target.nbytes), _Range(address, target.nbytes)
    return bool(_readv(pid, here, 1, there, 1, 0) == target.nbytes)
