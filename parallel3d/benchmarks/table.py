"""The results as tables for people, in the columns of nccl-tests. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel3d.benchmarks.figures import (
    MPI,
    PEERS,
    Figures,
    Measured,
    Run,
    all_reduce_factor,
    fastest_of_ours,
    figures,
    geometric_means,
)
from parallel3d.benchmarks.sizes import human

_COLUMNS = (
    ("size", 8),
    ("count", 11),
    ("contestant", -15),
    ("time µs", 10),
    ("algbw GB/s", 10),
    ("busbw GB/s", 10),
    ("x gloo", 8),
    ("x mpi", 8),
    ("of memory limit", 15),
)
"""Name and width; left-aligned where that is negative."""


def render(run: Run, dtype: str, rounds: int) -> str:
    """Both tables of a run, and the geometric means."""
    with_mpi = MPI in run.all_reduce[0].seconds
    of_rounds = "1 round" if rounds == 1 else f"median of {rounds} rounds"
    all_reduce_columns = [name for name, _ in _COLUMNS if with_mpi or name != "x mpi"]
    send_columns = ["size", "count", "contestant", "time µs", "algbw GB/s", "x gloo"]
    lines = [
        f"all-reduce, {run.num_ranks} ranks, {dtype}, {of_rounds} (* fastest of ours)",
        *_table(run.all_reduce, all_reduce_factor(run.num_ranks), all_reduce_columns),
        *_means(run.all_reduce),
        "",
        f"send one way, rank 0 to rank 1 of {run.num_ranks}, {dtype}, {of_rounds}",
        *_table(run.send, 1.0, send_columns),
        *_means(run.send),
    ]
    return "\n".join(lines)


def _table(sizes: Sequence[Measured], bus_factor: float, columns: Sequence[str]) -> Iterator[str]:
    yield _line(dict(zip(columns, columns, strict=True)), columns)
    for number, measured in enumerate(sizes):
        if number:
            yield ""
        found = figures(measured, bus_factor)
        best = fastest_of_ours(found)
        for name, each in found.items():
            cells = _cells(f"{name} *" if name == best else name, each)
            if name == next(iter(found)):
                cells |= {"size": human(measured.num_bytes), "count": str(measured.count)}
            yield _line(cells, columns)


def _cells(name: str, each: Figures) -> dict[str, str]:
    microseconds = each.seconds * 1e6
    return {
        "contestant": name,
        "time µs": f"{microseconds:.1f}" if microseconds < 10_000 else f"{microseconds:.0f}",
        "algbw GB/s": f"{each.algbw:.2f}",
        "busbw GB/s": f"{each.busbw:.2f}",
        "x gloo": _times(each.times_gloo),
        "x mpi": _times(each.times_mpi),
        "of memory limit": "" if each.share_of_memory_limit is None else f"{each.share_of_memory_limit:.1%}",
    }


def _times(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _line(cells: dict[str, str], columns: Sequence[str]) -> str:
    shown = (
        cells.get(name, "").rjust(width) if width > 0 else cells.get(name, "").ljust(-width)
        for name, width in _COLUMNS
        if name in columns
    )
    return "  ".join(shown).rstrip()


def _means(sizes: Sequence[Measured]) -> Iterator[str]:
    """One line for each of ours, where there is more than one size to take the mean of."""
    if len(sizes) < 2:
        return
    yield ""
    for name, means in geometric_means(sizes).items():
        if name in PEERS:
            continue
        parts = [f"{_times(means['times_gloo'])} x gloo"]
        if "times_mpi" in means:
            parts.append(f"{_times(means['times_mpi'])} x mpi")
        if "share_of_memory_limit" in means:
            parts.append(f"{means['share_of_memory_limit']:.1%} of the memory limit")
        yield f"geometric mean, {name}: {', '.join(parts)}"
