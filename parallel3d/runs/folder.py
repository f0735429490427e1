"""The folder of a run: created before ranks start, appended to while they run, completed when they have ended."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from monitoring.checks import or_null
from monitoring.events.trace import Span, chrome_trace, to_bytes
from parallel3d.config.errors import ConfigProblems, Place, Problem, show
from parallel3d.config.sections import RunConfig
from parallel3d.formatting import json_lines
from parallel3d.reports.html import to_page
from parallel3d.reports.run_reader import read_run
from parallel3d.runs.record import RunRecord
from runtime.threads import DaemonThreads

RUNS = "runs"
_MOST_WAITING = 20_000
"""Lines that a slow disk has not taken yet. With more, log lines are dropped, because ranks may write any number."""
_GATHER_SECONDS = 0.2  # lines are written together: each wake-up of the thread costs a rank time
_LETTERS = "abcdefghijkmnpqrstuvwxyz"  # without those that look like digits
_random = random.SystemRandom()  # a seed that the user's program has set must not give the same id twice


def new_run_id() -> str:
    """The UTC time, so that folders sort, and four letters, so that runs of the same second differ."""
    letters = "".join(_random.choices(_LETTERS, k=4))
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{letters}"


def check_run_dir(config: RunConfig, place: str) -> None:
    """Raises ConfigError for a folder that is not empty or can't be read. place: where the user named it."""
    if config.runtime.run_dir is None:
        return
    path = Path(config.runtime.run_dir)
    try:
        found = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    except OSError as error:
        _refuse(config, place, f"it can't be a run's folder: {error.strerror}.", "Give another one.")
    if found:
        remedy = "Give a new or empty folder, or leave it out for runs/<run_id>."
        _refuse(config, place, f"not empty, and a run does not write over another (there is {found[0]}).", remedy)


def _refuse(config: RunConfig, place: str, message: str, remedy: str) -> NoReturn:
    problem = Problem(Place(place), "runtime.run_dir", show(config.runtime.run_dir), message, remedy)
    raise ConfigProblems([problem]) from None


class RunFolder:
    """Writes the files in a thread of its own, in order, so that no event loop waits for a disk."""

    def __init__(self, path: Path, run_id: str) -> None:
        self.path, self.run_id = path, run_id
        self._thread = DaemonThreads("parallel3d-run-folder", limit=1)
        self._error: OSError | None = None
        self._events: int | None = None
        self._lines: list[bytes] = []
        """Lines of `events.jsonl` that are not written yet."""
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self.num_left_out = 0
        """Dropped log lines."""

    @staticmethod
    def create(
        config: RunConfig,
        run_id: str,
        place: str = "runtime.run_dir",
        endpoints: Mapping[str, Any] | None = None,
    ) -> RunFolder:
        """Create the folder with its configuration and endpoints. Raises ConfigError if it can't be written."""
        path = Path(config.runtime.run_dir or Path(RUNS, run_id))
        folder = RunFolder(path, run_id)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder._write("config.yaml", _elsewhere(config).to_yaml())
            folder.write_endpoints(endpoints or {"run_id": run_id, "pid": os.getpid()})
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            folder._events = os.open(path / "events.jsonl", flags, 0o666)
        except OSError as error:
            _refuse(config, place, f"{path} can't be written: {error.strerror}.", "Give another folder.")
        return folder

    @property
    def config(self) -> Path:
        """The configuration as resolved."""
        return self.path / "config.yaml"

    def write_endpoints(self, endpoints: Mapping[str, Any]) -> None:
        """Write `endpoints.json`, readable only by this user because of the token."""
        self._write("endpoints.json", as_json(endpoints), mode=0o600)

    def _write(self, name: str, content: str | bytes, mode: int = 0o666) -> None:
        """Atomically: readers never find half a file."""
        temporary = self.path / f".{name}.new"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(self.path / name)

    # While ranks run.

    def event(self, kind: str, /, **fields: object) -> None:
        """Queue a line of `events.jsonl`; never waits. May be called in any thread."""
        line = _as_line({"time": round(time.time(), 6), "kind": kind} | fields | {"kind": kind})
        with self._lock:
            is_first = not self._lines
            self._lines.append(line.encode())
        if is_first:
            self._thread.submit(self._append)

    def note(self, kind: str, payload: Any) -> None:
        """Write what the observer reports: `parts` of a step, log lines, and changes of stragglers and bottlenecks. May
        be called in any thread."""
        match kind:
            case "log" if len(self._lines) >= _MOST_WAITING:
                self.num_left_out += 1
            case "parts" | "log":
                self.event(kind, **payload)
            case "stragglers":
                for each in payload:
                    self.event("straggler", **each)
            case "bottlenecks":
                for each in payload:
                    what = {name: value for name, value in each.items() if name != "state"}
                    self.event("bottleneck", state=each["state"], bottleneck=what)

    def _append(self) -> None:
        self._is_ending.wait(_GATHER_SECONDS)
        with self._lock:
            lines, self._lines = self._lines, []
        try:
            if self._events is not None:
                _write_all(self._events, b"".join(lines))
        except OSError as error:  # a full disk does not end the ranks; `complete` raises it
            self._error = self._error or error

    # When they have ended.

    async def complete(self, record: RunRecord, spans: Mapping[int, list[Span]] | None = None) -> None:
        """Write metrics, trace and report. spans: each rank's; None: ranks left them in this folder."""
        self._is_ending.set()
        ending = self._thread.submit(self._complete, record, spans)
        self._thread.stop()
        await asyncio.shield(asyncio.wrap_future(ending))
        if self._error is not None:
            raise self._error

    def _complete(self, record: RunRecord, spans: Mapping[int, list[Span]] | None) -> None:
        self._append()  # a line may have come too late for its own call
        if self._events is not None:
            os.close(self._events)
            self._events = None
        if spans is None:
            spans = take_span_files(self.path, record.config.world_size)
        names = {rank: record.name(rank) for rank in spans}
        self._write("metrics.json", as_json(self.metrics(record)))
        self._write("trace.json.gz", to_bytes(chrome_trace(spans, names)))
        self._write("report.html", to_page(read_run(self.path)))

    def metrics(self, record: RunRecord) -> dict[str, Any]:
        """The content of `metrics.json`."""
        return {"run_id": self.run_id, "run_dir": str(self.path), **record.metrics()}


def _write_all(file: int, data: bytes) -> None:
    """os.write may take only a part when the disk is nearly full."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


_encode = json.JSONEncoder(default=repr, allow_nan=False).encode


def _as_line(fields: dict[str, object]) -> str:
    try:
        return _encode(fields) + "\n"
    except ValueError:  # JSON has no NaN, but a user's log record may
        return _encode(_without_nan(fields)) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return or_null(value) if isinstance(value, float) else value


def _elsewhere(config: RunConfig) -> RunConfig:
    """The configuration without `run_dir`, so that it can be run again: this folder is not empty any more."""
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"run_dir": None})})


def write_span_file(folder: Path, rank: int, spans: Iterable[Span]) -> None:
    """Leave a rank's last steps for the supervisor. A trace is not worth an error."""
    with suppress(OSError):
        text = json.dumps([span.to_wire() for span in spans], default=repr)
        temporary = folder / f".spans-{rank}.new"
        temporary.write_text(text)
        temporary.replace(_span_file(folder, rank))


def take_span_files(folder: Path, num_ranks: int) -> dict[int, list[Span]]:
    """Read and remove what ranks have left; a killed rank has left nothing, or half a file."""
    found = {}
    for rank in range(num_ranks):
        with suppress(OSError, ValueError):
            found[rank] = [Span.from_wire(row) for row in json.loads(_span_file(folder, rank).read_bytes())]
        for path in (_span_file(folder, rank), folder / f".spans-{rank}.new"):
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return found


def _span_file(folder: Path, rank: int) -> Path:
    return folder / f".spans-{rank}.json"


def as_json(document: Mapping[str, Any]) -> str:
    """The text of a JSON file of the folder."""
    return json_lines(document) + "\n"
