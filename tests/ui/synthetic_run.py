"""A run that never was, as a page is told of it: every figure is worked out, so that tests know what must be shown."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from itertools import product
from typing import Any

from monitoring.events.time_parts import PARTS
from monitoring.http.page import Feed
from monitoring.http.page.feed import Pace
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.simulation import Costs, simulate
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.reports.snapshot import pipeline_view

_SHARES = {
    "compute": 0.585,
    "tp_comm": 0.071,
    "pp_comm": 0.018,
    "dp_comm": 0.046,
    "bubble": 0.148,
    "straggler": 0.031,
    "data": 0.012,
    "optimizer": 0.052,
    "checkpoint": 0.0,
    "other": 0.037,
}
_TOKENS = 16_384


class SyntheticRun:
    """A source of a page. `advance` makes steps; all else follows from their number."""

    def __init__(
        self,
        dp: int = 2,
        tp: int = 2,
        pp: int = 4,
        steps: int = 600,
        schedule: str = "1f1b",
        slow_rank: int | None = 5,
        pace: Pace | None = None,
        seed: int = 7,
    ) -> None:
        self.mesh = {"dp": dp, "tp": tp, "pp": pp}
        self.wanted, self.schedule, self.slow_rank = steps, schedule, slow_rank
        self.status, self.error = "running", None
        self.model, self.run_id = "gpt", "20250610-142233-kfzq"
        self.steps: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self.bottlenecks: list[dict[str, Any]] = []
        self._random = random.Random(seed)
        self._feed = Feed(self.state, pace=pace)
        self._pipeline: dict[str, Any] | None = None

    # As pages know it.

    @property
    def feed(self) -> Feed:
        return self._feed

    @property
    def is_live(self) -> bool:
        return self.status == "running"

    def snapshot(self) -> dict[str, Any]:
        return {**self.state(), "steps": list(self.steps), "log": list(self.log)}

    def state(self) -> dict[str, Any]:
        return {
            "run": {
                "run_id": self.run_id,
                "status": self.status,
                "started": 1_749_565_353.0,
                "world_size": math.prod(self.mesh.values()),
                "mesh": self.mesh,
                "model": self.model,
                "parameters": 12_713_984,
                "schedule": self.schedule,
                "microbatches": 8,
                "steps": self.wanted,
                "error": self.error,
            },
            "totals": self.totals(),
            "ranks": self.ranks(),
            "bottlenecks": self.bottlenecks,
            "pipeline": self._pipeline,
        }

    def totals(self) -> dict[str, Any]:
        counted = self.steps[2:] or self.steps
        seconds = sum(step["seconds"] for step in counted)
        return {
            "steps": len(self.steps),
            "tokens": _TOKENS * len(self.steps),
            "tokens_per_second": _TOKENS * len(counted) / seconds if seconds else 0.0,
            "step_seconds": seconds / len(counted) if counted else None,
            "mfu": None,
            "final_loss": self.steps[-1]["loss"] if self.steps else None,
        }

    def ranks(self) -> list[dict[str, Any]]:
        places = product(*(range(self.mesh[axis]) for axis in ("dp", "tp", "pp")))
        return [self._rank(rank, *place) for rank, place in enumerate(places)]

    def _rank(self, rank: int, dp: int, tp: int, pp: int) -> dict[str, Any]:
        seconds = sum(step["seconds"] for step in self.steps[2:])
        parts = {part: share * seconds for part, share in _SHARES.items()}
        moved = 0.03 * seconds * (pp - 1.5)
        parts["compute"] += moved
        parts["bubble"] -= moved
        is_slow = rank == self.slow_rank
        return {
            "rank": rank,
            "coords": {"dp": dp, "tp": tp, "pp": pp},
            "host": f"node-{dp}",
            "device": "cpu",
            "parameters": 3_178_496,
            "memory_bytes": 412_876_800 + 21_000_000 * (self.mesh["pp"] - pp),
            "memory_kinds": {"weights": 12_713_984, "gradients": 12_713_984, "optimizer": 25_427_968},
            "bubble": parts["bubble"] / seconds if seconds else 0.0,
            "straggler_score": None if len(self.steps) < 3 else 0.52 if is_slow else 1.0 - 0.013 * (rank * 7 % 9),
            "seconds": parts,
            "remainder_seconds": 0.004 * seconds,
            "compute_cpu_seconds": 0.97 * parts["compute"],
            "core_wait_seconds": 0.021 * seconds,
        }

    # What happens.

    def advance(self, count: int = 1) -> None:
        """So many steps more."""
        for _ in range(count):
            self.steps.append(self._step(len(self.steps)))
            self._feed.put("step", self.steps[-1])
        if self.mesh["pp"] > 1:
            self._pipeline = self._measure()
        self._feed.changed()

    def _step(self, number: int) -> dict[str, Any]:
        noise = self._random.gauss
        seconds = (0.92 if number < 2 else 0.0842) * math.exp(noise(0.0, 0.03)) * (1.25 if number % 67 == 40 else 1.0)
        weights = {part: share * math.exp(noise(0.0, 0.12)) for part, share in _SHARES.items()}
        if number % 67 == 40:
            weights["data"] += 0.22
        if number % 200 == 199:
            weights["checkpoint"] = 0.3
        total = sum(weights.values())
        return {
            "step": number,
            "loss": 1.62 + 3.95 * math.exp(-number / 95) + noise(0.0, 0.035),
            "grad_norm": 0.8 + 2.5 * math.exp(-number / 60) + abs(noise(0.0, 0.05)),
            "learning_rate": 3e-4 * min(1.0, (number + 1) / 40),
            "tokens": _TOKENS,
            "seconds": seconds,
            "parts": {part: seconds * weights[part] / total for part in PARTS},
        }

    def _measure(self) -> dict[str, Any] | None:
        pp = self.mesh["pp"]
        table = build(self.schedule, pp, 8).with_communication()
        base = simulate(table, Costs.uniform(table.stages, 0.0021, 0.0022, 0.0020, 0.0001))
        times = []
        for rank, (starts, ends) in enumerate(zip(base.starts, base.ends, strict=True)):
            moments = [(1.03 * start + 0.0004 * rank, end - start) for start, end in zip(starts, ends, strict=True)]
            times.append([(start, start + 0.97 * length, 0.0, 0.0) for start, length in moments])
        return pipeline_view(len(self.steps) - 1, self.schedule, Measured.of(table, times))

    def say(self, event: str, level: str = "info", **fields: Any) -> None:
        """A line of the log."""
        line = {"time": 1_749_565_353.0 + 0.084 * len(self.steps), "level": level, "event": event, **fields}
        self.log.append(line)
        self._feed.put("log", line)

    def find(self, bottlenecks: list[dict[str, Any]]) -> None:
        self.bottlenecks = bottlenecks
        self._feed.changed()

    def end(self, status: str = "completed", error: Mapping[str, Any] | None = None) -> None:
        self.status, self.error = status, dict(error) if error else None
        self._feed.close()


def some_bottlenecks() -> list[dict[str, Any]]:
    """One of each severity but the lowest."""
    return [
        {
            "kind": "straggler",
            "severity": "critical",
            "message": "rank 5 (dp=0 tp=1 pp=1) computes at 52 % of the speed of its peers since step 41.",
            "evidence": {"score": 0.52, "since_step": 41, "compared_with": "peers", "waiting_share": 0.031},
            "remedy": "Look at what else runs on node-0, or leave the host out.",
            "key": "runtime.hosts",
            "value": None,
            "gain": None,
            "rank": 5,
            "host": None,
            "axis": None,
        },
        {
            "kind": "too_few_microbatches",
            "severity": "high",
            "message": "8 microbatches for 4 stages leave 14.8 % of the step idle.",
            "evidence": {"bubble_share": 0.148, "microbatches": 8, "stages": 4},
            "remedy": "Cut the batch into more microbatches.",
            "key": "pipeline.microbatches",
            "value": "16",
            "gain": 0.118,
            "rank": None,
            "host": None,
            "axis": "pp",
        },
        {
            "kind": "small_buckets",
            "severity": "medium",
            "message": "42 gradient buckets of 0.3 MiB: each call costs more than its bytes.",
            "evidence": {"num_buckets": 42, "mean_bytes": 317_849, "dp_share": 0.046},
            "remedy": "Use larger buckets.",
            "key": "comm.bucket_size",
            "value": "25MiB",
            "gain": 0.021,
            "rank": None,
            "host": None,
            "axis": "dp",
        },
    ]


async def serve_by_itself(run: SyntheticRun, port: int = 0) -> None:
    """For whoever works on the page: `python -m tests.ui.synthetic_run`."""
    from aiohttp import web

    from monitoring.http.page import page_routes

    app = web.Application()
    app.add_routes(page_routes(run))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(runner.addresses[0], flush=True)
    while True:
        await asyncio.sleep(0.2)
        run.advance(2)
        run.say("step made", rank=0, step=len(run.steps) - 1)


if __name__ == "__main__":
    busy = SyntheticRun()
    busy.advance(180)
    busy.find(some_bottlenecks())
    asyncio.run(serve_by_itself(busy))
