"""How many cores this process may use, by its CPU affinity and its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def num_cores() -> int:
    """Rounded up: a quota of 2.5 cores is 3."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), quota())))


def threads_per_rank(num_ranks: int) -> int:
    """Threads with which all ranks of this host together use each core once."""
    return max(1, num_cores() // num_ranks)


def quota(groups: Path = _GROUPS, own: Path = _OWN) -> float:
    """Cores allowed by the control groups of this process and their parents; infinity without a limit."""
    with suppress(OSError):
        return min(map(_limit, _folders(groups, own.read_text())), default=math.inf)
    return math.inf


def _folders(groups: Path, own: str) -> Iterator[Path]:
    """The folders of this process's groups and their parents. In a container the parents may not exist."""
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mounted = groups
        elif "cpu" in controllers.split(","):
            mounted = groups / "cpu"
        else:
            continue
        relative = Path(path.lstrip("/"))
        yield from (mounted / each for each in (relative, *relative.parents))


def _limit(group: Path) -> float:
    with suppress(OSError, ValueError):
        given, period = (group / "cpu.max").read_text().split()
        return math.inf if given == "max" else int(given) / int(period)
    with suppress(OSError, ValueError):
        microseconds = int((group / "cpu.cfs_quota_us").read_text())
        return math.inf if microseconds < 0 else microseconds / int((group / "cpu.cfs_period_us").read_text())
    return math.inf
