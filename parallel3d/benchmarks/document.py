"""The results as one JSON object: everything that was measured, on which machine, and what follows from it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from parallel3d import __version__
from parallel3d.benchmarks.figures import (
    Measured,
    Run,
    all_reduce_factor,
    fastest_of_ours,
    figures,
    geometric_means,
)
from parallel3d.benchmarks.mpirun import Mpi
from parallel3d.benchmarks.plan import Plan
from runtime.cores import num_cores


def document(plan: Plan, facts: Mapping[str, Any], runs: Sequence[Run], notes: Sequence[str]) -> dict[str, Any]:
    """Seconds are a call's; bandwidths are 10^9 bytes a second; a ratio above 1 is in the contestant's favour.

    `facts` are those of `machine`. docs/bench.md describes every field.
    """
    return {
        "machine": dict(facts),
        "dtype": plan.dtype,
        "rounds": plan.rounds,
        "quick": plan.quick,
        "notes": list(notes),
        "runs": [_run(run) for run in runs],
    }


def machine(mpi: Mpi | None) -> dict[str, Any]:
    """What figures depend on."""
    return {
        "cores": num_cores(),
        "cpu": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parallel3d": __version__,
        "mpi": None if mpi is None else mpi.version,
    }


def headline(facts: Mapping[str, Any]) -> str:
    """The machine in one line."""
    mpi = "" if facts["mpi"] is None else f", {facts['mpi']}"
    return f"{facts['cores']} cores ({facts['cpu']}), torch {facts['torch']}{mpi}"


def _run(run: Run) -> dict[str, Any]:
    return {
        "ranks": run.num_ranks,
        "all_reduce": [_size(measured, all_reduce_factor(run.num_ranks)) for measured in run.all_reduce],
        "send": [_size(measured, 1.0) for measured in run.send],
        "geometric_means": {"all_reduce": geometric_means(run.all_reduce), "send": geometric_means(run.send)},
    }


def _size(measured: Measured, bus_factor: float) -> dict[str, Any]:
    found = figures(measured, bus_factor)
    return {
        "bytes": measured.num_bytes,
        "count": measured.count,
        "repeats": measured.repeats,
        "fastest_of_ours": fastest_of_ours(found),
        "contestants": {name: {"rounds": list(measured.seconds[name]), **asdict(each)} for name, each in found.items()},
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
