"""What watching a run costs: steps with everything on beside steps with everything off, in turns in one run.

python bench/monitoring.py [--json] [--quick]

One small GPT on two ranks, one thread each: two replicas, and two stages with eight microbatches, whose steps are short
and leave many events. Each turn is some steps
1. off: `monitoring.enabled: false`;
2. on: events recorded, sent, attributed and judged, the page's stream read, `/metrics` asked for once a second;
3. asked: as 2, and a hundred ask for `/metrics` at the same time, once a turn.
Beside them, what one record costs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

sys.path.append(sys.path.pop(0))  # this file has the name of a package of ours, which shall be found first

from common import median, options, show, wanted
from watching.rank import TURNS

from monitoring.events import What
from monitoring.recorder import Recorder
from parallel3d.config import RunConfig, load_config
from parallel3d.training_run import Run
from runtime.control import Message
from runtime.loop import run
from runtime.script import Target

BATCH = 16
SCRIPT = Path(__file__).resolve()
RANK = str(SCRIPT.with_name("watching") / "rank.py")
CASES = {"two replicas": (2, 1, 16), "two stages": (1, 2, 8)}
"""dp, pp, sequence."""
AT_ONCE = 100


# The run, and those who look at it.


class WatchedRun(Run):
    """Hears which turn it is."""

    turn = "off"

    def _on_message(self, rank: int, message: Message) -> None:
        if message["kind"] == "turn":
            self.turn = str(message["name"])
            self.turned.set()
        super()._on_message(rank, message)

    turned: asyncio.Event


def config_of(case: str, folder: Path) -> RunConfig:
    dp, pp, sequence = CASES[case]
    return load_config(
        None,
        overrides={
            "model.args": {"layers": 4, "width": 256, "heads": 4, "vocabulary": 256, "sequence": sequence},
            "parallel": {"dp": dp, "pp": pp},
            "pipeline.microbatches": 8 if pp > 1 else 1,
            "train": {"steps": 1_000_000, "batch_size": BATCH},
            "runtime": {"threads": 1, "run_dir": str(folder / "run")},
        },
        environ={},
    )


async def watch(case: str, rounds: int, folder: Path, result: Path) -> int:
    """One run; gives the number of answers that onlookers got."""
    target = Target(RANK, args=(str(rounds), str(result)))
    watched = WatchedRun(config_of(case, folder), target=target)
    watched.turned = asyncio.Event()
    async with watched:
        with Onlookers(str(watched.endpoints["page"]), str(watched.endpoints["metrics"])) as onlookers:
            looking = asyncio.create_task(look_on(watched, onlookers))
            await watched.summary()
            looking.cancel()
            return onlookers.finish()


def measure(case: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        result = Path(place, "result.json")
        answered = run(lambda: watch(case, rounds, Path(place), result))
        seconds = json.loads(result.read_text())
    ratios = {name: [a / b for a, b in zip(seconds[name], seconds["off"], strict=True)] for name in TURNS}
    asked = [a / b for a, b in zip(seconds["asked"], seconds["on"], strict=True)]
    return {
        "case": case,
        "seconds": {name: median(values) for name, values in seconds.items()},
        "on_over_off": median(ratios["on"]),
        "asked_over_on": median(asked),
        "rounds": rounds,
        "answers": answered,
    }


async def look_on(watched: WatchedRun, onlookers: Onlookers) -> None:
    """Once a second while it is on; a hundred at a time in the turns that are for that."""
    while True:
        watched.turned.clear()
        if watched.turn == "asked":
            onlookers.ask(AT_ONCE)
        while not watched.turned.is_set():
            if watched.turn != "off":
                onlookers.ask(1)
            try:
                await asyncio.wait_for(watched.turned.wait(), 1.0)
            except TimeoutError:
                continue


class Onlookers:
    """A process of their own, as they would be."""

    def __init__(self, page: str, metrics: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "look", page, metrics], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, times: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{times}\n".encode())
        self._process.stdin.flush()

    def finish(self) -> int:
        """The number of whole answers."""
        out, _ = self._process.communicate(timeout=30)
        return int(out)

    def __enter__(self) -> Onlookers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def look(page: str, metrics: str) -> None:
    """Read the page's stream, and ask for the metrics as often as stdin says; then say how many answers were whole."""
    threading.Thread(target=read_stream, args=(page,), daemon=True).start()
    print(asyncio.run(answer_stdin(metrics, sys.stdin.buffer)))


def read_stream(page: str) -> None:
    import http.client

    url = urlsplit(page)
    connection = http.client.HTTPConnection(str(url.hostname), url.port)
    token = url.query.partition("=")[2]
    connection.request("GET", "/api/stream", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    while answer.read1(1 << 16):
        pass


async def answer_stdin(metrics: str, stdin: BinaryIO) -> int:
    whole = 0
    while line := await asyncio.to_thread(stdin.readline):
        whole += sum(await asyncio.gather(*(scrape(metrics) for _ in range(int(line)))))
    return whole


async def scrape(metrics: str) -> bool:
    url = urlsplit(metrics)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(f"GET {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200") and b"parallel3d_phase_seconds_total" in answer


# What one record costs.


def record_seconds() -> float:
    """The best of several: whatever disturbs makes it longer."""
    recorder, num = Recorder(), 20_000
    found = []
    for _ in range(9):
        start = time.perf_counter()
        for number in range(num):
            recorder.record(What.F.value, number, 1.0, 2.0, 3, 4, 0.5, 0.25, 65536)
        found.append((time.perf_counter() - start) / num)
    return min(found)


def lines_of(results: list[dict[str, Any]], record: float) -> list[str]:
    lines = [f"a record {1e6 * record:.2f} us {wanted(1e6 * record, most=2)}"]
    for each in results:
        seconds = "  ".join(f"{name} {1e3 * value:.2f} ms" for name, value in each["seconds"].items())
        lines += [
            f"{each['case']}: {seconds} ({each['rounds']} rounds, {each['answers']} whole answers)",
            f"  on over off {each['on_over_off']:.4f} {wanted(each['on_over_off'], most=1.01)}",
            f"  asked by {AT_ONCE} over on {each['asked_over_on']:.4f} {wanted(each['asked_over_on'], most=1.01)}",
        ]
    return lines


def main() -> None:
    chosen = options(__doc__)
    rounds = 3 if chosen.quick else 31
    record = record_seconds()
    results = [measure(case, rounds) for case in CASES]
    show({"record_seconds": record, "cases": results}, lines_of(results, record), chosen.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["look"]:
        look(*sys.argv[2:])
    else:
        main()
