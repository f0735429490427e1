"""Models cut into stages, and what a pipeline has to give: the loss and the gradients of one process."""

from __future__ import annotations

import torch
from torch import nn

import parallel3d
from parallel3d.pipeline.executor import Executor, Step
from parallel3d.pipeline.schedules.build import SCHEDULES, build
from parallel3d.pipeline.simulation import Costs, simulate
from parallel3d.pipeline.stage import Stage

VOCABULARY, WIDTH = 11, 6
TWO_STAGES_A_RANK = ("interleaved", "round-robin", "zbv", "dualpipe-v")


class Masked(nn.Module):
    """Passes on values that need a gradient, tokens that are integers, and a mask that needs none."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.up, self.down = number, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, values, tokens, mask):
        values = values + self.down(torch.tanh(self.up(self.norm(values)))) * mask
        return values, (tokens + self.number) % VOCABULARY, mask * 0.5


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)

    def forward(self, tokens):
        return self.embedding(tokens), tokens, (tokens % 2).unsqueeze(-1).to(self.embedding.weight.dtype)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, values, tokens, mask):
        return self.head(values) + nn.functional.one_hot(tokens, VOCABULARY) * mask


class Chain(nn.Sequential):
    def forward(self, *values):
        for each in self:
            values = each(*values)
            values = values if isinstance(values, tuple) else (values,)
        return values if len(values) > 1 else values[0]


def stage_module(index: int, num_stages: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same on every mesh."""
    torch.manual_seed(index)
    ends = ([First()] if index == 0 else []), ([Last()] if index == num_stages - 1 else [])
    return Chain(*ends[0], Masked(index), *ends[1]).to(dtype)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def microbatch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of different lengths."""
    generator = torch.Generator().manual_seed(number)
    tokens, targets = torch.randint(0, VOCABULARY, (2, 2, 3 + number % 3), generator=generator)
    return tokens, targets


def one_process(num_stages: int, num_microbatches: int) -> tuple[float, nn.Sequential]:
    """The loss and the model with its gradients, of microbatches one after the other."""
    model = Chain(*(stage_module(index, num_stages) for index in range(num_stages)))
    total = 0.0
    for tokens, targets in map(microbatch, range(num_microbatches)):
        part = loss(model(tokens), targets) / num_microbatches
        part.backward()
        total += part.item()
    return total, model


def make_executor(mesh: parallel3d.Mesh, schedule: str, microbatches: int, **options) -> Executor:
    table = build(schedule, mesh.pp.size, microbatches, 2 if schedule in TWO_STAGES_A_RANK else None)
    stages = {
        index: Stage(index, table.stages, stage_module(index, table.stages), splits_backward=table.splits_backward)
        for index in table.stages_of_rank(mesh.pp.rank)
    }
    return Executor(mesh, table, stages, loss, **options)


async def run_step(executor: Executor) -> Step:
    inputs, targets = zip(*map(microbatch, range(executor.table.microbatches)), strict=True)
    return await executor.step(inputs, targets)


async def check_every_schedule(size: int) -> None:
    """On a mesh of all ranks: loss, gradients and activations, twice each."""
    async with parallel3d.mesh(pp=size, threads=1) as mesh:
        for schedule in SCHEDULES:
            executor = make_executor(mesh, schedule, 2 * size)
            table = executor.table
            expected, model = one_process(table.stages, table.microbatches)
            planned = simulate(table, Costs.uniform(table.stages)).peak_activations
            for repetition in (1, 2):
                step = await run_step(executor)
                assert abs(step.loss - expected) < 1e-12, (schedule, step.loss, expected)
                assert step.peak_activations == {index: planned[index] for index in executor.stages}, schedule
                for index, stage in executor.stages.items():
                    for mine, theirs in zip(stage.module.parameters(), model[index].parameters(), strict=True):
                        torch.testing.assert_close(mine.grad, repetition * theirs.grad, rtol=0, atol=1e-13)
                assert [each.action for each in step.timed] == list(table.columns[mesh.pp.rank])
                assert all(each.start <= each.end for each in step.timed)
