"""From seconds to what is shown: medians, bandwidths, and ratios that were taken within a round. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GLOO, MPI, MEMORY_LIMIT = "gloo", "mpi", "memory limit"
PEERS = (GLOO, MPI, MEMORY_LIMIT)


@dataclass(frozen=True, slots=True)
class Measured:
    """One size: the seconds a call of every contestant, one value a round."""

    num_bytes: int
    count: int
    repeats: int
    seconds: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Run:
    """All that was measured with one number of ranks."""

    num_ranks: int
    all_reduce: tuple[Measured, ...]
    send: tuple[Measured, ...]
    """One way: half of there and back."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant at one size. A ratio above 1 is in its favour; None: there is nobody to compare with."""

    seconds: float
    """The median over the rounds."""
    algbw: float
    """10^9 bytes of the tensor a second."""
    busbw: float
    """The same, times what must pass each rank's link for each of these bytes."""
    times_gloo: float | None
    times_mpi: float | None
    share_of_memory_limit: float | None


def all_reduce_factor(num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    return 2 * (num_ranks - 1) / num_ranks


def ratio(of: Sequence[float] | None, over: Sequence[float]) -> float | None:
    """The median of the rounds' own ratios: what slows a whole round down cancels out."""
    return None if of is None else statistics.median(a / b for a, b in zip(of, over, strict=True))


def figures(measured: Measured, bus_factor: float = 1.0) -> dict[str, Figures]:
    """Every contestant's, in the order they were measured."""
    found = {}
    for name, rounds in measured.seconds.items():
        seconds = statistics.median(rounds)
        algbw = measured.num_bytes / seconds / 1e9
        ratios = [ratio(measured.seconds.get(peer), rounds) for peer in PEERS]
        found[name] = Figures(seconds, algbw, algbw * bus_factor, *ratios)
    return found


def fastest_of_ours(found: Mapping[str, Figures]) -> str:
    """The name of ours with the least seconds."""
    return min((name for name in found if name not in PEERS), key=lambda name: found[name].seconds)


def geometric_means(sizes: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Each contestant's ratios, over all sizes."""
    tables = [figures(measured) for measured in sizes]
    means: dict[str, dict[str, float]] = {}
    for name in tables[0]:
        means[name] = {}
        for field in ("times_gloo", "times_mpi", "share_of_memory_limit"):
            values = [value for table in tables if (value := getattr(table[name], field)) is not None]
            if values:
                means[name][field] = statistics.geometric_mean(values)
    return means
