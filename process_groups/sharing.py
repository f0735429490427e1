"""Whether ranks that seem to be on one host really share memory, and what the user is told when they don't."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any


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
    why = problem or (
        f"rank {a} can't map the memory of rank {b}, process {greetings[b]['segment'].split('/')[0]}. Start them "
        "as one user in one container (or with a shared pid namespace: --pid=host); if they are on different hosts "
        "that have one name, give each its own PARALLEL3D_HOST"
    )
    names = ", ".join(map(str, here[:8])) + (", …" if len(here) > 8 else "")
    warnings.warn(
        f"ranks {names} on {greetings[rank]['host']} use gloo, which is slower than shared memory: {why.rstrip('.')}.",
        SharedMemoryWarning,
        stacklevel=2,
    )


def warn_unregistered(num_bytes: int, available: int) -> None:
    """For a buffer that finds no memory."""
    warnings.warn(
        f"a buffer of {num_bytes / (1 << 20):.1f} MiB is not registered, so it is copied through shared memory at "
        f"every call: {available / (1 << 20):.1f} MiB are available here. Give the ranks more memory (a container's "
        "--memory), or free other buffers.",
        SharedMemoryWarning,
        stacklevel=3,
    )
