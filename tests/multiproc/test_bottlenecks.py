"""Real runs with one cause of lost time in each: exactly that one is named, with its rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from parallel3d.pipeline.schedules.build import SCHEDULES
from tests.support.hosts import Hosts, require_hosts
from tests.support.processes import Started, write_script

pytestmark = pytest.mark.slow

# A model and data of the user's own; what goes wrong is an argument. Layers compute, and do not sleep, unless they are
# the trouble.
OWN = """
import os
import time
import torch
from torch import nn

def work(seconds):
    "Computes so long, without Python's lock."
    until, values = time.thread_time() + seconds, torch.ones(192, 192)
    while time.thread_time() < until:
        torch.mm(values, values)

class Turns(torch.autograd.Function):
    "Rank 0 has more to do forwards, rank 1 backwards: each waits for the other as long as it computes."
    @staticmethod
    def forward(ctx, x):
        if os.environ.get("RANK") == "0":
            work(0.1)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if os.environ.get("RANK") == "1":
            work(0.1)
        return gradient

class Layer(nn.Module):
    def __init__(self, width, trouble):
        super().__init__()
        self.up, self.down, self.trouble = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), trouble
        self.kept = None
    def forward(self, x):
        rank = os.environ.get("RANK")
        if self.trouble == "sleeps" and rank == "1":
            time.sleep(0.1)
        if self.trouble == "keeps" and rank == "1" and self.kept is None:
            self.kept = torch.ones(100 << 20)
        if self.trouble == "keeps a little" and rank == "1" and self.kept is None:
            self.kept = torch.ones(10 << 20)
        if self.trouble == "takes its time":
            time.sleep(0.8)
        if self.trouble == "takes turns":
            x = Turns.apply(x)
        if self.trouble == "holds the lock":
            pow(7, 1_500_000)
        return x + self.down(torch.tanh(self.up(x)))

def build(layers=4, width=192, trouble=""):
    return nn.Sequential(*(Layer(width, trouble if index == layers - 1 else "") for index in range(layers)))

class Heavy(nn.Module):
    "Has half a MiB of gradients, and little to compute."
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 17))
    def forward(self, x):
        return x + self.weight.sum()

def heavy(layers):
    return nn.Sequential(*(Heavy() for _ in range(layers)))

class Frozen(nn.Module):
    "Has 32 MiB to save, and hardly anything to compute."
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1 << 23), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(192))
    def forward(self, x):
        return x * self.scale + self.weight[0]

def frozen():
    return nn.Sequential(Frozen(), Frozen())

class Widen(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, width), 1 / width))
    def forward(self, x):
        return x * self.weight

class Narrow(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width, 1), 1 / width))
    def forward(self, x):
        return x @ self.weight

def wide(width):
    "The first stage has much to tell the second one, and both have little to compute."
    return nn.Sequential(Widen(width), Narrow(width))

class Data:
    def __init__(self, seconds=0.0, length=128, width=192):
        self.x, self.seconds = torch.randn(64, length, width), seconds
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.x[index], self.x[index]

def slow_data():
    return Data(seconds=0.05)

def short_data():
    return Data(length=1)

def narrow_data():
    return Data(length=64, width=1)
"""
# The command `parallel3d`, with ranks of the test's own.
OTHER_RANKS = """
import parallel3d.runs.supervised
from parallel3d.cli.main import main
from runtime.launch.script import Target

parallel3d.runs.supervised._RANK = Target("rank.py")
main()
"""
# Saves all weights between steps.
SAVING_RANK = """
import os
import time
import torch
from monitoring.events.events import What
from parallel3d.training.coordinator import Coordinator
from parallel3d.runs.rank_loop import main

class Saving(Coordinator):
    async def train_step(self, batch):
        start = time.monotonic()
        weights = await self.whole_weights()
        if weights is not None:
            await self.mesh.compute(save, weights)
        self.recorder.record(What.CHECKPOINT, self.step, start, time.monotonic())
        return await super().train_step(batch)

def save(weights):
    with open("weights.pt", "wb") as file:
        torch.save(weights, file)
        file.flush()
        os.fsync(file.fileno())

main(Saving.from_config)
"""
# Rank 1 does something else between steps.
DAWDLING_RANK = """
import asyncio
from parallel3d.training.coordinator import Coordinator
from parallel3d.runs.rank_loop import main

class Dawdling(Coordinator):
    async def train_step(self, batch):
        if self.mesh.rank == 1:
            await asyncio.sleep(0.2)
        return await super().train_step(batch)

main(Dawdling.from_config)
"""
# Rank 1's event loop is blocked again and again while its engine computes.
BLOCKING_RANK = """
import asyncio
import time
from parallel3d.training.coordinator import Coordinator
from parallel3d.runs.rank_loop import main

class Blocking(Coordinator):
    async def train_step(self, batch):
        blocking = asyncio.create_task(self.block()) if self.mesh.rank == 1 else None
        step = await super().train_step(batch)
        if blocking is not None:
            blocking.cancel()
        return step

    async def block(self):
        while True:
            if self.mesh.is_computing:
                time.sleep(0.2)
            await asyncio.sleep(0.001)

main(Blocking.from_config)
"""
YAML = """
model: {factory: "own:build", loss: mse}
data: {factory: "own:Data"}
comm: {timeout: 20}
runtime: {threads: 1}
optimizer: {name: sgd, lr: 1.0e-4}
train: {steps: 14, batch_size: 16}
"""
GPT = """
model: {factory: gpt, args: {layers: 4, width: 64, heads: 2, vocabulary: 256, sequence: 64}}
comm: {timeout: 20}
runtime: {threads: 1}
train: {steps: 10, batch_size: 4}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(YAML)
    write_script(tmp_path, OWN, "own.py")
    return tmp_path


@pytest.fixture
def slow_network() -> Iterator[dict[str, Any]]:
    """How to start a run whose ranks, over gloo, send each other 12 MB a second: far less than any machine computes
    meanwhile, however busy it is."""
    require_hosts()
    with Hosts(1) as hosts:
        hosts.limit("100mbit", "lo")
        yield {"inside": hosts.inside(0), "GLOO_SOCKET_IFNAME": "lo"}


def words_of(settings: Sequence[str]) -> list[str]:
    return ["run", "run.yaml", *(word for each in settings for word in ("--set", each)), "--run-dir", "out"]


def named(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "out" / "metrics.json").read_text())["bottlenecks"]


def bottlenecks(
    folder: Path,
    *settings: str,
    cores: set[int] | None = None,
    program: Sequence[str] = ("-m", "parallel3d"),
    **how: Any,
) -> list[dict[str, Any]]:
    """What a run with these keys names at its end."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        started = Started(*program, *words_of(settings), cwd=folder, **how)
    finally:
        os.sched_setaffinity(0, before)
    with started:
        assert started.finish(60) == 0, started.stderr.text
    return named(folder)


def only(folder: Path, *settings: str, **how: Any) -> dict[str, Any]:
    """The one that is named."""
    return the_one(bottlenecks(folder, *settings, **how))


def the_one(every: list[dict[str, Any]]) -> dict[str, Any]:
    assert len(every) == 1, [each["message"] for each in every]
    assert every[0]["gain"] is None or 0 <= every[0]["gain"] < 1
    return every[0]


def other_ranks(folder: Path, rank: str) -> list[str]:
    """The program whose ranks are this script."""
    write_script(folder, rank, "rank.py")
    return [write_script(folder, OTHER_RANKS, "program.py")]


def only_between(hosts: Hosts, folder: Path, *settings: str) -> dict[str, Any]:
    """The one that is named by a run of two ranks on each host."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Started(
                    "-m", "parallel3d", *words_of(settings), cwd=folder, inside=hosts.inside(rank // 2), **variables
                )
            )
            for rank, variables in enumerate(hosts.variables([2, 2]))
        ]
        for rank in ranks:
            assert rank.finish(60) == 0, rank.stderr.text
    return the_one(named(folder))


@pytest.mark.exhaustive
def test_data_that_comes_late(folder):
    # One ahead: what is loaded while a busy machine starts its ranks shall not look as if batches came in bursts.
    one = only(folder, "parallel.dp=2", "data.factory=own:slow_data", "data.prefetch=1")
    assert (one["kind"], one["rank"], one["key"]) == ("data_starved", None, "data.factory")
    assert one["gain"] > 0.5


@pytest.mark.parametrize(
    "mesh",
    [
        ["parallel.dp=2"],
        pytest.param(["parallel.pp=2", "pipeline.microbatches=4"], marks=pytest.mark.exhaustive),
    ],
    ids=["dp", "pp"],
)
def test_a_rank_that_sleeps_in_its_forward(folder, mesh):
    one = only(folder, *mesh, "model.args.trouble=sleeps", "data.factory=own:short_data")
    assert (one["kind"], one["rank"]) == ("straggler", 1)
    assert one["gain"] > 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_rank_that_comes_late_to_its_steps(folder, axis):
    settings = [f"parallel.{axis}=2"]
    if axis == "tp":
        (folder / "run.yaml").write_text(GPT)
        settings += ["train.batch_size=8", "train.steps=14"]
    one = only(folder, *settings, program=other_ranks(folder, DAWDLING_RANK))
    assert (one["kind"], one["rank"], one["evidence"]["compared_with"]) == ("straggler", 1, "arrival")
    assert one["gain"] > 0.5


@pytest.mark.exhaustive
def test_stages_that_differ(folder):
    one = only(
        folder, "parallel.pp=2", "model.args.layers=8", "pipeline.layers_per_stage=[1, 7]", "pipeline.microbatches=8"
    )
    assert (one["kind"], one["rank"], one["key"], one["value"]) == (
        "uneven_stages",
        1,
        "pipeline.layers_per_stage",
        "[4, 4]",
    )
    assert one["gain"] > 0.2


@pytest.mark.exhaustive
def test_one_microbatch(folder):
    one = only(folder, "parallel.pp=2", "pipeline.microbatches=1")
    assert (one["kind"], one["key"], one["value"]) == ("too_few_microbatches", "pipeline.microbatches", "8")
    assert one["gain"] > 0.2


@pytest.mark.exhaustive
def test_tiny_buckets(folder):
    one = only(folder, "parallel.dp=2", "comm.bucket_size=1 KiB", "model.args.layers=64", "data.factory=own:short_data")
    assert (one["kind"], one["axis"], one["key"]) == ("small_buckets", "dp", "comm.bucket_size")


@pytest.mark.exhaustive
def test_a_small_budget(folder):
    one = only(folder, "parallel.dp=2", "memory.budget=64 MiB", "model.args.trouble=keeps a little")
    assert (one["kind"], one["rank"], one["key"]) == ("memory_pressure", 1, "pipeline.microbatches")


@pytest.mark.exhaustive
def test_a_rank_that_keeps_much(folder):
    one = only(folder, "parallel.dp=2", "memory.budget=1 GiB", "model.args.trouble=keeps")
    assert (one["kind"], one["rank"]) == ("memory_imbalance", 1)


@pytest.mark.exhaustive
def test_an_event_loop_that_is_held_up(folder):
    one = only(folder, "parallel.dp=2", "model.args.trouble=holds the lock")
    assert one["kind"] == "event_loop_lag"


@pytest.mark.exhaustive
def test_one_ranks_event_loop_that_is_held_up(folder):
    settings = ("parallel.dp=2", "model.args.trouble=takes its time", "train.steps=8")
    one = only(folder, *settings, program=other_ranks(folder, BLOCKING_RANK))
    assert (one["kind"], one["rank"]) == ("event_loop_lag", 1)


@pytest.mark.exhaustive
def test_two_ranks_on_one_core(folder):
    one = only(folder, "parallel.dp=2", cores={min(os.sched_getaffinity(0))})
    assert (one["kind"], one["key"], one["value"]) == ("oversubscribed_cores", "parallel.dp", "1")


@pytest.mark.exhaustive
def test_exchanges_that_take_longer_than_computing(folder, slow_network):
    (folder / "run.yaml").write_text(GPT)
    one = only(folder, "parallel.tp=2", "comm.backend=gloo", **slow_network)
    assert (one["kind"], one["axis"], one["key"], one["value"]) == ("tp_comm", "tp", "parallel.tp", "1")


@pytest.mark.exhaustive
def test_tensor_parallel_ranks_that_wait_for_each_other(folder):
    """As long as each computes, and none is slower than the other."""
    plan = 'parallel: {tp: 2, tensor_plan: {"*.up": column, "*.down": row}}'
    (folder / "run.yaml").write_text(f"{YAML}{plan}\n")
    one = only(folder, "model.args.trouble=takes turns", "data.factory=own:short_data")
    assert (one["kind"], one["axis"], one["key"], one["value"]) == ("tp_efficiency", "tp", "parallel.tp", "1")
    assert one["evidence"]["efficiency"] < 0.7


WIDE = ("model.factory=own:wide", "data.factory=own:narrow_data")
HEAVY = ("model.factory=own:heavy", "data.factory=own:short_data")


@pytest.mark.exhaustive
def test_messages_between_stages_that_take_longer_than_computing(folder, slow_network):
    settings = ("comm.backend=gloo", "pipeline.microbatches=8", *WIDE, "model.args.width=512")
    one = only(folder, "parallel.pp=2", *settings, **slow_network)
    assert (one["kind"], one["axis"], one["key"], one["value"]) == ("pp_comm", "pp", "parallel.pp", "1")
    assert one["gain"] > 0.4


def test_gradients_that_take_longer_than_computing(folder, slow_network):
    settings = ("comm.backend=gloo", "train.batch_size=2", *HEAVY, "model.args.layers=2")
    one = only(folder, "parallel.dp=2", *settings, **slow_network)
    assert (one["kind"], one["axis"], one["key"], one["value"]) == ("dp_comm", "dp", "train.batch_size", "4")
    assert one["gain"] > 0.3


@pytest.mark.exhaustive
def test_stages_that_are_on_different_hosts(folder, two_hosts):
    two_hosts.limit("100mbit")
    mesh = ("parallel.dp=2", "parallel.pp=2", "parallel.order=pp-dp-tp", "pipeline.microbatches=8")
    one = only_between(two_hosts, folder, *mesh, *WIDE, "model.args.width=512")
    assert (one["kind"], one["axis"], one["key"], one["value"]) == ("pp_comm", "pp", "parallel.order", "dp-tp-pp")


@pytest.mark.exhaustive
def test_gradients_of_many_replicas_between_hosts(folder, two_hosts):
    two_hosts.limit("100mbit")
    one = only_between(two_hosts, folder, "parallel.dp=4", "train.batch_size=4", *HEAVY, "model.args.layers=2")
    assert (one["kind"], one["axis"], one["key"], one["value"]) == ("dp_comm", "dp", "comm.strategy", "hierarchical")


@pytest.mark.exhaustive
def test_a_schedule_without_overlap(folder):
    """Each microbatch has gone through both stages and back before the next one begins."""
    first, last = ([f"{stage}{kind}{number}" for number in range(8) for kind in "FB"] for stage in (0, 1))
    (folder / "turns.csv").write_text(f"{','.join(first)}\n{','.join(last)}\n")
    one = only(folder, "parallel.pp=2", "pipeline.microbatches=8", "pipeline.schedule=csv:turns.csv")
    assert (one["kind"], one["axis"], one["key"]) == ("pipeline_utilization", "pp", "pipeline.schedule")
    assert one["value"] in SCHEDULES
    assert one["gain"] > 0.2


@pytest.mark.parametrize(
    "mesh",
    [
        ["parallel.dp=2"],
        pytest.param(["parallel.pp=2", "pipeline.microbatches=8"], marks=pytest.mark.exhaustive),
    ],
    ids=["dp", "pp"],
)
def test_weights_that_are_saved_after_each_step(folder, mesh):
    program = other_ranks(folder, SAVING_RANK)
    one = only(folder, *mesh, "model.factory=own:frozen", "data.factory=own:short_data", program=program)
    assert (one["kind"], one["key"]) == ("checkpoint_stalls", "runtime.run_dir")
    assert one["gain"] > 0.2


def test_nothing_is_wrong(folder):
    assert bottlenecks(folder, "parallel.dp=2", "train.batch_size=32") == []
