"""Reads a run's folder, also that of a run that was killed and left half of it."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monitoring.analysis.facts import Status
from monitoring.analysis.totals import WARM_UP
from monitoring.events.time_parts import PARTS
from parallel3d.config.yaml_positions import LARGEST_FILE, parse_yaml
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.reports.report import Report, make_report
from parallel3d.reports.snapshot import Json, RankInfo, RunInfo, RunTotals, Snapshot, pipeline_view, thinned
from parallel3d.reports.untrusted_files import open_regular, read_bounded, unzip_bounded
from runtime.errors import ConfigError, InvalidCall

KILLED = "killed"
"""The status of a run whose process is gone, but did not say so."""
MOST_LOG_LINES = 1000
_MOST_BYTES = 1 << 30  # of a JSON file: ten million steps
_MOST_TRACE_BYTES = 256 << 20  # unzipped: some steps of hundreds of ranks
_LONGEST_LINE = 1 << 20  # no message of a rank is longer than 64 KiB
_LARGEST_NUMBER = 1e300  # so that their sums are numbers too
_RANK_NUMBERS = (
    "parameters",
    "memory_bytes",
    "bubble",
    "straggler_score",
    "remainder_seconds",
    "compute_cpu_seconds",
    "core_wait_seconds",
)
_STEP_KEYS = ("loss", "grad_norm", "learning_rate", "tokens", "seconds")


@dataclass(slots=True)
class FinishedRun:
    """A folder's content. What is missing is empty; what makes no sense is left out."""

    folder: Path
    config_text: str = ""
    config: Json = field(default_factory=dict)
    metrics: Json = field(default_factory=dict)
    """Empty where the run did not come to its end."""
    endpoints: Json = field(default_factory=dict)
    steps: list[Json] = field(default_factory=list)
    """All of them, in order; `parts` is None where they are not known."""
    log: list[Json] = field(default_factory=list)
    found: dict[str, Json] = field(default_factory=dict)
    """Bottlenecks that were found and did not go again, by what they are of."""
    marks: dict[str, Json] = field(default_factory=dict)
    """The latest line of each other kind: started, ended, failed…"""
    first_time: float | None = None

    # What follows from it.

    @property
    def run_id(self) -> str:
        known = (source.get("run_id") for source in (self.metrics, self.endpoints, self.marks.get("started", {})))
        return next((each for each in known if isinstance(each, str)), self.folder.resolve().name)

    @property
    def status(self) -> str:
        for source in (self.metrics, self.marks.get("ended", {})):
            if isinstance(status := source.get("status"), str):
                return status
        return Status.RUNNING if _is_alive(self.endpoints.get("pid"), self.first_time) else KILLED

    @property
    def mesh(self) -> dict[str, int]:
        given = _objects(self.metrics.get("mesh")) or _objects(self.config.get("parallel"))
        return {axis: max(1, size) if type(size := given.get(axis)) is int else 1 for axis in ("dp", "tp", "pp")}

    @property
    def num_warm_up(self) -> int:
        """Steps that don't count for speed; one always counts."""
        return max(0, min(WARM_UP, len(self.steps) - 1))

    @property
    def counted(self) -> list[Json]:
        """Steps that say how fast the run is."""
        return self.steps[self.num_warm_up :]

    @property
    def bottlenecks(self) -> list[Json]:
        told = self.metrics.get("bottlenecks")
        return _rows(told) if isinstance(told, list) else list(self.found.values())

    def setting(self, group: str, key: str) -> Any:
        """Of the configuration as resolved: a number or a text; None where it is not known."""
        value = _objects(self.config.get(group)).get(key)
        return value if isinstance(value, str) else _number(value)

    def ranks(self) -> list[RankInfo]:
        """In order; empty where the run did not come to its end."""
        return [_rank(row) for row in _rows(self.metrics.get("ranks"))]

    def totals(self) -> RunTotals:
        seconds = sum(step["seconds"] or 0.0 for step in self.counted)
        tokens = sum(step["tokens"] or 0 for step in self.counted)
        return RunTotals(
            steps=len(self.steps),
            tokens=sum(step["tokens"] or 0 for step in self.steps),
            tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
            step_seconds=seconds / len(self.counted) if self.counted else None,
            mfu=_number(self.metrics.get("mfu")),
            final_loss=self.steps[-1]["loss"] if self.steps else None,
        )

    def last_step(self) -> tuple[int, Measured] | None:
        """The last step's number and its pipeline, where that has more than one stage."""
        with suppress(InvalidCall):
            return last_measured_step(self.folder) if self.mesh["pp"] > 1 else None
        return None

    def pipeline(self) -> Json | None:
        """The last step's, planned and measured."""
        found = self.last_step()
        return None if found is None else pipeline_view(found[0], self.schedule, found[1])

    @property
    def schedule(self) -> str:
        return str(self.setting("pipeline", "schedule") or "run")

    def info(self) -> RunInfo:
        mesh = self.mesh
        error = self.metrics.get("error") or self.marks.get("failed")
        return RunInfo(
            run_id=self.run_id,
            status=self.status,
            started=self.first_time,
            world_size=math.prod(mesh.values()),
            mesh=mesh,
            model=self.setting("model", "factory"),
            parameters=_number(self.metrics.get("parameters")),
            schedule=self.setting("pipeline", "schedule"),
            microbatches=self.setting("pipeline", "microbatches"),
            steps=self.setting("train", "steps"),
            error=_error(error) if isinstance(error, dict) else None,
        )

    def snapshot(self) -> Snapshot:
        """As the live page would show the run."""
        return Snapshot(
            run=self.info(),
            totals=self.totals(),
            ranks=self.ranks(),
            bottlenecks=self.bottlenecks,
            pipeline=self.pipeline(),
            steps=thinned(self.steps),
            log=self.log,
        )

    def report(self) -> Report:
        """What it comes to."""
        budget = self.setting("memory", "budget")
        bandwidths = _objects(self.metrics.get("ddp_metrics")).get("allreduce_bandwidth_gbps")
        return make_report(
            self.snapshot(),
            [step["seconds"] for step in self.counted if step["seconds"] is not None],
            self.num_warm_up,
            bandwidths if isinstance(bandwidths, list) else (),
            budget if type(budget) is int and budget > 0 else None,
            was_watched="bottlenecks" in self.metrics,
        )


# Files.


def read_run(folder: str | Path) -> FinishedRun:
    """Raises InvalidCall where the folder is no run's."""
    path = Path(folder)
    if not path.is_dir():
        raise InvalidCall(f"{path} is no run's folder: {'it is a file' if path.exists() else 'there is none'}.")
    if not any((path / name).is_file() for name in ("events.jsonl", "metrics.json")):
        raise InvalidCall(f"{path} is no run's folder: it has neither events.jsonl nor metrics.json.")
    run = FinishedRun(path)
    with suppress(OSError, ValueError, ConfigError):
        run.config_text = read_bounded(path / "config.yaml", LARGEST_FILE).decode()
        run.config = _objects(parse_yaml(run.config_text, "config.yaml")[0].plain())
    run.metrics, run.endpoints = _read_json(path / "metrics.json"), _read_json(path / "endpoints.json")
    _read_events(run)
    if not run.steps:
        run.steps = list(_steps_of_metrics(run.metrics))
    return run


def _read_json(path: Path) -> Json:
    with suppress(OSError, ValueError, RecursionError):
        return _objects(json.loads(read_bounded(path, _MOST_BYTES)))
    return {}


def _read_events(run: FinishedRun) -> None:
    parts: dict[int, dict[str, float]] = {}
    steps: dict[int, Json] = {}
    log: deque[Json] = deque(maxlen=MOST_LOG_LINES)
    for line in _lines(run.folder / "events.jsonl"):
        if run.first_time is None:
            run.first_time = _number(line.get("time"))
        match line:
            case {"kind": "step", "step": int(step)}:
                steps[step] = {"step": step, **{key: _number(line.get(key)) for key in _STEP_KEYS}}
            case {"kind": "parts", "step": int(step), "parts": dict(seconds)}:
                parts[step] = _parts(seconds)
            case {"kind": "bottleneck"}:
                _note_bottleneck(run, line)
            case {"kind": "log"}:
                log.append({key: value for key, value in line.items() if key != "kind"})
            case {"kind": str(kind)}:
                run.marks[kind] = line
    run.steps = [{**steps[step], "parts": parts.get(step)} for step in sorted(steps)]
    run.log = list(log)


def _lines(path: Path) -> Iterator[Json]:
    """What is whole: the last line of a run that was killed may not be."""
    with suppress(OSError), open_regular(path) as file:
        while line := file.readline(_LONGEST_LINE):
            with suppress(ValueError, RecursionError):
                yield _objects(json.loads(line))


def _note_bottleneck(run: FinishedRun, line: Json) -> None:
    found = _objects(line.get("bottleneck"))
    which = json.dumps([found.get(key) for key in ("kind", "rank", "host", "axis")])
    run.found.pop(which, None)
    if found and line.get("state") != "gone":
        run.found[which] = found


def _steps_of_metrics(metrics: Json) -> Iterator[Json]:
    """Where the events are lost."""
    names = {"loss": "losses", "grad_norm": "grad_norms", "learning_rate": "learning_rates", "seconds": "step_seconds"}
    columns = {key: values for key, name in names.items() if isinstance(values := metrics.get(name), list)}
    for step in range(max(map(len, columns.values()), default=0)):
        row = {key: _number(values[step]) for key, values in columns.items() if step < len(values)}
        yield {"step": step, **dict.fromkeys(_STEP_KEYS), **row, "parts": None}


# Values: a folder may have been written by an older version, or by somebody's editor.


def _rank(row: Json) -> RankInfo:
    number, seconds = row.get("rank"), row.get("seconds")
    return RankInfo(
        rank=number if type(number) is int else -1,
        coords=_coords(row.get("coords")),
        memory_kinds={key: size for key, size in _objects(row.get("memory_kinds")).items() if type(size) is int},
        seconds=_parts(seconds) if isinstance(seconds, dict) else None,
        host=_text(row.get("host")),
        device=_text(row.get("device")),
        **{key: _number(row.get(key)) for key in _RANK_NUMBERS},
    )


def _coords(value: Any) -> dict[str, int] | None:
    match value:
        case {"dp": int(dp), "tp": int(tp), "pp": int(pp)}:
            return {"dp": dp, "tp": tp, "pp": pp}
        case _:
            return None


def _parts(seconds: Mapping[str, Any]) -> dict[str, float]:
    return {part: _number(seconds.get(part)) or 0.0 for part in PARTS}


def _error(found: Json) -> Json:
    told = found.get("notes")
    notes = [note for note in told if isinstance(note, str)] if isinstance(told, list) else []
    return {**{key: found.get(key) for key in ("message", "rank", "coords", "step", "traceback")}, "notes": notes}


def _number(value: Any) -> Any:
    return value if type(value) in (int, float) and abs(value) < _LARGEST_NUMBER else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _objects(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _rows(value: Any) -> list[Json]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _is_alive(pid: Any, since: float | None) -> bool:
    """Whether the run's own process is still there: one of its number that started later is another."""
    if type(pid) is not int or pid <= 0 or since is None:
        return False
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return False
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK") <= since + 2.0  # btime is rounded


def load_measured_step(path: str | Path) -> Measured:
    """From a file of `Measured.to_json`, or from the folder of a run: then its last step, in the first replica's
    pipeline."""
    if Path(path).is_dir():
        return last_measured_step(path)[1]
    try:
        return Measured.from_json(json.loads(Path(path).read_text()))
    except (OSError, ValueError, KeyError, TypeError, InvalidCall) as error:
        raise InvalidCall(f"{path} holds no measured step: {error}") from error


def last_measured_step(folder: str | Path) -> tuple[int, Measured]:
    """The last step that a run's trace holds, in the first replica's pipeline, and its number."""
    try:
        return Measured.from_trace(json.loads(unzip_bounded(Path(folder, "trace.json.gz"), _MOST_TRACE_BYTES)))
    except (OSError, EOFError, ValueError, KeyError, TypeError, InvalidCall, zlib.error) as error:
        raise InvalidCall(f"{folder} holds no measured step: {error}") from error
