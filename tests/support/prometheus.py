"""A real Prometheus in tests: on a free port, in a folder of its own, asked over its HTTP API."""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from tests.support.processes import SECONDS, Stream
from tests.support.tools import missing

Series = dict[str, Any]
"""`metric`: its labels. `value`: moment and value, as text."""


class Prometheus:
    """One server with a configuration file; its data goes with the folder."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert self._process.stderr is not None
        self.log = Stream(self._process.stderr.fileno())
        self._open = build_opener(ProxyHandler({})).open

    def __enter__(self) -> Self:
        self.address = self.log.wait_for(r'msg="Listening on" address=(\S+)')[1]
        self.log.wait_for("Server is ready to receive web requests")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self.log.read_all()
        self._process.wait(SECONDS)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def get(self, path: str, **parameters: str) -> Any:
        with self._open(f"http://{self.address}/api/v1/{path}?{urlencode(parameters)}", timeout=SECONDS) as answer:
            told = json.load(answer)
        assert told["status"] == "success"
        return told["data"]

    def query(self, expr: str) -> list[Series]:
        """The series now; those without a number, such as 0/0, are left out."""
        found = self.get("query", query=expr)["result"]
        return [each for each in found if not math.isnan(float(each["value"][1]))]

    def wait_for_data(self, expr: str, seconds: float = SECONDS) -> list[Series]:
        """As soon as there is some; an empty list when there is none in time."""
        deadline = time.monotonic() + seconds
        while not (found := self.query(expr)) and time.monotonic() < deadline:
            time.sleep(0.1)  # nobody tells us of a scrape
        return found


def values(series: list[Series]) -> list[float]:
    return [float(each["value"][1]) for each in series]


def promtool(*arguments: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = ["promtool", *arguments]
    return subprocess.run(command, input=stdin, cwd=cwd, capture_output=True, text=True, timeout=SECONDS)


def check_metrics(text: str) -> None:
    """Fails where promtool finds fault with metrics. Without promtool it passes: tests of that alone are marked."""
    if missing("promtool"):
        return
    done = promtool("check", "metrics", stdin=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
