"""Results: medians, bandwidths and per-round ratios computed from seconds, and the JSON object that holds them."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from monitoring.events.collectives import bus_factor
from parallel3d import __version__
from parallel3d.benchmarks.mpirun import Mpi
from parallel3d.benchmarks.plan import Plan
from runtime.cores import num_cores

GLOO, MPI, MEMORY_LIMIT = "gloo", "mpi", "memory limit"
PEERS = (GLOO, MPI, MEMORY_LIMIT)


@dataclass(frozen=True, slots=True)
class Measured:
    """Results for one size: each contestant's seconds per call, one value per round."""

    num_bytes: int
    count: int
    repeats: int
    seconds: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Run:
    """All measurements with one number of ranks."""

    num_ranks: int
    all_reduce: tuple[Measured, ...]
    send: tuple[Measured, ...]
    """One way: half a round trip."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant at one size. A ratio above 1 means faster than that peer; None if the peer wasn't measured."""

    seconds: float
    """The median over the rounds."""
    algbw: float
    """Tensor bytes per second, in GB/s (10^9)."""
    busbw: float
    """algbw times the bytes that each rank's link must move per tensor byte."""
    times_gloo: float | None
    times_mpi: float | None
    share_of_memory_limit: float | None


def ratio(of: Sequence[float] | None, over: Sequence[float]) -> float | None:
    """The median of the per-round ratios of/over, so that a slowdown of a whole round cancels out."""
    return None if of is None else statistics.median(a / b for a, b in zip(of, over, strict=True))


def figures(measured: Measured, bus_factor: float = 1.0) -> dict[str, Figures]:
    """Figures of each contestant, in the order of `measured.seconds`."""
    found = {}
    for name, rounds in measured.seconds.items():
        seconds = statistics.median(rounds)
        algbw = measured.num_bytes / seconds / 1e9
        ratios = [ratio(measured.seconds.get(peer), rounds) for peer in PEERS]
        found[name] = Figures(seconds, algbw, algbw * bus_factor, *ratios)
    return found


def fastest_of_ours(found: Mapping[str, Figures]) -> str:
    """The name of our contestant with the fewest seconds."""
    return min((name for name in found if name not in PEERS), key=lambda name: found[name].seconds)


def geometric_means(sizes: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Geometric means over all sizes of each contestant's ratios."""
    tables = [figures(measured) for measured in sizes]
    means: dict[str, dict[str, float]] = {}
    for name in tables[0]:
        means[name] = {}
        for field in ("times_gloo", "times_mpi", "share_of_memory_limit"):
            values = [value for table in tables if (value := getattr(table[name], field)) is not None]
            if values:
                means[name][field] = statistics.geometric_mean(values)
    return means


def document(plan: Plan, facts: Mapping[str, Any], runs: Sequence[Run], notes: Sequence[str]) -> dict[str, Any]:
    """The JSON object that `--json` prints; docs/bench.md describes every field. `facts`: from `machine()`."""
    return {
        "machine": dict(facts),
        "dtype": plan.dtype,
        "rounds": plan.rounds,
        "quick": plan.quick,
        "notes": list(notes),
        "runs": [_run(run) for run in runs],
    }


def machine(mpi: Mpi | None) -> dict[str, Any]:
    """The machine and the software versions that the figures depend on."""
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
        "all_reduce": [_size(measured, bus_factor("all_reduce", run.num_ranks)) for measured in run.all_reduce],
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
