"""What a run of 2 x 2 x 2 ranks serves, made up: the real endpoint's names and labels, with values that are known.

Beside the real runs of tests, for what those can't have here: a device whose peak is known, a slow rank on demand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

from monitoring.events.time_parts import PARTS

PLACES = list(product(range(2), repeat=3))
COMPUTE = 0.55
"""Its share of the time; the other nine parts have equal ones."""
TOKENS = 20480.0
"""A second."""
SLOW_RANK, SLOW_SCORE = 5, 0.5


def page(started: float, now: float) -> str:
    """The text of `/metrics`."""
    return "".join(f"parallel3d_{name} {value!r}\n" for name, value in _samples(started, now - started, now))


def _samples(started: float, age: float, now: float) -> Iterator[tuple[str, float]]:
    yield 'run_info{run_id="r",model="gpt",schedule="1f1b",mesh="2x2x2",precision="float32"}', 1
    yield from (("start_time_seconds", started), ("last_step_timestamp_seconds", now), ("tokens_total", age * TOKENS))
    yield from (('steps_total{outcome="ok"}', age * 10), ('steps_total{outcome="failed"}', 0))
    yield from _histogram("step_duration_seconds", "", age * 10, 0.1)
    yield from (("training_loss", 2.5), ("gradient_norm", 0.9), ("learning_rate", 3e-4))
    yield from (("model_flops_utilization_ratio", 0.4), ("nonfinite_gradients_total", 0))
    yield from (("memory_budget_bytes", 4e9), ("data_queue_capacity_batches", 2))
    yield from ((f'pipeline_bubble_ratio{{pp_rank="{stage}"}}', 0.2) for stage in range(2))
    yield from (('bottleneck_state{kind="straggler",severity="low"}', 0),)
    yield from (('bottleneck_state{kind="tp_comm",severity="high"}', 1),)
    for op, axis, size in (("all_reduce", "dp", 3e6), ("all_reduce", "tp", 2e6), ("send", "pp", 1e6)):
        where = f'op="{op}",axis="{axis}"'
        yield f"collective_bytes_total{{{where}}}", age * size
        yield from _histogram("collective_duration_seconds", where, age * 100, 0.001)
        yield f'collective_bus_bandwidth_bytes_per_second{{{where},strategy="default"}}', 1e9
    yield from _histogram("event_loop_lag_seconds", "", age * 160, 0.001)
    for rank, place in enumerate(PLACES):
        yield from _of_rank(rank, place, age, now)


def _of_rank(rank: int, place: tuple[int, ...], age: float, now: float) -> Iterator[tuple[str, float]]:
    dp, tp, pp = place
    yield f'rank_info{{rank="{rank}",dp="{dp}",tp="{tp}",pp="{pp}",host="h{dp}",device="cpu"}}', 1
    for part in PARTS:
        share = COMPUTE if part == "compute" else (1 - COMPUTE) / (len(PARTS) - 1)
        yield f'phase_seconds_total{{rank="{rank}",phase="{part}"}}', age * share
    for name in ("unattributed_seconds_total", "core_wait_seconds_total", "compute_cpu_seconds_total"):
        yield f'{name}{{rank="{rank}"}}', age * 0.01
    for kind, size in (("process", 1e9), ("weights", 2e8), ("gradients", 1e8)):
        yield f'memory_bytes{{rank="{rank}",kind="{kind}"}}', size
    yield f'straggler_score_ratio{{rank="{rank}"}}', SLOW_SCORE if rank == SLOW_RANK else 1.0
    yield f'event_loop_lag_worst_seconds{{rank="{rank}"}}', 0.01
    yield f'data_queue_batches{{rank="{rank}"}}', 1.5
    yield f'events_dropped_total{{rank="{rank}"}}', 0
    yield f'rank_last_report_timestamp_seconds{{rank="{rank}"}}', now


def _histogram(name: str, where: str, count: float, each: float) -> Iterator[tuple[str, float]]:
    """All in one bucket, whose upper bound is `each`."""
    for bound in (f"{each / 2}", f"{each}", "+Inf"):
        yield f'{name}_bucket{{{where}{"," if where else ""}le="{bound}"}}', 0 if bound == f"{each / 2}" else count
    labels = f"{{{where}}}" if where else ""
    yield from ((f"{name}_sum{labels}", count * each), (f"{name}_count{labels}", count))


@contextmanager
def made_up_run() -> Iterator[str]:
    """Its address, on loopback."""
    started = time.time()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = page(started, time.time()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
