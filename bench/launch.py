"""Eight ranks from the command to their first all-reduce: `parallel3d launch` beside torchrun, in turns.

python bench/launch.py [--json] [--quick]

The clock starts before the command and stops when the last rank has the result of its first all-reduce.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import median, options, show, wanted

NUM_RANKS = 8

OURS = """
import os, sys, time
import torch
import parallel3d

async def main():
    async with parallel3d.mesh(dp=8) as mesh:
        tensor = torch.ones(1)
        await mesh.world.all_reduce(tensor)
        assert tensor.item() == 8
        with open(os.path.join(sys.argv[1], str(mesh.rank)), "w") as file:
            file.write(str(time.monotonic()))

parallel3d.run(main)
"""

TORCHRUN = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert tensor.item() == 8
with open(os.path.join(sys.argv[1], str(dist.get_rank())), "w") as file:
    file.write(str(time.monotonic()))
dist.destroy_process_group()
"""

COMMANDS = {
    "parallel3d": (["-m", "parallel3d", "launch", "-n", str(NUM_RANKS)], OURS),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"], TORCHRUN),
}


def seconds_to_first_all_reduce(name: str) -> float:
    command, script = COMMANDS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script)
        results = Path(folder, "times")
        results.mkdir()
        # torchrun sets one thread and warns unless OMP_NUM_THREADS is set, and leaves a log folder in TMPDIR.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": folder}
        start = time.monotonic()
        subprocess.run(
            [sys.executable, *command, str(path), str(results)],
            env=environment, check=True, timeout=300, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        ends = [float(file.read_text()) for file in results.iterdir()]
        assert len(ends) == NUM_RANKS
        return max(ends) - start


def main() -> None:
    chosen = options(__doc__)
    rounds = 1 if chosen.quick else 5
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name in COMMANDS:
            times[name].append(seconds_to_first_all_reduce(name))
    medians = {name: median(values) for name, values in times.items()}
    ratio = medians["torchrun"] / medians["parallel3d"]
    lines = [f"{name:<11} {medians[name]:6.2f} s   ({' '.join(f'{t:.2f}' for t in times[name])})" for name in COMMANDS]
    lines.append(f"ratio       {ratio:6.2f}   {wanted(ratio, least=5)}")
    show({"ranks": NUM_RANKS, "seconds": times, "median": medians, "ratio": ratio}, lines, chosen.json)


if __name__ == "__main__":
    main()
