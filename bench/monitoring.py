"""What monitoring costs: steps with everything on beside steps with everything off, in turns in one run.

python bench/monitoring.py [--json] [--quick]

One small GPT on two ranks, one thread each: two replicas, and two stages with eight microbatches, whose short steps
record many events.
1. Single steps with recording off and on, in turns: what recording costs the step itself.
2. Turns of some seconds: off (`monitoring.enabled: false`); on (events sent and analysed, the page's stream read,
   `/metrics` scraped every five seconds, as with `parallel3d dashboards`); asked (on, and a hundred scrape `/metrics`
   at once, every turn). The CPU time of the monitoring process is what the ranks may lose. A turn's speed is printed
   too, but varies by several percent from turn to turn, monitored or not.
3. What recording one event costs.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from common import median, options, show, wanted
from watching.rank import SETTLING_SECONDS, TURN_SECONDS, TURNS

from monitoring.events.events import What
from monitoring.events.recorder import Recorder
from parallel3d.config import RunConfig, load_config
from parallel3d.runs.supervised import Run
from runtime.control import Message
from runtime.launch.script import Target
from runtime.loop import run

BATCH = 16
SCRIPT = Path(__file__).resolve()
RANK = str(SCRIPT.with_name("watching") / "rank.py")
CASES = {"two replicas": (2, 1, 16), "two stages": (1, 2, 8)}
"""dp, pp, sequence."""
AT_ONCE = 100
SCRAPE_SECONDS = 5.0


# The run and its HTTP clients.


class WatchedRun(Run):
    """Notes the CPU time of this process in each turn that its ranks announce."""

    turn = "settling"
    turned: asyncio.Event

    def _on_message(self, rank: int, message: Message) -> None:
        if message["kind"] == "turn":
            self._note_time()
            self.turn = str(message["name"])
            self.turned.set()
        super()._on_message(rank, message)

    def _note_time(self) -> None:
        now = time.process_time(), time.monotonic()
        if self.turn != "settling":
            used, lasted = (after - before for after, before in zip(now, self._since, strict=True))
            self.shares.setdefault(self.turn, []).append(used / lasted)
        self._since = now

    shares: dict[str, list[float]]
    """CPU seconds per second, by kind of turn."""


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


async def watch(case: str, words: tuple[str, ...], folder: Path) -> tuple[dict[str, list[float]], int]:
    """One run; returns its CPU shares by turn, and the number of complete answers that clients got."""
    watched = WatchedRun(config_of(case, folder), target=Target(RANK, args=words))
    watched.turned, watched.shares = asyncio.Event(), {}
    async with watched:
        with Clients(str(watched.endpoints["page"]), str(watched.endpoints["metrics"])) as clients:
            asking = asyncio.create_task(ask_by_turn(watched, clients))
            await watched.summary()
            asking.cancel()
            return watched.shares, clients.finish()


def measure(case: str, rounds: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        result = Path(place, "result.json")
        words = str(rounds), str(pairs), str(result)
        shares, answers = run(lambda: watch(case, words, Path(place)))
        seconds = json.loads(result.read_text())
    recorded = [a / b for a, b in zip(seconds["recorded"], seconds["unrecorded"], strict=True)]
    used = {name: median(values) for name, values in shares.items()}
    return {
        "case": case,
        "seconds": {name: median(values) for name, values in seconds.items()},
        "recorded_over_unrecorded": median(recorded),
        "uncertainty": uncertainty(recorded),
        "cores_used": used,
        "cost": median(recorded) - 1 + used["on"] - used["off"],
        "cost_of_being_asked": used["asked"] - used["on"],
        "rounds": rounds,
        "pairs": pairs,
        "answers": answers,
    }


def uncertainty(values: list[float]) -> float:
    """The standard error of the median, from the spread of the middle half: delayed steps are outliers."""
    first, _, third = statistics.quantiles(values, n=4)
    return 1.25 * (third - first) / 1.349 / len(values) ** 0.5


async def ask_by_turn(watched: WatchedRun, clients: Clients) -> None:
    """Scrape as Prometheus does in the turns `on` and `asked`, and a hundred times at once in `asked`."""
    while True:
        watched.turned.clear()
        if watched.turn == "asked":
            clients.ask(AT_ONCE)
        while not watched.turned.is_set():
            if watched.turn in ("on", "asked"):
                clients.ask(1)
            try:
                await asyncio.wait_for(watched.turned.wait(), SCRAPE_SECONDS)
            except TimeoutError:
                continue


class Clients:
    """HTTP clients in a process of their own."""

    def __init__(self, page: str, metrics: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "clients", page, metrics], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, times: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{times}\n".encode())
        self._process.stdin.flush()

    def finish(self) -> int:
        """End them; returns the number of complete answers."""
        out, _ = self._process.communicate(timeout=30)
        return int(out)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def client_main(page: str, metrics: str) -> None:
    """Read the page's stream and scrape as often as stdin says; then print the number of complete answers."""
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


# What recording one event costs.


def record_seconds() -> float:
    """The best of several, because disturbances only add time."""
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
        seconds, used = each["seconds"], each["cores_used"]
        turns = ", ".join(f"{name} {1e3 * seconds[name]:.1f} ms, {100 * used[name]:.2f} % of a core" for name in TURNS)
        direct, off = 100 * (each["recorded_over_unrecorded"] - 1), 100 * each["uncertainty"]
        cost, asked = 100 * each["cost"], 100 * each["cost_of_being_asked"]
        pause = TURN_SECONDS + SETTLING_SECONDS
        lines += [
            f"{each['case']}: a step {1e3 * seconds['unrecorded']:.1f} ms",
            f"  recording: {direct:+.2f} % of a step (+- {off:.2f}, {each['pairs']} pairs)",
            f"  turns: {turns} ({each['rounds']} rounds, {each['answers']} whole answers)",
            f"  recording, and what watching takes of a core: {cost:.2f} % {wanted(cost, most=1)}",
            f"  a hundred that ask at once, every {pause:g} s: {asked:.2f} % {wanted(asked, most=1)}",
        ]
    return lines


def main() -> None:
    chosen = options(__doc__)
    rounds, pairs = (1, 20) if chosen.quick else (7, 3000)
    record = record_seconds()
    results = [measure(case, rounds, pairs) for case in CASES]
    show({"record_seconds": record, "cases": results}, lines_of(results, record), chosen.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["clients"]:
        client_main(*sys.argv[2:])
    else:
        main()
