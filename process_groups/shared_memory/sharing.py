"""Whether ranks that seem to be on one host really share memory, and the warning if they don't."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from process_groups.arena import Arena, available_memory, why_not_mapped


class SharedMemoryWarning(UserWarning):
    """Ranks of one host use the network with each other, or a buffer is not registered: all works, but slower."""


def warn_if_not_shared(rank: int, greetings: Sequence[dict[str, Any]], shares: Sequence[Sequence[bool]]) -> None:
    """Warn once a host, in its first rank."""
    here = [other for other, greeting in enumerate(greetings) if greeting["host"] == greetings[rank]["host"]]
    if rank != here[0]:
        return
    apart = [(a, b) for a in here for b in here if not shares[a][b]]
    if not apart:
        return
    a, b = apart[0]
    problem = greetings[a]["arena_problem"] or greetings[b]["arena_problem"]
    why = (
        problem
        or why_not_mapped(len(here), len(greetings))
        or (
            f"rank {a} can't map the memory of rank {b}, process {greetings[b]['segment'].split('/')[0]}. Start them "
            "as one user in one container (or with a shared pid namespace: --pid=host); if they are on different hosts "
            "that have one name, give each its own PARALLEL3D_HOST"
        )
    )
    names = ", ".join(map(str, here[:8])) + (", …" if len(here) > 8 else "")
    warnings.warn(
        f"ranks {names} on {greetings[rank]['host']} use gloo, which is slower than shared memory: {why.rstrip('.')}.",
        SharedMemoryWarning,
        stacklevel=2,
    )


class RegisteredMemory:
    """Makes a mesh's registered buffers; warns of the first that finds no memory."""

    def __init__(self, arena: Arena) -> None:
        self._arena, self._has_warned = arena, False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """None when there is too little memory for it."""
        tensor = self._arena.empty(shape, dtype)
        if tensor is None and not self._has_warned:
            self._has_warned = True
            _warn_unregistered(prod(shape) * dtype.itemsize, available_memory())
        return tensor


def _warn_unregistered(num_bytes: int, available: int) -> None:
    warnings.warn(
        f"a buffer of {num_bytes / (1 << 20):.1f} MiB is not registered, so it is copied through shared memory at "
        f"every call: {available / (1 << 20):.1f} MiB are available here. Give the ranks more memory (a container's "
        "--memory), or free other buffers.",
        SharedMemoryWarning,
        stacklevel=4,  # where the user calls Group.empty
    )
