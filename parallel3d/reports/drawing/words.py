"""Numbers and names as people read them."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor, log10

from monitoring.text import printable
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation.outcome import Simulation

_LONGEST_NAME = 60


def number(value: float) -> str:
    """Up to four significant digits, and no zeros that say nothing; whole numbers whole."""
    return str(round(value)) if abs(value - round(value)) < 1e-9 else f"{value:.4g}"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 microbatches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def show_bytes(size: int) -> str:
    """In the unit that people would choose."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def plain(text: str) -> str:
    """Without what a terminal obeys or XML refuses, and not too long: the end of a path says most."""
    text = printable(text)
    return text if len(text) <= _LONGEST_NAME else f"…{text[1 - _LONGEST_NAME :]}"


def title(table: Table) -> str:
    """Which table this is."""
    parts = [count(table.num_ranks, "rank"), count(table.microbatches, "microbatch")]
    if table.stages != table.num_ranks:
        parts.insert(1, count(table.stages, "stage"))
    return f"{plain(table.schedule)}: {', '.join(parts)}"


def facts(simulation: Simulation) -> str:
    """How long, and how much of it in vain."""
    return f"makespan {number(simulation.makespan)}, bubble {percent(simulation.bubble_ratio)}"


def summary(simulation: Simulation) -> str:
    """What it comes to, in one line."""
    peaks = " ".join(map(str, simulation.peak_activations))
    return f"{facts(simulation)}, peak activations by stage: {peaks}"


def round_steps(end: float, most: float) -> Iterator[float]:
    """0, and then at most so many steps of 1, 2 or 5 times a power of ten, up to `end`."""
    if end <= 0:
        yield 0.0
        return
    smallest = end / max(most, 1)
    power = 10.0 ** floor(log10(smallest) + 1e-9)
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest * (1 - 1e-9))
    yield from (index * step for index in range(ceil(end / step * (1 - 1e-9)) + 1) if index * step <= end * (1 + 1e-9))
