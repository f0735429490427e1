"""The all-reduce's bus bandwidth over the size, as a picture. matplotlib is loaded when it is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from parallel3d.benchmarks.figures import PEERS, Run, all_reduce_factor, figures
from parallel3d.benchmarks.sizes import human
from runtime.errors import InvalidCall

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise InvalidCall where the picture could not be drawn in the end; leaves nothing there."""
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


def draw(runs: Sequence[Run], path: Path) -> None:
    """One panel for each number of ranks, one line for each contestant."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6.5 * len(runs), 5), layout="constrained")
    panels = picture.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for panel, run in zip(panels, runs, strict=True):
        sizes = sorted(run.all_reduce, key=lambda measured: measured.num_bytes)
        found = [figures(measured, all_reduce_factor(run.num_ranks)) for measured in sizes]
        x = [measured.num_bytes for measured in sizes]
        for name in found[0]:
            style = "--" if name in PEERS else "-"
            panel.plot(x, [each[name].busbw for each in found], style, marker="o", markersize=3, label=name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(x, [human(size) for size in x], rotation=45)
        panel.set_xlabel("size of the tensor")
        panel.set_title(f"all-reduce, {run.num_ranks} ranks")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("bus bandwidth, GB/s")
    panels[-1].legend()
    picture.savefig(path)
