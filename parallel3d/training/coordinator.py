"""The coordinator: one rank's training steps, each of which the whole mesh makes together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from monitoring.events.events import What
from monitoring.events.recorder import Recorder
from parallel3d.config import RunConfig
from parallel3d.data import Batch, Batches, Dataset, Sampler, make_dataset
from parallel3d.data.batches import QueueDepths
from parallel3d.optim.lr_schedule import learning_rate
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.pipeline_pass import PipelinePass
from parallel3d.pipeline.schedules.gpipe import gpipe_of_stages
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.rank_mesh import Mesh, mesh
from parallel3d.tensor.shards import Shards
from parallel3d.training.dropout import seed_dropout
from parallel3d.training.gather_weights import gather_weights
from parallel3d.training.performance import Performance, TrainStep
from parallel3d.training.rank_model import RankModel
from parallel3d.training.step_batch import StepBatch
from parallel3d.training.step_events import Span, StepEvents, StepMoments
from runtime.errors import InvalidCall
from runtime.log_settings import bind_step


class Coordinator:
    """One rank's part in training a model over the mesh. All ranks have to make the same calls."""

    def __init__(self, rank_mesh: Mesh) -> None:
        if rank_mesh.config is None:
            raise InvalidCall("a coordinator needs a configuration: Coordinator.from_config(...).")
        self.mesh, self.config = rank_mesh, rank_mesh.config
        self.queue = QueueDepths(max(1, self.config.data.prefetch))
        """How many batches were ready when one was asked for."""
        self.recorder = Recorder() if self.config.monitoring.enabled else None
        """What happens in this rank; None if monitoring is disabled."""
        self._stack = contextlib.AsyncExitStack()
        self._num_steps = 0
        self._own_rate: float | None = None
        self._dataset: Dataset | None = None
        self._data_wait: Span | None = None
        """For the latest batch, until its step has ended."""
        self._awaiting_backward: _StepPass | None = None
        """Set by `forward_pass`, taken by `backward_pass`."""
        self._awaiting_update: _StepPass | None = None
        """Set by `backward_pass`, taken by `optimizer_step`."""

    @classmethod
    def from_config(cls, config: str | Path | RunConfig, *, overrides: Mapping[str, Any] | None = None) -> Coordinator:
        """For `async with`: the mesh is entered and the model made there."""
        return cls(mesh(config, overrides=overrides))

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.mesh)
            await self._set_up()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    @property
    def shards(self) -> Shards:
        """How each module is split over stages and tensor-parallel ranks."""
        return self._model.blueprint.shards

    @property
    def step(self) -> int:
        """The number of the next step; the first one is 0."""
        return self._num_steps

    @property
    def learning_rate(self) -> float:
        """The next step's. Set it on all ranks to override the configuration; None takes that back."""
        if self._own_rate is not None:
            return self._own_rate
        return learning_rate(self.config.optimizer, self.step, self.config.train.steps)

    @learning_rate.setter
    def learning_rate(self, rate: float | None) -> None:
        if rate is not None and not 0 <= rate < 1e6:
            raise InvalidCall(f"learning_rate = {rate!r}: give a number that is not negative, or None.")
        self._own_rate = rate

    async def batches(self, first: int = 0) -> AsyncGenerator[Batch, None]:
        """This replica's part of each step's batch, from step `first` to the configuration's last; loaded ahead."""
        data = await self._data()
        stop, prefetch = self.config.train.steps, self.config.data.prefetch
        async with Batches(
            data, self._sampler(data), first=first, stop=stop, prefetch=prefetch, timeout=self.config.comm.timeout
        ) as batches:
            async for batch in batches:
                ended = time.monotonic()
                self._data_wait = Span(ended - batches.last_waited, ended)
                yield batch
                if batches.step + 1 + prefetch <= stop:  # the last batches have none behind them
                    self.queue.note(batches.num_ready)

    async def train_step(self, batch: Batch | tuple[Any, Any]) -> TrainStep:
        """Forward, backward and update, all microbatches of the batch. The loss is the whole mesh's on every rank."""
        self._require_no_gradients("train_step")
        bind_step(self.step)
        start = time.monotonic()
        under_way = await self._begin(self._executor, batch)
        number, rate, model = self.step, self.learning_rate, self._model
        async with model.closing_on_failure():
            await under_way.finish()
            taken = await model.optimizer.take(rate, self._local_loss(under_way), under_way.batch.scale)
        moments = self._moments(under_way)
        step = TrainStep.of(
            moments,
            self._end_step(moments),
            tuple(under_way.pipeline.timed),
            start=start,
            has_cpu_times=self.recorder is not None and self.mesh.world.device.type == "cpu",
            step=number,
            loss=taken.sums[0] * under_way.batch.scale(taken.sums),
            grad_norm=taken.norm,
            learning_rate=rate,
            tokens=under_way.batch.num_targets,
            all_reduce_bandwidth=model.reducer.bus_bandwidth or self._events.tensor_bandwidth(),
        )
        self._performance.add(step)
        return step

    async def eval_step(self, batch: Batch | tuple[Any, Any]) -> float:
        """The loss of a batch, without gradients and without dropout."""
        self._require_no_forward("eval_step")
        stages = self._model.stages.values()
        modes = [(module, module.training) for stage in stages for module in stage.module.modules()]
        for module, _ in modes:
            module.training = False
        try:
            under_way = await self._begin(self._evaluator, batch)
            async with self._model.closing_on_failure():
                await under_way.finish()
                return await self._share_loss(under_way)
        finally:
            for module, was_training in modes:
                module.training = was_training

    async def forward_pass(self, batch: Batch | tuple[Any, Any]) -> float:
        """All forwards of a step; gives its loss. `backward_pass` and `optimizer_step` are to follow."""
        self._require_no_gradients("forward_pass")
        under_way = await self._begin(self._executor_apart, batch)
        async with self._model.closing_on_failure():
            await under_way.executor.forward(under_way.pipeline)
            start = time.monotonic()
            loss = await self._share_loss(under_way)
            if self.recorder is not None:  # ranks wait for the last stage here
                self.recorder.record(What.MEET, self.step, start, time.monotonic())
        self._awaiting_backward = under_way
        return loss

    async def backward_pass(self) -> None:
        """All backwards of the step that `forward_pass` began; returns when its gradients are reduced."""
        if self._awaiting_backward is None:
            raise InvalidCall("backward_pass: call forward_pass before it.")
        under_way, self._awaiting_backward = self._awaiting_backward, None
        await under_way.finish()
        self._awaiting_update = under_way

    async def optimizer_step(self) -> float:
        """Update the weights by the gradients of `backward_pass`; gives the gradients' norm."""
        under_way, self._awaiting_update = self._awaiting_update, None
        if under_way is None:
            raise InvalidCall("optimizer_step: call forward_pass and backward_pass before it.")
        taken = await self._model.optimizer.take(self.learning_rate, scale=lambda _: under_way.final_scale)
        self._end_step(self._moments(under_way))
        return taken.norm

    async def measured(self, step: TrainStep) -> Measured:
        """A step's actions on all ranks of this pipeline, which have to be on one host and to call it; `compare` of it
        puts the plan beside it, and says what came late first and why."""
        return await self._executor.measured(step.actions)

    def performance(self) -> Performance:
        """How long the steps so far took, and where the time went."""
        return self._performance

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's tensors that stay from step to step, by kind."""
        return {
            "weights": sum(each.nbytes for each in self._model.shards),
            "gradients": self._model.reducer.gradient_bytes,
            "optimizer": self._model.optimizer.state_bytes,
        }

    async def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """Every parameter of the model by its path, put together from its parts; on the rank at dp=0 tp=0 pp=0, None
        elsewhere. All ranks have to call it."""
        return await gather_weights(self._model)

    # What the methods above need.

    async def _set_up(self) -> None:
        self._model = model = await RankModel.build(
            self.config, self.mesh, sample=self._sample_microbatch, recorder=self.recorder
        )
        self._performance = Performance(model.num_parameters)
        table = model.blueprint.table
        apart = gpipe_of_stages(table.rank_of_stage, table.microbatches)
        self._executor = model.executor(table, self.recorder)
        self._executor_apart = model.executor(apart, self.recorder)
        self._evaluator = model.executor(apart.forward_only())
        await seed_dropout(model)
        self.mesh.collectives.events_into = self.recorder
        self._events = StepEvents(self.recorder, model.exchange)

    async def _data(self) -> Dataset:
        """Made on first use: users who bring their own batches need none."""
        if self._dataset is None:
            self._dataset = await asyncio.to_thread(make_dataset, self.config)
        return self._dataset

    def _sampler(self, data: Dataset) -> Sampler:
        dp, config = self.mesh.dp, self.config
        return Sampler(len(data), config.batch_size, dp.size, dp.rank, config.train.seed, config.data.shuffle)

    async def _sample_microbatch(self) -> Any:
        data = await self._data()
        size = self.config.batch_size // self.mesh.dp.size // self.config.pipeline.microbatches
        return data.batch(self._sampler(data).indices(0)[:size]).inputs

    def _require_no_forward(self, call: str) -> None:
        if self._awaiting_backward is not None:
            raise InvalidCall(f"{call}: a forward_pass waits for its backward_pass.")

    def _require_no_gradients(self, call: str) -> None:
        """Gradients of another pass would be added to them, or replace them."""
        self._require_no_forward(call)
        if self._awaiting_update is not None:
            raise InvalidCall(
                f"{call}: gradients wait for their optimizer_step. To accumulate over several batches, make "
                "train.batch_size and pipeline.microbatches larger."
            )

    async def _begin(self, executor: Executor, batch: Batch | tuple[Any, Any]) -> _StepPass:
        opened = await StepBatch.open(batch, self._model)
        weights = [opened.weight] * executor.table.microbatches
        return _StepPass(opened, executor, executor.begin(opened.inputs, opened.targets, weights))

    def _local_loss(self, under_way: _StepPass) -> tuple[float, float]:
        """(loss, weight) of this rank; (0, 0) on ranks that don't report it."""
        weight = self._model.loss.counted()
        return (under_way.pipeline.loss, weight) if self._model.reports_loss else (0.0, 0.0)

    async def _share_loss(self, under_way: _StepPass) -> float:
        """The whole mesh's loss, for passes without an optimizer step to share it."""
        local = torch.tensor(self._local_loss(under_way), dtype=torch.float64, device=self.mesh.world.device)
        sums = (await self.mesh.world.all_reduce(local)).tolist()
        under_way.final_scale = under_way.batch.scale(sums)
        return float(sums[0] * under_way.final_scale)

    def _moments(self, under_way: _StepPass) -> StepMoments:
        """Of a step that ends now."""
        return StepMoments(
            data=self._data_wait,
            agreed=under_way.batch.agreed,
            acted=max(under_way.pipeline.timed[-1].end, self._model.reducer.settled),
            reduced=under_way.reduced,
            met=Span(*self._model.optimizer.met),
            ended=time.monotonic(),
        )

    def _end_step(self, moments: StepMoments) -> Span:
        whole = self._events.end(self.step, moments)
        self._data_wait = None
        self._num_steps += 1
        return whole


@dataclass(slots=True)
class _StepPass:
    """A step under way."""

    batch: StepBatch
    executor: Executor
    pipeline: PipelinePass
    reduced: float = 0.0
    """When its gradients were reduced."""
    final_scale: float = 1.0
    """What its gradients are still to be multiplied with."""

    async def finish(self) -> None:
        await self.executor.finish(self.pipeline)
        self.reduced = time.monotonic()
