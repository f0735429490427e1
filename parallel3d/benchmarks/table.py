"""Results as text tables, with the columns of nccl-tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from monitoring.events.collectives import bus_factor
from parallel3d.benchmarks.results import (
    MPI,
    PEERS,
    Figures,
    Measured,
    Run,
    fastest_of_ours,
    figures,
    geometric_means,
)
from parallel3d.formatting import show_size

_COLUMNS = (
    ("size", 9),
    ("count", 9),
    ("contestant", -14),
    ("time µs", 8),
    ("min-max µs", 13),
    ("algbw GB/s", 10),
    ("busbw GB/s", 10),
    ("x gloo", 7),
    ("x mpi", 7),
    ("of memory limit", 15),
)
"""Name and width; a negative width means left-aligned."""

_LIMIT_FROM = 64 << 10  # bytes; below this, the memory limit only measures the overhead of torch calls


def render(run: Run, dtype: str, rounds: int) -> str:
    """The all-reduce and send tables of a run, with geometric means."""
    with_mpi = MPI in run.all_reduce[0].seconds
    of_rounds = over_rounds(rounds)
    left_out = {*([] if with_mpi else ["x mpi"]), *(["min-max µs"] if rounds == 1 else [])}
    all_reduce_columns = [name for name, _ in _COLUMNS if name not in left_out]
    send_columns = [name for name in all_reduce_columns if name not in ("busbw GB/s", "x mpi", "of memory limit")]
    lines = [
        f"all-reduce, {run.num_ranks} ranks, {dtype}, {of_rounds} (* fastest of ours)",
        *_table(run.all_reduce, bus_factor("all_reduce", run.num_ranks), all_reduce_columns),
        *_means(run.all_reduce),
        "",
        f"send one way, rank 0 to rank 1 of {run.num_ranks}, {dtype}, {of_rounds}",
        *_table(run.send, 1.0, send_columns),
        *_means(run.send),
    ]
    return "\n".join(lines)


def over_rounds(rounds: int) -> str:
    """Describes how the times shown were computed."""
    return "1 round" if rounds == 1 else f"median of {rounds} rounds"


def _table(sizes: Sequence[Measured], bus_factor: float, columns: Sequence[str]) -> Iterator[str]:
    yield _line(dict(zip(columns, columns, strict=True)), columns)
    for number, measured in enumerate(sizes):
        if number:
            yield ""
        found = figures(measured, bus_factor)
        best = fastest_of_ours(found)
        for name, each in found.items():
            cells = _cells(f"{name} *" if name == best else name, each, measured, measured.seconds[name])
            if name == next(iter(found)):
                cells |= {"size": show_size(measured.num_bytes), "count": str(measured.count)}
            yield _line(cells, columns)


def _cells(name: str, each: Figures, measured: Measured, rounds: Sequence[float]) -> dict[str, str]:
    share = each.share_of_memory_limit if measured.num_bytes >= _LIMIT_FROM else None
    return {
        "contestant": name,
        "time µs": _microseconds(each.seconds),
        "min-max µs": f"{_microseconds(min(rounds))}-{_microseconds(max(rounds))}",
        "algbw GB/s": _number(each.algbw),
        "busbw GB/s": _number(each.busbw),
        "x gloo": _times(each.times_gloo),
        "x mpi": _times(each.times_mpi),
        "of memory limit": "-" if share is None else f"{share:.1%}",
    }


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 0.01 else f"{seconds * 1e6:.0f}"


def _number(value: float) -> str:
    """Two decimals, or more for values below 0.1, so that two significant digits show."""
    decimals = 2 if value >= 0.1 else 1 - math.floor(math.log10(value))
    return f"{value:.{decimals}f}"


def _times(value: float | None) -> str:
    return "" if value is None else _number(value)


def _line(cells: dict[str, str], columns: Sequence[str]) -> str:
    shown = (
        cells.get(name, "").rjust(width) if width > 0 else cells.get(name, "").ljust(-width)
        for name, width in _COLUMNS
        if name in columns
    )
    return "  ".join(shown).rstrip()


def _means(sizes: Sequence[Measured]) -> Iterator[str]:
    """One line for each of our contestants, if there is more than one size."""
    if len(sizes) < 2:
        return
    yield ""
    limited = [measured for measured in sizes if measured.num_bytes >= _LIMIT_FROM]
    shares = geometric_means(limited) if limited else {}
    since = f" from {show_size(_LIMIT_FROM)} up" if len(limited) < len(sizes) else ""
    for name, means in geometric_means(sizes).items():
        if name in PEERS:
            continue
        parts = [f"{_times(means['times_gloo'])} x gloo"]
        if "times_mpi" in means:
            parts.append(f"{_times(means['times_mpi'])} x mpi")
        if "share_of_memory_limit" in shares.get(name, {}):
            parts.append(f"{shares[name]['share_of_memory_limit']:.1%} of the memory limit{since}")
        yield f"geometric mean, {name}: {', '.join(parts)}"
