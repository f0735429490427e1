"""The main ratios of `parallel3d bench collectives`, for 2, 4 and 8 ranks.

python bench/collectives.py [--json] [--quick]

Above 1 is in our favour. "registered" is the default strategy on a tensor of `group.empty`, "shared" the same with one
result for all ranks, "staged" the default strategy on a plain torch tensor; adaptive is compared with the best single
strategy of the size. --json prints the ratios and the whole result of the command.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from common import median_ratio, options, show

RANKS = "2,4,8"
SECONDS = 7200
MIB = 1 << 20
COLUMNS = (
    "registered_gloo",
    "registered_mpi",
    "memory_limit",
    "shared_gloo",
    "staged_gloo",
    "adaptive_best",
    "send_gloo",
    "send_staged_gloo",
)
HEADS = (
    "/ gloo",
    "/ mpi",
    "of limit",
    "shared / gloo",
    "staged / gloo",
    "adaptive / best",
    "send / gloo",
    "send staged / gloo",
)


def run(quick: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "parallel3d", "bench", "collectives", "--json", "-n", RANKS]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])], check=True, timeout=SECONDS, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout)


def adaptive_over_best(contestants: Mapping[str, Any]) -> float | None:
    """Speed of `adaptive` over the best single strategy; None if it was not measured."""
    ours = set(contestants) - {"adaptive", "shared", "staged", "gloo", "mpi", "memory limit"}
    if "adaptive" not in contestants:
        return None
    best = contestants[min(ours, key=lambda name: contestants[name]["seconds"])]["rounds"]
    return median_ratio(best, contestants["adaptive"]["rounds"])


def geometric_mean_mpi(sizes: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the ratios to MPI from 1 MiB up; None without them."""
    found = [each["contestants"]["default"]["times_mpi"] for each in sizes if each["bytes"] >= MIB]
    return math.exp(sum(map(math.log, found)) / len(found)) if found and None not in found else None


def ratios_of_size(reduced: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, float | None]:
    reducers, senders = reduced["contestants"], sent["contestants"]
    return {
        "registered_gloo": reducers["default"]["times_gloo"],
        "registered_mpi": reducers["default"]["times_mpi"],
        "memory_limit": reducers["default"]["share_of_memory_limit"],
        "shared_gloo": reducers["shared"]["times_gloo"],
        "staged_gloo": reducers["staged"]["times_gloo"],
        "adaptive_best": adaptive_over_best(reducers),
        "send_gloo": senders["registered"]["times_gloo"],
        "send_staged_gloo": senders["unregistered"]["times_gloo"],
    }


def time_per_byte(sizes: Sequence[Mapping[str, Any]], small: int, large: int) -> float | None:
    """Time per byte in the small tensor over that in the large one; None if either was not measured."""
    cost = {each["bytes"]: each["contestants"]["default"]["seconds"] / each["bytes"] for each in sizes}
    return cost[small] / cost[large] if small in cost and large in cost else None


def ratios(run: Mapping[str, Any]) -> dict[str, Any]:
    pairs = zip(run["all_reduce"], run["send"], strict=True)
    return {
        "ranks": run["ranks"],
        "sizes": [{"bytes": reduced["bytes"], **ratios_of_size(reduced, sent)} for reduced, sent in pairs],
        "geometric_mean_mpi": geometric_mean_mpi(run["all_reduce"]),
        "time_per_byte_1MiB_over_256MiB": time_per_byte(run["all_reduce"], MIB, 256 * MIB),
    }


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def lines_of(found: Mapping[str, Any]) -> list[str]:
    rows = [[str(each["bytes"]), *(cell(each[column]) for column in COLUMNS)] for each in found["sizes"]]
    heads = ["bytes", *HEADS]
    widths = [max(10, len(head)) for head in heads]
    per_byte = found["time_per_byte_1MiB_over_256MiB"]
    return [
        f"{found['ranks']} ranks",
        *("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (heads, *rows)),
        f"geometric mean / mpi, from 1 MiB up: {cell(found['geometric_mean_mpi'])}",
        *([] if per_byte is None else [f"time per byte, 1 MiB over 256 MiB: {cell(per_byte)}"]),
        "",
    ]


def main() -> None:
    chosen = options(__doc__)
    result = run(chosen.quick)
    found = [ratios(each) for each in result["runs"]]
    lines = [line for each in found for line in lines_of(each)]
    show({"ratios": found, "result": result}, lines[:-1], chosen.json)


if __name__ == "__main__":
    main()
