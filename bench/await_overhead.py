"""What `await` costs, and how responsive the event loop stays.

python bench/await_overhead.py [--json] [--quick]

1. An awaited all-reduce of 4 bytes beside the raw blocking call of the same gloo backend: two ranks, alternating
   blocks of calls, the median of each block, and the median difference between neighbouring blocks.
2. The event loop's lag while each rank multiplies matrices on its engine thread, on both cores: how late a timer
   of 5 ms comes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from common import launch_for_result, median, options, show, wanted

import parallel3d
from process_groups.torch_internals import TorchBackend

NUM_RANKS = 2
BLOCK = 50


def raw_block(backend: TorchBackend, tensor: torch.Tensor) -> list[float]:
    times = []
    for _ in range(BLOCK):
        start = time.perf_counter()
        backend.allreduce([tensor]).wait(timedelta(seconds=30))
        times.append(time.perf_counter() - start)
    return times


async def awaited_block(group: parallel3d.Group, tensor: torch.Tensor) -> list[float]:
    times = []
    for _ in range(BLOCK):
        start = time.perf_counter()
        await group.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return times


async def measure_overhead(mesh: parallel3d.Mesh, blocks: int) -> dict[str, float]:
    backend = mesh.world._transport._backend  # the very one that the awaited calls use
    tensor = torch.zeros(1)
    raw, awaited = [], []
    for _ in range(blocks):
        await mesh.world.barrier()
        raw.append(median(raw_block(backend, tensor)) * 1e6)
        await mesh.world.barrier()
        awaited.append(median(await awaited_block(mesh.world, tensor)) * 1e6)
    differences = [a - r for a, r in zip(awaited, raw, strict=True)]
    return {"raw_us": median(raw), "awaited_us": median(awaited), "difference_us": median(differences)}


async def measure_lag(mesh: parallel3d.Mesh, seconds: float) -> dict[str, float]:
    a = torch.randn(512, 512)

    def compute() -> int:
        count, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            torch.mm(a, a)
            count += 1
        return count

    lags = []
    computing = asyncio.create_task(mesh.compute(compute))
    while not computing.done():
        due = time.monotonic() + 0.005
        await asyncio.sleep(0.005)
        lags.append(max(0.0, time.monotonic() - due))
    lags.sort()
    everyone = await mesh.world.all_gather(torch.tensor([lags[len(lags) // 2], lags[int(len(lags) * 0.99)], lags[-1]]))
    p50, p99, worst = everyone.reshape(-1, 3).max(dim=0).values.tolist()
    return {"p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "worst_ms": worst * 1e3, "matmuls": await computing}


async def run_rank(quick: bool, path: str) -> None:
    async with parallel3d.mesh(dp=NUM_RANKS, threads=1, backend="gloo") as mesh:
        overhead = await measure_overhead(mesh, 4 if quick else 40)
        lag = await measure_lag(mesh, 1.0 if quick else 10.0)
    if mesh.rank == 0:
        leave(path, {"overhead": overhead, "loop_lag": lag})


def leave(path: str, result: object) -> None:
    Path(path).write_text(json.dumps(result))


def main() -> None:
    chosen = options(__doc__)
    result = launch_for_result(NUM_RANKS, __file__, "rank", "quick" if chosen.quick else "full")
    overhead, lag = result["overhead"], result["loop_lag"]
    lines = [
        f"4-byte all-reduce, {NUM_RANKS} ranks, gloo",
        f"  raw, blocking   {overhead['raw_us']:7.1f} µs",
        f"  awaited         {overhead['awaited_us']:7.1f} µs",
        f"  difference      {overhead['difference_us']:7.1f} µs   {wanted(overhead['difference_us'], most=60)}",
        "event-loop lag while both cores compute (worst rank)",
        f"  p50             {lag['p50_ms']:7.2f} ms",
        f"  p99             {lag['p99_ms']:7.2f} ms   {wanted(lag['p99_ms'], most=10)}",
        f"  worst           {lag['worst_ms']:7.2f} ms",
    ]
    show(result, lines, chosen.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        parallel3d.run(lambda: run_rank(sys.argv[2] == "quick", sys.argv[3]))
    else:
        main()
