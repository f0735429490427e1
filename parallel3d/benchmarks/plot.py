"""Plots results: bandwidth and time over tensor size. Imports matplotlib only when drawing."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monitoring.events.collectives import bus_factor
from parallel3d.benchmarks.plan import Plan
from parallel3d.benchmarks.results import PEERS, Measured, Run, figures, headline
from parallel3d.benchmarks.table import over_rounds
from parallel3d.formatting import show_size
from runtime.errors import InvalidCall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise InvalidCall if the plot can't be drawn or written. Leaves no new file behind."""
    if path.suffix.lower() not in _FORMATS:
        raise InvalidCall(f"--plot {path}: the name must end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidCall("--plot needs matplotlib, which is not installed. pip install 'parallel3d[plot]'.")
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise InvalidCall(f"--plot {path} can't be written: {error.strerror}. Name another file.") from None
    if not was_there:
        path.unlink()


def draw(plan: Plan, facts: Mapping[str, Any], runs: Sequence[Run], path: Path) -> None:
    """Write the plot to `path`; the suffix selects the format."""
    picture(plan, facts, runs).savefig(path)


def picture(plan: Plan, facts: Mapping[str, Any], runs: Sequence[Run]) -> Figure:
    """The figure: one column per number of ranks, with all-reduce bandwidth, all-reduce time and send time."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5.5 * len(runs) + 2, 12), layout="constrained")
    ranks = ", ".join(str(run.num_ranks) for run in runs)
    drawn.suptitle(f"{headline(facts)}\n{plan.dtype}, {ranks} ranks, {over_rounds(plan.rounds)}", fontsize="medium")
    rows = drawn.subplots(3, len(runs), sharey="row", squeeze=False)
    for number, run in enumerate(runs):
        bandwidth, time, send = rows[:, number]
        factor, of_ranks = bus_factor("all_reduce", run.num_ranks), f"{run.num_ranks} ranks"
        _draw_lines(bandwidth, f"all-reduce, {of_ranks}: bandwidth", run.all_reduce, factor, "busbw", 1.0)
        _draw_lines(time, f"all-reduce, {of_ranks}: time", run.all_reduce, factor, "seconds", 1e6)
        _draw_lines(send, f"send, rank 0 to rank 1 of {run.num_ranks}: time", run.send, 1.0, "seconds", 1e6)
    for row, label in zip(rows, ("bus bandwidth, GB/s", "time, µs", "time one way, µs"), strict=True):
        row[0].set_ylabel(label)
        row[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), handlelength=4)  # beside the lines, not over them
    return drawn


def _draw_lines(panel: Axes, title: str, measured: Sequence[Measured], factor: float, what: str, scale: float) -> None:
    measured = sorted(measured, key=lambda size: size.num_bytes)
    found = [figures(size, factor) for size in measured]
    x = [size.num_bytes for size in measured]
    for number, name in enumerate(found[0]):
        panel.plot(x, [getattr(each[name], what) * scale for each in found], label=name, **_style(name, number))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(x, [show_size(size) for size in x], rotation=45)
    panel.set_xlabel("size of the tensor")
    panel.set_title(title, fontsize="medium")
    panel.grid(alpha=0.3)


def _style(name: str, number: int) -> dict[str, Any]:
    """Line style that distinguishes close lines even without colour. Peers are black."""
    markers, dashes = "os^DvPX*<>hp", ("-", (0, (6, 2)), (0, (6, 2, 1, 2)), (0, (1, 1)))
    if name in PEERS:
        number = PEERS.index(name)
        return {"color": "black", "marker": "x+1"[number], "linestyle": dashes[1 + number], "linewidth": 1}
    return {"color": f"C{number}", "marker": markers[number], "linestyle": dashes[number % 4], "markersize": 5}
