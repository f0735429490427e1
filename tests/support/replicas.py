"""Replicas of a small model in stages, trained over dp ranks, and the plain torch loop that they have to equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

import parallel3d
from parallel3d.config.sections import Optimizer as OptimizerConfig
from parallel3d.gradients.deferred import split_weight_gradients
from parallel3d.gradients.reducer import GradientSync
from parallel3d.optim.optimizer import Optimizer

NUM_SAMPLES = 12  # a step's, which 1, 2, 3 and 4 replicas can share
WIDTH = 7
EVERY_OPTIMIZER = {
    "adamw": OptimizerConfig(lr=0.02, clip_norm=0.3),
    "sgd": OptimizerConfig(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.01, clip_norm=0.3),
}


class Block(nn.Module):
    """Sizes that no vector register likes, a module that is used twice, and a parameter that is not used at all."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.twice = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, values):
        values = torch.tanh(self.twice(torch.tanh(self.twice(values))))
        return values + self.down(torch.tanh(self.up(self.norm(values))))


def make_stages(num: int, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> dict[int, nn.Module]:
    """The same on every rank."""
    torch.manual_seed(5)
    return {index: nn.Sequential(Block(width), Block(width)).to(dtype) for index in range(num)}


def samples(step: int, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_SAMPLES, width, generator=generator, dtype=torch.float64).to(dtype)


def parameters_of(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    found = {id(each): each for module in stages.values() for each in module.parameters()}
    return list(found.values())


class Trained(NamedTuple):
    norms: list[float]
    weights: list[torch.Tensor]


def plain_loop(
    stages: Mapping[int, nn.Module], config: OptimizerConfig, steps: int, dtype: torch.dtype, width: int = WIDTH
) -> Trained:
    """One process, torch alone. A parameter without gradient counts as one of zeros."""
    parameters, norms = [each for each in parameters_of(stages) if each.requires_grad], []
    if config.name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=config.lr)
    else:
        decay = config.weight_decay or 0.0
        optimizer = torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=decay)
    for step in range(steps):
        for each in parameters:
            each.grad = torch.zeros_like(each)
        values = samples(step, dtype, width)
        for module in stages.values():
            values = module(values)
        (values.square().sum() / NUM_SAMPLES).backward()
        limit = config.clip_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        optimizer.step()
    return Trained(norms, [each.detach().clone() for each in parameters_of(stages)])


class Replica:
    """A rank's stages, which all are here, with what trains them."""

    def __init__(
        self,
        mesh: parallel3d.Mesh,
        stages: Mapping[int, nn.Module],
        config: OptimizerConfig,
        *,
        bucket_bytes: int = 700,
        shard: bool = False,
        microbatches: int = 2,
        **options,
    ) -> None:
        self.mesh, self.stages, self.microbatches, self.config = mesh, stages, microbatches, config
        for module in stages.values():
            split_weight_gradients(module)
        parameters = {index: list(module.parameters()) for index, module in stages.items()}
        counts = options.pop("counts", lambda _: True)
        self.sync = GradientSync(
            mesh, parameters, sorted(stages, reverse=True), bucket_bytes=bucket_bytes, shard=shard, **options
        )
        self.optimizer = Optimizer(config, self.sync, mesh, counts)

    def backward_of(self, batch: torch.Tensor) -> None:
        """In the engine thread: forward and backward of all microbatches."""
        self.sync.begin()
        parts = batch.chunk(self.microbatches)
        for number, part in enumerate(parts):
            kept, values = {}, part
            for index, module in self.stages.items():
                inputs = values.detach().requires_grad_(index > 0)
                values = module(inputs)
                kept[index] = inputs, values
            gradient, values = None, values.square().sum() / NUM_SAMPLES
            for index in reversed(self.stages):
                inputs, output = kept[index]
                output = values if gradient is None else output
                if number < len(parts) - 1:
                    output.backward(gradient)
                else:
                    with self.sync.last_backward(index):
                        output.backward(gradient)
                    self.sync.stage_done(index)
                gradient = inputs.grad

    async def step(self, batch: torch.Tensor) -> float:
        """Of this rank's part of the batch; the norm."""
        await self.mesh.compute(self.backward_of, batch.chunk(self.mesh.dp.size)[self.mesh.dp.rank])
        await self.sync.finish()
        return await self.optimizer.step(self.config.lr)

    async def train(self, steps: int, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> Trained:
        norms = [await self.step(samples(step, dtype, width)) for step in range(steps)]
        return Trained(norms, [each.detach().clone() for each in parameters_of(self.stages)])


def assert_close(mine: Trained, theirs: Trained, tolerance: float) -> None:
    torch.testing.assert_close(torch.tensor(mine.norms), torch.tensor(theirs.norms), rtol=0, atol=tolerance)
    for a, b in zip(mine.weights, theirs.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def assert_same(those: Sequence[Trained]) -> None:
    """Bit by bit."""
    for other in those[1:]:
        assert other.norms == those[0].norms
        assert all(torch.equal(a, b) for a, b in zip(other.weights, those[0].weights, strict=True))
