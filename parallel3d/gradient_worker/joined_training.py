"""One worker's part of a run whose replicas meet at a gradient server: what `run` trains, on shares of its batches."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from monitoring.messages import RunStep
from parallel3d.config import RunConfig
from parallel3d.config.errors import problem_of_key
from parallel3d.data import Batch, make_dataset
from parallel3d.gradient_worker.share_batches import ShareBatches
from parallel3d.gradient_worker.worker import GradientWorker
from parallel3d.models.losses import per_one
from parallel3d.optim.lr_schedule import learning_rate
from parallel3d.optim.state import OptimizerState
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.pipeline_pass import PipelinePass
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.schedules.gpipe import gpipe_of_stages
from parallel3d.pipeline.schedules.table import Table
from parallel3d.rank_mesh import alone
from parallel3d.seeding import seed_from_now_on, seed_of
from parallel3d.training.rank_model import RankModel
from runtime.gradient_server.client.protocol import Share, ShareChanged
from runtime.log_settings import bind_step


class JoinedTraining:
    """A configured run on one worker, for `async with`. Weights, losses and samples are those of one process: a step's
    batch is the same, of which this worker takes its share; gradients are exact means over the whole batch."""

    def __init__(self, config: RunConfig, worker: GradientWorker) -> None:
        self.config, self.worker = config, worker
        check_joinable(config)
        self._mesh, self._stack = alone(config), contextlib.AsyncExitStack()
        self._executors: dict[int, Executor] = {}
        self._ended = 0.0
        self.is_making = False
        """Whether a step is under way, and not waited for."""

    async def __aenter__(self) -> Self:
        """Makes model, data and optimizer, then joins."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._mesh)
            await self._set_up(stack)
            await stack.enter_async_context(self.worker)
            seed_from_now_on(seed_of(self.config.train.seed, f"dropout {self.worker.worker_id} 0 0"))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def _set_up(self, stack: contextlib.AsyncExitStack) -> None:
        config = self.config
        self._model = model = await RankModel.build(config, self._mesh)
        self._batches = ShareBatches(await asyncio.to_thread(make_dataset, config), config)
        stack.push_async_callback(self._batches.aclose)
        modules = nn.ModuleList([stage.module for stage in model.stages.values()])
        self._numbers = torch.zeros(3, dtype=torch.float64)
        """The loss's sum, how much was counted in it, and how many targets there are, all by the share's samples."""
        self.worker.attach(modules, OptimizerState(model.optimizer, model.names), also=[self._numbers])

    async def steps(self) -> AsyncGenerator[RunStep, None]:
        """Every step that this worker has a share of, up to the configuration's last one or the server's end."""
        self._ended = time.monotonic()
        async with contextlib.aclosing(self.worker.shares()) as shares:
            async for share in shares:
                if share.step >= self.config.train.steps:
                    return
                self.is_making = True
                try:
                    step = await self._make(share)
                except ShareChanged:
                    continue  # the share that takes its place is next
                finally:
                    self.is_making = False
                yield step

    def weights(self) -> dict[str, torch.Tensor]:
        """Every parameter by its path, as it is now."""
        return {shard.name: shard.parameter.detach().clone() for shard in self._model.shards.values()}

    # One step.

    async def _make(self, share: Share) -> RunStep:
        bind_step(share.step)
        if share.total != self.config.batch_size:
            raise problem_of_key(
                "train.batch_size",
                self.config.train.batch_size,
                f"the server's steps have {share.total} samples.",
                f"Set it to {share.total}, or start the server with --samples {self.config.batch_size}.",
            )
        rate = learning_rate(self.config.optimizer, share.step, self.config.train.steps)
        loss = await self._compute(share) if len(share) else self._compute_nothing()
        await self.worker.average(loss=loss)
        total, counted, num_targets = (self._numbers * share.total).tolist()
        # What was averaged are sums over targets, by samples: so means are exact wherever targets lie.
        scale = share.total * per_one(counted)
        taken = await self._model.optimizer.take(rate, scale=lambda _: scale)
        began, self._ended = self._ended, time.monotonic()
        return RunStep(
            step=share.step,
            loss=total * per_one(counted),
            grad_norm=taken.norm,
            learning_rate=rate,
            tokens=round(num_targets),
            seconds=self._ended - began,
        )

    async def _compute(self, share: Share) -> float:
        """The share's loss, for the server to tell. Gradients are of the sum of losses, by the share's samples."""
        inputs, targets = self._to_device(await self._batches.of(share))
        known, num = self._model.loss.count(targets), min(self.config.pipeline.microbatches, len(share))
        executor = self._executor(num)
        begun = executor.begin(_cut(inputs, num), _cut(targets, num), [1.0 / len(share)] * num)
        await self._finish(executor, begun)
        counted = self._model.loss.counted() if known is None else known
        found = [begun.loss * len(share), counted, targets.numel()]
        self._numbers.copy_(torch.tensor(found, dtype=torch.float64) / len(share))
        return begun.loss * len(share) * per_one(counted)

    async def _finish(self, executor: Executor, begun: PipelinePass) -> None:
        """Gradients of a single microbatch are sent while the rest is computed; several add to each other first."""
        if self.config.pipeline.microbatches > 1:
            await executor.finish(begun)
            return
        with self.worker.overlap():
            await executor.finish(begun)

    def _compute_nothing(self) -> float:
        """There are fewer samples than workers."""
        for parameter in self._model.reducer.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._numbers.zero_()
        return 0.0

    def _to_device(self, batch: Batch) -> tuple[Any, torch.Tensor]:
        device = self._mesh.world.device
        inputs = batch.inputs
        moved = tuple(each.to(device) for each in inputs) if isinstance(inputs, tuple) else inputs.to(device)
        return moved, batch.targets.to(device)

    def _executor(self, microbatches: int) -> Executor:
        if microbatches not in self._executors:
            self._executors[microbatches] = self._model.executor(self._table(microbatches))
        return self._executors[microbatches]

    def _table(self, microbatches: int) -> Table:
        """The configured one where it fits; a small share has fewer microbatches."""
        table = self._model.blueprint.table
        if microbatches == table.microbatches:
            return table
        if table.stages == 1:
            return build("1f1b", 1, microbatches)
        return gpipe_of_stages(table.rank_of_stage, microbatches)


def check_joinable(config: RunConfig) -> None:
    """Raises ConfigError where a worker can't be one process."""
    for axis in ("dp", "tp", "pp"):
        size = getattr(config.parallel, axis)
        if size > 1:
            instead = "the server's workers are the replicas." if axis == "dp" else "a worker is one process."
            raise problem_of_key(f"parallel.{axis}", size, instead, f"Set it to 1: --set parallel.{axis}=1")


def _cut(values: Any, num_microbatches: int) -> list[Any]:
    """Into parts that differ by one sample at most."""
    if isinstance(values, tuple):
        return list(zip(*(_cut(each, num_microbatches) for each in values), strict=True))
    return list(values.tensor_split(num_microbatches))
