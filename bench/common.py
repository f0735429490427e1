"""Shared by the benchmarks: options, medians, printing, and measuring in ranks. Loads torch only in ranks."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel3d import Group

# bench/monitoring.py has the name of one of our packages, which must be found first.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: shows that it runs, not how fast")
    return parser.parse_args()


def median_ratio(of: Iterable[float], over: Iterable[float]) -> float:
    """The median of the ratios within each round, so that what slows a whole round down cancels out."""
    return median([a / b for a, b in zip(of, over, strict=True)])


def joined(launches: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[float]]:
    """Each contestant's values from all launches: the addresses of its weights make it faster or slower by a percent or
    two for as long as its process lives."""
    return {name: [value for each in launches for value in each[key][name]] for name in launches[0][key]}


def turn(names: Iterable[str], number: int) -> list[str]:
    """The order of a round: another name is first each time, so that none always follows the same other."""
    names = list(names)
    first = number % len(names)
    return names[first:] + names[:first]


def wanted(value: float, *, least: float | None = None, most: float | None = None) -> str:
    """The goal of a figure, and whether it is reached."""
    goal = f"at least {least:g}" if least is not None else f"at most {most:g}"
    reached = (least is None or value >= least) and (most is None or value <= most)
    return f"(wanted: {goal}; {'reached' if reached else 'NOT reached'})"


def show(result: Mapping[str, object], lines: Sequence[str], as_json: bool) -> None:
    print(json.dumps(result, indent=2) if as_json else "\n".join(lines))


def launch_for_result(num_ranks: int, script: str, *args: str) -> Any:
    """Run a script's `measure` (see `main_or_rank`) with these arguments in ranks; returns what rank 0 measured."""
    runner = str(Path(__file__).with_name("ranks") / "script.py")
    command = [sys.executable, "-m", "parallel3d", "launch", "-n", str(num_ranks), runner, script, "rank", *args]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        subprocess.run([*command, str(path)], check=True, timeout=600)
        return json.loads(path.read_text())


def main_or_rank(main: Callable[[], None], measure: Callable[..., Coroutine[Any, Any, object]]) -> None:
    """Call `main`, or in a rank of `launch_for_result` run `measure`, whose result rank 0 writes as JSON."""
    if sys.argv[1:2] != ["rank"]:
        main()
        return
    import parallel3d

    found = parallel3d.run(lambda: measure(*sys.argv[2:-1]))
    if os.environ["RANK"] == "0":
        Path(sys.argv[-1]).write_text(json.dumps(found))


def torch_store() -> str:
    """In a rank of `launch_for_result`: a file in which torch's own groups meet."""
    return str(Path(sys.argv[-1]).with_name("torch-store"))


def join_torch() -> tuple[int, int]:
    """In a rank of `launch_for_result`: join torch's default gloo group; returns rank and size."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{torch_store()}", rank=rank, world_size=size)
    return rank, size


async def step_seconds(group: Group, step: Callable[[], Awaitable[Any]], num_steps: int = 1) -> float:
    """Seconds of a step, from the first rank's start to the last one's end."""
    import torch

    await group.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        await step()
    ends = await group.all_gather(torch.tensor([start, time.perf_counter()], dtype=torch.float64))
    starts, stops = ends.view(-1, 2).unbind(1)
    return float(stops.max() - starts.min()) / num_steps
