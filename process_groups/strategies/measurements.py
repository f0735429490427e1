"""Keeps what all-reduces were measured to cost, for the next run on a host of this kind."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from runtime.cores import num_cores

Rows = dict[int, list[float]]
"""Seconds of each candidate, by size class; infinite where it was not measured."""


def host_kind() -> str:
    """What makes two hosts alike here: the processor, how much of it we may use, and torch."""
    model = platform.processor() or platform.machine()
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model} x {num_cores()}, torch {torch.__version__}"


def _path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "parallel3d", "all-reduce.json")


def layout_of(transport: str, hosts: Sequence[int]) -> str:
    """What makes two groups alike on such hosts."""
    counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
    return f"{transport}, {' + '.join(map(str, counts))} ranks"


def load(layout: str, candidates: Sequence[str]) -> Rows | None:
    """The rows kept for such a group; None where there are none, or none that can be understood."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):  # there may be no home
        kept = json.loads(_path().read_text())[_key(layout)]
        rows = {int(size): [_seconds(value) for value in row] for size, row in kept["seconds"].items()}
        if kept["candidates"] == list(candidates) and all(len(row) == len(candidates) for row in rows.values()):
            return rows or None
    return None


def _key(layout: str) -> str:
    return f"{layout}; {host_kind()}"


def save(layout: str, candidates: Sequence[str], rows: Rows) -> None:
    """Keep the rows. A folder that can't be written only means that the next run measures again."""
    try:
        path = _path()
    except RuntimeError:  # this user has no home
        return
    everything: dict[str, object] = {}
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        everything = found if isinstance(found, dict) else {}
    finite = {size: [value if value != float("inf") else None for value in row] for size, row in rows.items()}
    everything[_key(layout)] = {"candidates": list(candidates), "seconds": finite}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(everything, indent=1))
        new.replace(path)  # at once: another run may be reading


def _seconds(value: object) -> float:
    seconds = float("inf") if value is None else float(value)  # type: ignore[arg-type]
    if not seconds > 0:
        raise ValueError(f"{value} are no seconds")
    return seconds
