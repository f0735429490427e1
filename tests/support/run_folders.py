"""Folders of runs, written by hand: of today's form, of an older one, and cut off anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monitoring.events.time_parts import PARTS
from monitoring.events.trace import ACTIONS, Span, chrome_trace, to_bytes
from parallel3d.reports.run_reader import read_run

RUN_ID = "20250102-030405-abcd"
STARTED = 1735786800.0
SHARES = dict(zip(PARTS, (0.5, 0.1, 0.02, 0.08, 0.06, 0.04, 0.01, 0.09, 0.0, 0.1), strict=True))
SECONDS = 0.5  # a step, the first two aside
BOTTLENECK = {
    "kind": "too_few_microbatches",
    "severity": "high",
    "message": "The pipeline idles for 20 % of its time with 2 microbatches.",
    "evidence": {"bubble": 0.2, "microbatches": 2},
    "remedy": "Cut the batch into more microbatches.",
    "key": "pipeline.microbatches",
    "value": "8",
    "gain": 0.125,
    "rank": None,
    "host": None,
    "axis": "pp",
}
CONFIG = """model: {factory: gpt}
parallel: {dp: 2, tp: 1, pp: 2}
pipeline: {schedule: 1f1b, microbatches: 2}
memory: {budget: 1073741824}
train: {steps: 9, batch_size: 4}
"""


def shown(folder: Path) -> dict[str, Any]:
    """What the page of such a run would show."""
    return read_run(folder).snapshot().to_json()


def parts_of(seconds: float) -> dict[str, float]:
    return {part: share * seconds for part, share in SHARES.items()}


def step_line(step: int) -> dict[str, Any]:
    seconds = 2.0 if step < 2 else SECONDS
    line = {"step": step, "loss": 5.0 - step / 2, "grad_norm": 2.0, "learning_rate": 3e-4, "tokens": 100}
    return {"time": STARTED + 1 + step, "kind": "step", **line, "seconds": seconds}


def bottleneck_line(state: str, found: dict[str, Any]) -> dict[str, Any]:
    return {"time": STARTED + 5, "kind": "bottleneck", "state": state, "bottleneck": found}


def events(num_steps: int = 5, *, ended: bool = True) -> list[dict[str, Any]]:
    """The lines of a run of two stages in two replicas."""
    lines: list[dict[str, Any]] = [{"time": STARTED, "kind": "started", "run_id": RUN_ID, "world_size": 4, "pid": 1}]
    for step in range(num_steps):
        seconds = step_line(step)["seconds"]
        parts = {"step": step, "seconds": seconds, "parts": parts_of(seconds), "stragglers": []}
        lines += [step_line(step), {"time": STARTED + 1 + step, "kind": "parts", **parts}]
    gone = BOTTLENECK | {"kind": "data_starved"}
    lines += [bottleneck_line(*each) for each in (("found", gone), ("found", BOTTLENECK), ("gone", gone))]
    said = {"level": "warning", "event": "disk is slow", "rank": 1, "coords": "dp=0 tp=0 pp=1", "step": 3}
    lines.append({"time": STARTED + 6, "kind": "log", **said})
    return lines + (
        [{"time": STARTED + 9, "kind": "ended", "status": "completed", "steps": num_steps}] if ended else []
    )


def rank_row(rank: int, counted: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "coords": {"dp": rank // 2, "tp": 0, "pp": rank % 2},
        "host": "node-7",
        "device": "cpu",
        "parameters": 1000 + rank,
        "memory_bytes": (rank + 1) << 20,
        "memory_kinds": {"process": (rank + 1) << 20, "weights": 1 << 20, "optimizer": 0},
        "bubble": 0.1 + 0.1 * (rank % 2),
        "straggler_score": 1.0 if rank else 0.625,
        "seconds": parts_of(0.99 * SECONDS * counted),
        "remainder_seconds": 0.01 * SECONDS * counted,
        "compute_cpu_seconds": 0.4,
        "core_wait_seconds": 0.05,
    }


def metrics(num_steps: int = 5) -> dict[str, Any]:
    steps = [step_line(step) for step in range(num_steps)]
    return {
        "run_id": RUN_ID,
        "status": "completed",
        "error": None,
        "world_size": 4,
        "mesh": {"dp": 2, "tp": 1, "pp": 2},
        "parameters": 2003,
        "steps": num_steps,
        "tokens_per_sec": 200.0,
        "mfu": None,
        "final_loss": steps[-1]["loss"],
        "losses": [step["loss"] for step in steps],
        "step_seconds": [step["seconds"] for step in steps],
        "ddp_metrics": {"allreduce_bandwidth_gbps": [1.0, 3.0]},
        "ranks": [rank_row(rank, num_steps - 2) for rank in range(4)],
        "bottlenecks": [dict(BOTTLENECK)],  # a test may change it
    }


def pipeline_spans() -> dict[int, list[Span]]:
    """The last step of the first replica: two stages, two microbatches, a tenth of a second each action."""
    columns = {0: "0F0 0F1 . . 0B0 0B1", 1: ". 1F0 1B0 1F1 1B1"}
    found = {}
    for rank, column in columns.items():
        found[rank] = [
            Span(ACTIONS, name, name[1], place / 10, (place + 1) / 10, {"step": 4})
            for place, name in enumerate(column.split())
            if name != "."
        ]
    return found


def write_run(folder: Path, *, num_steps: int = 5, **changes: Any) -> Path:
    """A whole one. `changes` are of metrics.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "endpoints.json").write_text(json.dumps({"run_id": RUN_ID, "pid": 2**22 + 1}))
    write_events(folder, events(num_steps))
    (folder / "metrics.json").write_text(json.dumps(metrics(num_steps) | changes))
    names = {rank: f"rank {rank} (dp=0 tp=0 pp={rank})" for rank in (0, 1)}
    (folder / "trace.json.gz").write_bytes(to_bytes(chrome_trace(pipeline_spans(), names)))
    return folder


def write_events(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def kill(folder: Path) -> Path:
    """As a run that was killed in its last write leaves it."""
    for name in ("metrics.json", "trace.json.gz"):
        (folder / name).unlink()
    write_events(folder, events(ended=False))
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time": 1735786812.5, "kind": "ste')
    return folder
