"""How fast the gradient server moves gradients, and in how much memory.

python bench/gradient_server.py [--json] [--quick]

1. Eight workers with 64 MiB each, over loopback, in turns in one run: plain sockets and one process that takes the same
   bytes and sends as many back (bench/serving/relay.py); the server with workers of version 1; with those of version 2,
   which also compare checksums. Bytes there and back a second.
2. The most memory that the server's whole process had, with 2, 8 and 32 workers.
3. What a step of three workers takes, from the first byte of its gradients until the other two have the average, while
   1,000 connections are open that say nothing and one of the three reads slowly; in turns with the same without them,
   where that one reads at once and then pauses. (A step after a pause takes longer, whatever caused the pause.)
"""

from __future__ import annotations

import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from common import median, median_ratio, options, show, wanted

FOLDER = Path(__file__).resolve().parent / "serving"
MIB = 1 << 20
CONTESTANTS = ("plain", "v1", "v2")
CROWDS = (2, 8, 32)
IDLE = 1000


class Settings(NamedTuple):
    workers: int
    size: int
    steps: int
    rounds: int


# One turn.


class Server:
    """Whatever workers connect to, in a process of its own."""

    def __init__(self, kind: str, workers: int, size: int) -> None:
        if kind == "plain":
            command = [sys.executable, str(FOLDER / "relay.py"), str(workers), str(size)]
        else:
            command = [sys.executable, "-m", "parallel3d", "serve-gradients", "--bind", "127.0.0.1:0"]
            command += ["--workers", str(workers), "--samples", str(workers), "--protocol", kind]
        out = {"stdout": subprocess.PIPE} if kind == "plain" else {"stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, **out)  # type: ignore[call-overload]
        self.port = self._port()

    def _port(self) -> int:
        stream = self.process.stdout or self.process.stderr
        for line in stream:
            if found := re.search(r"(?:127\.0\.0\.1:|^)(\d+)", line):
                return int(found[1])
        raise RuntimeError("the server did not start")

    @property
    def most_memory(self) -> int:
        """Bytes of the whole process, so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def workers_of(kinds: Sequence[str], port: int, settings: Settings) -> Iterator[list[subprocess.Popen[str]]]:
    """One of each kind, all connected, and waiting for a line."""
    rest = (str(settings.size), str(settings.steps))
    workers = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / "worker.py"), kind, "127.0.0.1", str(port), str(number), *rest],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, kind in enumerate(kinds)
    ]
    try:
        for worker in workers:
            if _line_of(worker) != "ready\n":
                raise RuntimeError("a worker did not start")
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _line_of(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline()


def ends_of(workers: Sequence[subprocess.Popen[str]]) -> list[float]:
    """Let them begin, and wait until all have made their steps: when each step had ended. They stay connected."""
    _start(workers)
    found = [_numbers_of(worker)[1::2] for worker in workers]
    return [max(step) for step in zip(*found, strict=True)]


def _numbers_of(worker: subprocess.Popen[str]) -> list[float]:
    found = [float(word) for word in _line_of(worker).split()]
    if not found:
        raise RuntimeError("a worker failed")
    return found


def _start(workers: Sequence[subprocess.Popen[str]], last: str = "") -> None:
    """With a word for the last."""
    for number, worker in enumerate(workers, 1):
        assert worker.stdin is not None
        worker.stdin.write(last * (number == len(workers)) + "\n")
        worker.stdin.flush()


class StepCost(NamedTuple):
    seconds: float
    """Of a step, from the end of the one before to its own, all workers together: the median."""
    memory: int


def measure_steps(kind: str, settings: Settings) -> StepCost:
    with (
        Server(kind, settings.workers, settings.size) as server,
        workers_of([kind] * settings.workers, server.port, settings) as workers,
    ):
        ends = ends_of(workers)
        return StepCost(median([after - before for before, after in pairwise(ends)]), server.most_memory)


# What is asked.


def speeds(settings: Settings) -> dict[str, Any]:
    """Bytes there and back a second, by contestant, and over the plain ones' of the same round."""
    moved = 2 * settings.workers * settings.size
    rates: dict[str, list[float]] = {kind: [] for kind in CONTESTANTS}
    for number in range(settings.rounds):
        for kind in CONTESTANTS if number % 2 else CONTESTANTS[::-1]:
            rates[kind].append(moved / measure_steps(kind, settings).seconds)
    ratios = {kind: median_ratio(rates[kind], rates["plain"]) for kind in CONTESTANTS[1:]}
    return {"rates": {kind: median(each) for kind, each in rates.items()}, "over_plain": ratios, **settings._asdict()}


def memories(size: int, crowds: Sequence[int]) -> list[dict[str, Any]]:
    """Of the server, beside what it may have."""
    return [
        {
            "kind": kind,
            "workers": workers,
            "bytes": measure_steps(kind, Settings(workers, size, steps=3, rounds=1)).memory,
            "most": 3 * size + 64 * MIB,
        }
        for kind in CONTESTANTS[1:]
        for workers in crowds
    ]


def crowded(settings: Settings) -> dict[str, Any]:
    """What a step takes from its first gradient's first byte until all but the last worker have the average, with many
    who are idle and a last one who reads slowly. All begin a step together, or he would hold up the next by coming
    late."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with (
        Server("v1", settings.workers, settings.size) as server,
        workers_of(["paced"] * settings.workers, server.port, settings) as workers,
    ):
        for number in range(2 * settings.rounds):
            is_crowded = number % 2 == 1
            with idle_connections(server.port, IDLE if is_crowded else 0):
                found = [_step_seconds(workers, "slow" if is_crowded else "late") for _ in range(settings.steps)]
            seconds[is_crowded] += found[1:]  # in the first, connections may still be opened and closed
    alone, crowd = median(seconds[False]), median(seconds[True])
    return {"seconds": alone, "seconds_in_a_crowd": crowd, "ratio": crowd / alone, "idle": IDLE, **settings._asdict()}


def _step_seconds(workers: Sequence[subprocess.Popen[str]], last: str) -> float:
    _start(workers, last)
    found = [_numbers_of(worker) for worker in workers]
    if any(_line_of(worker) != "ready\n" for worker in workers):
        raise RuntimeError("a worker failed")
    return max(ended for _, ended in found[:-1]) - min(begun for begun, _ in found)


@contextmanager
def idle_connections(port: int, count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        yield


# As people read it.


def lines_of(speed: dict[str, Any], memory: list[dict[str, Any]], crowd: dict[str, Any]) -> list[str]:
    head = f"{speed['workers']} workers x {speed['size'] // MIB} MiB, there and back:"
    rates = ", ".join(f"{kind} {rate / MIB:.0f} MiB/s" for kind, rate in speed["rates"].items())
    lines = [f"{head} {rates} ({speed['rounds']} rounds)"]
    lines += [
        f"  {kind} over plain: {ratio:.2f} {wanted(ratio, least=0.7)}" for kind, ratio in speed["over_plain"].items()
    ]
    for each in memory:
        used, most = each["bytes"] / MIB, each["most"] / MIB
        lines.append(
            f"memory with {each['workers']} workers of {each['kind']}: {used:.0f} MiB {wanted(used, most=most)}"
        )
    lines.append(
        f"with {crowd['idle']} idle connections and a slow reader: a step {crowd['ratio']:.3f} times as long "
        f"{wanted(crowd['ratio'], most=1.05)}"
    )
    return lines


def main() -> None:
    chosen = options(__doc__)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * IDLE)), hard))
    if chosen.quick:
        speed = speeds(Settings(workers=2, size=4 * MIB, steps=4, rounds=1))
        memory = memories(4 * MIB, CROWDS[:1])
        crowd = crowded(Settings(workers=3, size=MIB, steps=4, rounds=1))
    else:
        speed = speeds(Settings(workers=8, size=64 * MIB, steps=5, rounds=7))
        memory = memories(64 * MIB, CROWDS)
        crowd = crowded(Settings(workers=3, size=16 * MIB, steps=8, rounds=12))
    show({"speed": speed, "memory": memory, "crowded": crowd}, lines_of(speed, memory, crowd), chosen.json)


if __name__ == "__main__":
    main()
