"""Training steps beside what users would pick instead: the same model in the same processes, in turns.

python bench/training.py [--json] [--quick]

One small GPT (4 blocks, width 256, batch 16), AdamW, one thread a rank:
1. one rank beside a plain loop;
2. two replicas beside DDP, and beside two plain loops on half a batch each at once;
3. two tensor-parallel ranks beside DTensor, and beside two plain loops on the whole batch at once;
4. two stages beside torch's 1F1B, ours also with zero-bubble;
5. 2 x 2 x 2 beside DDP, DTensor and torch's pipelining put together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
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
from models import LAYERS, SmallGPT, gpt_loss
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

from parallel3d.config import load_config
from parallel3d.training.coordinator import Coordinator

BATCH, MICROBATCHES = 16, 8
Step = Callable[[], Awaitable[Any]]
# mesh (dp, tp, pp), sequence, steps a turn
CASES = {
    "single": (1, 1, 1, 128, 1),
    "dp": (2, 1, 1, 128, 1),
    "dp, short": (2, 1, 1, 16, 4),
    "tp": (1, 2, 1, 128, 1),
    "tp, short": (1, 2, 1, 16, 4),
    "pp": (1, 1, 2, 128, 1),
    "pp, short": (1, 1, 2, 8, 4),
    "2x2x2": (2, 2, 2, 128, 1),
}


def data(sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(0, 1024, (2, BATCH, sequence), generator=generator)
    return inputs, targets


def whole() -> SmallGPT:
    torch.manual_seed(0)
    return SmallGPT()


def trained(model: nn.Module, work: Callable[[], Any], *, fused: bool = True) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=None if fused else False)

    def step() -> None:
        optimizer.zero_grad()
        work()
        optimizer.step()

    return step


def plain(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    model = whole()
    return trained(model, lambda: gpt_loss(model(inputs), targets).backward())


def ddp(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    model = nn.parallel.DistributedDataParallel(whole())
    return trained(model, lambda: gpt_loss(model(inputs), targets).backward())


def cut_by_dtensor(model: SmallGPT, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {"attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def dtensor(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    model = whole()
    cut_by_dtensor(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return trained(model, lambda: gpt_loss(model(inputs), targets).backward(), fused=False)


def one_f_one_b(
    model: nn.Module, stage: int, group: Any, inputs: torch.Tensor, targets: torch.Tensor
) -> Callable[[], Any]:
    """A step of one of two stages in torch's 1F1B."""
    placed = pipelining.PipelineStage(model, stage, 2, torch.device("cpu"), group=group)
    schedule = pipelining.Schedule1F1B(placed, MICROBATCHES, loss_fn=gpt_loss)
    return (lambda: schedule.step(inputs)) if stage == 0 else (lambda: schedule.step(target=targets, losses=[]))


def half(stage: int) -> SmallGPT:
    torch.manual_seed(stage)
    return SmallGPT(stage * LAYERS // 2, (stage + 1) * LAYERS // 2)


def torch_pipeline(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    model = half(dist.get_rank())
    return trained(model, one_f_one_b(model, dist.get_rank(), None, inputs, targets))


def composed(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    """Stages cut by DTensor, replicated by DDP, in torch's 1F1B."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))
    stage, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model = half(stage)
    cut_by_dtensor(model, mesh["tp"])
    _pre_dp_module_transform(model)  # DDP takes no DTensors
    replicated = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    part = inputs.chunk(2)[replica], targets.chunk(2)[replica]
    return trained(replicated, one_f_one_b(replicated, stage, mesh.get_group("pp"), *part))


def peers(case: str, rank: int, size: int, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Steps of what users would pick instead, by name."""
    part = inputs.chunk(size)[rank], targets.chunk(size)[rank]
    if case == "single":
        return {"plain loop": plain(inputs, targets)}
    if case.startswith("dp"):
        return {"plain loops on half a batch each": plain(*part), "DDP": ddp(*part)}
    if case.startswith("tp"):
        return {"plain loops on the whole batch": plain(inputs, targets), "DTensor": dtensor(inputs, targets)}
    if case.startswith("pp"):
        return {"torch 1F1B": torch_pipeline(inputs, targets)}
    return {"DDP + DTensor + torch 1F1B": composed(inputs, targets)}


async def measure(case: str, length: str) -> dict[str, Any]:
    dp, tp, pp, sequence, num_steps = CASES[case]
    rank, size = join_torch()
    inputs, targets = data(sequence)
    settings = {
        "model": {"factory": "models:SmallGPT", "layers": "blocks.*"},
        "data.sequence": sequence,
        "parallel": {"dp": dp, "tp": tp, "pp": pp},
        "pipeline.microbatches": MICROBATCHES if pp > 1 else 1,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 10**6, "batch_size": BATCH},
        "comm.timeout": 120,
        "runtime.threads": 1,
    }
    async with AsyncExitStack() as stack:
        ours = {}
        for schedule in ("1f1b", "zero-bubble") if pp > 1 else ("1f1b",):
            given = {**settings, "pipeline.schedule": schedule}
            coordinator = Coordinator.from_config(load_config(None, overrides=given, world_size=size))
            name = "parallel3d" if schedule == "1f1b" else f"parallel3d, {schedule}"
            ours[name] = await stack.enter_async_context(coordinator)
        others = peers(case, rank, size, inputs, targets)
        found = await turns(ours, others, (inputs, targets), num_steps, length == "quick")
    dist.destroy_process_group()
    return {"case": case, "mesh": [dp, tp, pp], "sequence": sequence, **found}


async def turns(
    ours: dict[str, Coordinator], others: dict[str, Any], batch: Any, num_steps: int, quick: bool
) -> dict[str, Any]:
    coordinator = ours["parallel3d"]
    mesh = coordinator.mesh
    part = tuple(each.chunk(mesh.dp.size)[mesh.dp.rank] for each in batch)
    contestants: dict[str, Step] = {}
    for name, each in ours.items():
        contestants[name] = lambda each=each: each.train_step(part)
    for name, step in others.items():
        contestants[name] = lambda step=step: mesh.compute(step)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(2 + (3 if quick else 5)):
        for name in turn(contestants, number):
            took = await step_seconds(mesh.world, contestants[name], num_steps)
            if number >= 2:  # the first steps make connections and load what torch loads late
                seconds[name].append(took)
    return {
        "seconds": seconds,
        "parameters_of_a_rank": coordinator.performance().parameters,
        "parameters": sum(each.numel() for each in SmallGPT().parameters()),
        "where": coordinator.performance().parts(),
    }


def pooled(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all launches."""
    seconds = joined(launches, "seconds")
    mine = seconds["parallel3d"]
    ratios = {name: median_ratio(theirs, mine) for name, theirs in seconds.items() if name != "parallel3d"}
    return {**launches[-1], "seconds": {name: median(values) for name, values in seconds.items()}, "ratios": ratios}


def lines_of(results: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in results:
        dp, tp, pp = each["mesh"]
        share = 100 * each["parameters_of_a_rank"] / each["parameters"]
        size = each["parameters_of_a_rank"] * 4 / (1 << 20)
        lines.append(
            f"dp={dp} tp={tp} pp={pp}, sequence {each['sequence']}; "
            f"rank 0 has {share:.0f} % of the weights, {size:.1f} MiB"
        )
        for name, seconds in each["seconds"].items():
            ratio = each["ratios"].get(name)
            lines.append(f"  {name:34} {1e3 * seconds:8.1f} ms" + ("" if ratio is None else f"   {ratio:6.3f} of ours"))
    return lines


def main() -> None:
    chosen = options(__doc__)
    words, launches = ("quick", 1) if chosen.quick else ("full", 4)
    sizes = {name: dp * tp * pp for name, (dp, tp, pp, _, _) in CASES.items()}
    results = [
        pooled([launch_for_result(sizes[name], __file__, name, words) for _ in range(launches)]) for name in CASES
    ]
    show({"cases": results}, lines_of(results), chosen.json)


if __name__ == "__main__":
    main_or_rank(main, measure)
