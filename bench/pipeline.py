"""Pipelines beside torch.distributed.pipelining, in the same processes and in turns.

python bench/pipeline.py [--json] [--quick]

1. Stages that sleep: 1F1B and GPipe, as a share of the ideal (M+P-1)(F+B) with F and B as measured in the ranks, around
   a whole forward with its loss and a whole backward, or around the sleeps alone, and with the nominal ones;
   zero-bubble beside our own 1F1B, with the backward split in halves.
2. Every schedule with stages that sleep: what the simulator says with the costs that were measured in a step, beside
   the step.
3. A small GPT on two ranks: our 1F1B, torch's on the same cut, our zero-bubble, and our 1F1B with the cut that timing
   the layers gave; ours also beside the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import (
    join_torch,
    joined,
    launch_for_result,
    main_or_rank,
    median,
    median_ratio,
    options,
    show,
    step_seconds,
    turn,
)
from models import Sleeping, gpt_layers, gpt_loss
from torch import nn
from torch.distributed import pipelining

import parallel3d
from parallel3d.models.partition import partition
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.schedules.build import SCHEDULES, build
from parallel3d.pipeline.simulation.measured import compare
from parallel3d.pipeline.stage import Stage

MS = 1e-3
TORCH = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}


class Bench:
    """Makes the contestants of one rank."""

    def __init__(self, mesh: parallel3d.Mesh) -> None:
        self.mesh, self.me, self.size = mesh, mesh.pp.rank, mesh.pp.size

    async def mean(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64)
        return float(await self.mesh.pp.all_reduce(total, op="mean"))

    def ours(self, schedule: str, module: nn.Module, microbatches: int, loss: Any) -> Executor:
        """As the coordinator makes it for more than one microbatch."""
        stage = Stage(self.me, self.size, module, splits_backward=True)
        return Executor(self.mesh, build(schedule, self.size, microbatches), {self.me: stage}, loss)

    def ours_of(self, schedule: str, make: Callable[[int], nn.Module], microbatches: int, loss: Any) -> Executor:
        """With as many stages a rank as the schedule needs. make: from that number to a stage's module."""
        virtual = 2 if schedule in ("interleaved", "round-robin", "zbv", "dualpipe-v") else 1
        table = build(schedule, self.size, microbatches, virtual)
        stages = {
            index: Stage(index, table.stages, make(virtual), splits_backward=True)
            for index in table.stages_of_rank(self.me)
        }
        return Executor(self.mesh, table, stages, loss)

    def torchs(
        self, schedule: str, module: nn.Module, microbatches: int, loss: Any, data: Any, computing: list[float]
    ) -> Callable[[], Any]:
        """A step of torch's schedule. computing: receives the seconds of forwards, losses and backwards."""
        stage = pipelining.PipelineStage(module, self.me, self.size, torch.device("cpu"))
        runner = TORCH[schedule](stage, microbatches, loss_fn=loss)
        inputs, targets = (torch.cat(list(each)) for each in data)
        for owner, name in (
            (stage, "forward_one_chunk"),
            (stage, "backward_one_chunk"),
            (runner, "_maybe_compute_loss"),
        ):
            setattr(owner, name, timed(getattr(owner, name), computing))

        def step() -> None:
            if self.me == 0:
                runner.step(inputs)
            elif self.me == self.size - 1:
                runner.step(target=targets, losses=[])
            else:
                runner.step()

        return lambda: self.mesh.compute(step)


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    return call


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


async def sleeping(bench: Bench, microbatches: int, forward: float, backward: float, rounds: int) -> dict[str, Any]:
    data = [torch.ones(1, 8)] * microbatches, [torch.zeros(1, 8)] * microbatches
    contestants: dict[str, tuple[Sleeping, list[float], Callable[[], Any]]] = {}
    for schedule in (*TORCH, "zero-bubble"):
        module, computing = Sleeping(forward, backward), []
        executor = bench.ours(schedule, module, microbatches, squares)

        async def step(executor: Executor = executor, computing: list[float] = computing) -> None:
            done = await executor.step(*data)
            computing += [each.end - each.start for each in done.timed if each.action.is_compute]

        contestants[f"ours {schedule}"] = module, computing, step
        if schedule in TORCH:
            module, computing = Sleeping(forward, backward), []
            theirs = bench.torchs(schedule, module, microbatches, squares, data, computing)
            contestants[f"torch {schedule}"] = module, computing, theirs
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "share": [], "share_of_sleeps": [], "nominal": []} for name in contestants
    }
    turns = microbatches + bench.size - 1
    for number in range(rounds + 1):
        for name in turn(contestants, number):
            module, computing, step = contestants[name]
            seconds = await step_seconds(bench.mesh.pp, step)
            slept, computed = await bench.mean(module.seconds()), await bench.mean(sum(computing) / microbatches)
            computing.clear()
            if number == 0:
                continue  # the first makes connections
            found[name]["seconds"].append(seconds)
            found[name]["share"].append(turns * computed / seconds)
            found[name]["share_of_sleeps"].append(turns * slept / seconds)
            found[name]["nominal"].append(turns * (forward + backward) / seconds)
    return {
        "ranks": bench.size,
        "microbatches": microbatches,
        "forward_ms": forward / MS,
        "backward_ms": backward / MS,
        "contestants": {name: {key: median(values) for key, values in rows.items()} for name, rows in found.items()},
        "zero_bubble_gain": median_ratio(found["ours 1f1b"]["seconds"], found["ours zero-bubble"]["seconds"]),
    }


async def every_schedule(bench: Bench, microbatches: int, forward: float, backward: float, rounds: int) -> Any:
    """The simulated step over the measured one, by schedule."""
    data = [torch.ones(1, 8)] * microbatches, [torch.zeros(1, 8)] * microbatches
    found: dict[str, float] = {}
    for schedule in SCHEDULES:
        executor = bench.ours_of(
            schedule, lambda virtual: Sleeping(forward / virtual, backward / virtual), microbatches, squares
        )
        shares = []
        for number in range(rounds + 1):
            await bench.mesh.pp.barrier()
            measured = await executor.measured((await executor.step(*data)).timed)
            if number:
                shares.append(compare(measured).planned.makespan / measured.makespan)
        found[schedule] = median(shares)
    return found


async def profiled_cut(bench: Bench, sample: torch.Tensor) -> int:
    """Layers of the first rank by `profile`, which it measures while the others wait."""
    number = torch.zeros(1, dtype=torch.int64)
    if bench.me == 0:
        model = nn.Sequential(*gpt_layers())
        number[0] = partition(model, bench.size, "profile", sample=sample).layers_per_stage[0]
    return int(await bench.mesh.pp.broadcast(number))


async def gpt(bench: Bench, sequence: int, quick: bool) -> dict[str, Any]:
    """Seconds of every step. Short steps vary more and cost less, so they are repeated more often."""
    rounds = 5 if quick else 10 if sequence > 16 else 30
    batch, microbatches = 16, 8
    torch.manual_seed(1)
    inputs, targets = torch.randint(0, 1024, (2, batch, sequence))
    data = list(inputs.chunk(microbatches)), list(targets.chunk(microbatches))

    def half(first: int = 3) -> nn.Module:
        layers = gpt_layers()
        return nn.Sequential(*(layers[:first] if bench.me == 0 else layers[first:]))

    modules = {name: half() for name in ("ours 1f1b", "torch 1f1b", "ours zero-bubble")}
    cut = await profiled_cut(bench, data[0][0])
    modules["ours 1f1b, profiled"] = half(cut)
    executors = {
        name: bench.ours(name.removesuffix(", profiled")[5:], modules[name], microbatches, gpt_loss)
        for name in modules
        if name != "torch 1f1b"
    }
    steps: dict[str, Callable[[], Any]] = {
        "torch 1f1b": bench.torchs("1f1b", modules["torch 1f1b"], microbatches, gpt_loss, data, [])
    }
    last: dict[str, Any] = {}
    for name, executor in executors.items():

        async def step(name: str = name, executor: Executor = executor) -> None:
            last[name] = await executor.step(*data)

        steps[name] = step
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    simulated: dict[str, list[float]] = {name: [] for name in executors}
    for number in range(rounds + 2):
        for name in turn(modules, number):
            for parameter in modules[name].parameters():
                parameter.grad = None
            took = await step_seconds(bench.mesh.pp, steps[name])
            if number < 2:
                continue  # torch makes connections and imports what it needs
            seconds[name].append(took)
            if name in executors:
                measured = await executors[name].measured(last[name].timed)
                simulated[name].append(compare(measured).planned.makespan / took)
    layers = [cut, len(gpt_layers()) - cut]
    return {"sequence": sequence, "profiled_layers": layers, "seconds": seconds, "simulated_share": simulated}


def pooled(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all launches."""
    seconds = joined(launches, "seconds")

    def over(one: str, other: str) -> float:
        return median_ratio(seconds[one], seconds[other])

    return {
        "sequence": launches[0]["sequence"],
        "profiled_layers": [each["profiled_layers"] for each in launches],
        "seconds": {name: median(values) for name, values in seconds.items()},
        "simulated_share": {name: median(values) for name, values in joined(launches, "simulated_share").items()},
        "over_torch": over("torch 1f1b", "ours 1f1b"),
        "zero_bubble_gain": over("ours 1f1b", "ours zero-bubble"),
        "profile_gain": over("ours 1f1b", "ours 1f1b, profiled"),
    }


async def measure(case: str, length: str, *numbers: str) -> dict[str, Any]:
    quick, size = length == "quick", join_torch()[1]
    async with parallel3d.mesh(pp=size, threads=1, timeout=120) as mesh:
        bench = Bench(mesh)
        if case == "gpt":
            found = await gpt(bench, int(numbers[0]), quick)
        else:
            forward, backward = (float(each) * MS for each in numbers[1:])
            run = sleeping if case == "sleep" else every_schedule
            found = await run(bench, int(numbers[0]), forward, backward, 1 if quick else 5)
    dist.destroy_process_group()
    return found


def lines_of(sleeps: list[dict[str, Any]], every: dict[str, float], gpts: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in sleeps:
        lines.append(
            f"stages that sleep {each['forward_ms']:g} + {each['backward_ms']:g} ms, {each['ranks']} stages x "
            f"{each['microbatches']} microbatches"
        )
        lines.append(f"  {'':18} {'':>8} {'of the ideal with':>20}")
        lines.append(f"  {'':18} {'ms':>8} {'measured F and B':>20} {'measured sleeps':>20} {'nominal F and B':>20}")
        for name, row in each["contestants"].items():
            shares = [f"{100 * row[key]:18.1f} %" for key in ("share", "share_of_sleeps", "nominal")]
            ideal = shares if name != "ours zero-bubble" else []
            lines.append(" ".join([f"  {name:18} {row['seconds'] / MS:8.1f}", *ideal]))
        lines += [f"  our 1f1b over zero-bubble: {each['zero_bubble_gain']:.3f}", ""]
    lines.append("stages that sleep 10 + 20 ms a rank, 4 ranks x 8 microbatches")
    lines.append("  simulated from measured costs, over measured")
    lines += [*(f"  {name:18} {share:8.3f}" for name, share in every.items()), ""]
    for each in gpts:
        lines.append(f"small GPT, 2 stages x 8 microbatches, sequence {each['sequence']}")
        lines += [f"  {name:18} {seconds / MS:8.1f} ms" for name, seconds in each["seconds"].items()]
        lines.append(f"  torch's 1f1b over ours: {each['over_torch']:.3f}")
        lines.append(f"  our 1f1b over zero-bubble: {each['zero_bubble_gain']:.3f}")
        cuts = " ".join(map(str, each["profiled_layers"]))
        lines.append(f"  even cut over the profiled one, {cuts} layers: {each['profile_gain']:.3f}")
        shares = ", ".join(f"{name[5:]} {share:.3f}" for name, share in each["simulated_share"].items())
        lines += [f"  simulated from measured costs, over measured: {shares}", ""]
    return lines[:-1]


def main() -> None:
    chosen = options(__doc__)
    words, launches = ("quick", 1) if chosen.quick else ("full", 5)
    sizes = [(4, 8, 10, 20)] if chosen.quick else [(4, 8, 10, 20), (8, 16, 10, 20), (4, 8, 20, 40), (8, 16, 20, 40)]
    sleeps = [
        launch_for_result(ranks, __file__, "sleep", words, str(number), str(forward), str(backward))
        for ranks, number, forward, backward in sizes
    ]
    every = launch_for_result(4, __file__, "every", words, "8", "10", "20")
    gpts = [
        pooled([launch_for_result(2, __file__, "gpt", words, str(length)) for _ in range(launches)])
        for length in (128, 8)
    ]
    result = {"sleeping": sleeps, "simulated_share": every, "gpt": gpts}
    show(result, lines_of(sleeps, every, gpts), chosen.json)


if __name__ == "__main__":
    main_or_rank(main, measure)
