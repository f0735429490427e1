"""What the benchmarks share: their options, their medians, and how they print."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# bench/monitoring.py has the name of a package of ours, which shall be found first.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: shows that it runs, not how fast")
    return parser.parse_args()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def median_ratio(of: Iterable[float], over: Iterable[float]) -> float:
    """Of the rounds' own ratios: what slows a whole round down cancels out."""
    return median([a / b for a, b in zip(of, over, strict=True)])


def joined(launches: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[float]]:
    """Each contestant's values, of all launches: where its weights happen to lie makes it faster or slower by a percent
    or two, for as long as its process lives."""
    return {name: [value for each in launches for value in each[key][name]] for name in launches[0][key]}


def turn(names: Iterable[str], number: int) -> list[str]:
    """A round's order: everybody is first in turn, so that nobody always has the caches as one other left them."""
    names = list(names)
    first = number % len(names)
    return names[first:] + names[:first]


def wanted(value: float, *, least: float | None = None, most: float | None = None) -> str:
    """What a figure is measured against, and whether it got there."""
    goal = f"at least {least:g}" if least is not None else f"at most {most:g}"
    reached = (least is None or value >= least) and (most is None or value <= most)
    return f"(wanted: {goal}; {'reached' if reached else 'NOT reached'})"


def show(result: Mapping[str, object], lines: Sequence[str], as_json: bool) -> None:
    print(json.dumps(result, indent=2) if as_json else "\n".join(lines))


def launch(num_ranks: int, script: str, *args: str) -> None:
    """Start a script as ranks and wait for them."""
    runner = str(Path(__file__).with_name("ranks") / "script.py")
    command = [sys.executable, "-m", "parallel3d", "launch", "-n", str(num_ranks), runner, script, *args]
    subprocess.run(command, check=True, timeout=600)


def launch_for_result(num_ranks: int, script: str, *args: str) -> object:
    """As `launch`; the script's last argument is a file in which rank 0 leaves JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        launch(num_ranks, script, *args, str(path))
        return json.loads(path.read_text())
