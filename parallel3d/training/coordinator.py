"""The coordinator: one rank's way through training steps, each of which the whole mesh makes together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from monitoring.events.collectives import bus_factor
from monitoring.events.events import What
from monitoring.events.recorder import Recorder
from parallel3d.config import RunConfig
from parallel3d.data import Batch, Batches, Dataset, Sampler, make_dataset
from parallel3d.data.queue_depths import QueueDepths
from parallel3d.gradients.reducer import farewell
from parallel3d.models.losses import per_one
from parallel3d.optim.lr_schedule import learning_rate
from parallel3d.optim.optimizer import Optimizer, Taken
from parallel3d.pipeline.executor import Begun, Executor
from parallel3d.pipeline.schedules.gpipe import gpipe_of_stages
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.planning.blueprint import draw
from parallel3d.rank_mesh import Mesh, mesh
from parallel3d.tensor.shards import Shards
from parallel3d.training.gather_weights import gather_weights
from parallel3d.training.performance import Performance, TrainStep, core_wait
from parallel3d.training.rank_part import assemble, measure_cut
from parallel3d.training.rank_setup import loss_of, seed_dropout, sync_of
from parallel3d.training.step_events import Span, StepEvents, StepMoments
from process_groups.tensor_exchange import Outcome
from runtime.errors import CommunicationError, InvalidCall, NonFiniteGradient, PeerRefused, name_rank
from runtime.log_context import bind_step


class Coordinator:
    """One rank's part in training a model over the mesh. All ranks have to make the same calls."""

    def __init__(self, rank_mesh: Mesh) -> None:
        if rank_mesh.config is None:
            raise InvalidCall("a coordinator needs a configuration: Coordinator.from_config(...).")
        self.mesh, self.config = rank_mesh, rank_mesh.config
        self._stack = contextlib.AsyncExitStack()
        self._num_steps = 0
        self._begun: _Pass | None = None
        self._own_rate: float | None = None
        self._dataset: Dataset | None = None
        self._data_wait: Span | None = None
        """For the batch that came last, until its step has ended."""
        self.queue = QueueDepths(max(1, self.config.data.prefetch))
        """How many batches were ready when one was asked for."""
        self._summed = 0, 0.0
        """Bytes and seconds of the tensor-parallel sums that were told of."""
        self._reduced: _Pass | None = None
        """Whose gradients `backward_pass` left."""
        self.recorder = Recorder() if self.config.monitoring.enabled else None
        """What happens in this rank; None where nobody watches."""

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

    async def _set_up(self) -> None:
        config, rank_mesh = self.config, self.mesh
        blueprint = await rank_mesh.compute(draw, config, await self._measured_cut())
        exchange = rank_mesh.tp.tensor_exchange() if rank_mesh.tp.size > 1 else None
        self._part = part = await rank_mesh.compute(assemble, blueprint, config, rank_mesh, exchange)
        self._performance = Performance(part.num_parameters)
        self._loss = loss_of(config, part)
        self._sync = sync_of(config, part, rank_mesh, self.recorder)
        self._optimizer = Optimizer(config.optimizer, self._sync, rank_mesh, part.counts_in_norm)
        self._executor = self._make_executor(blueprint.table, self.recorder)
        apart = gpipe_of_stages(blueprint.table.rank_of_stage, blueprint.table.microbatches)
        self._executor_apart = self._make_executor(apart, self.recorder)
        self._evaluator = self._make_executor(apart.forward_only())
        await seed_dropout(config, part, self._loss, rank_mesh)
        rank_mesh.collectives.events_into = self.recorder
        self._events = StepEvents(self.recorder, exchange)

    def _make_executor(self, table: Table, recorder: Recorder | None = None) -> Executor:
        return Executor(
            self.mesh,
            table,
            self._part.stages,
            self._loss,
            gradients=None if not table.has_backwards else self._sync,
            autocast=torch.bfloat16 if self.config.train.precision == "bfloat16" else None,
            waited=self._tensor_waits,
            recorder=recorder,
        )

    async def _measured_cut(self) -> list[int] | None:
        """Where layers are cut by time: rank 0 measures and tells the others, for no two would measure the same."""
        if self.config.pipeline.layers_per_stage != "profile":
            return None
        found = torch.zeros(self.config.num_stages, dtype=torch.int64, device=self.mesh.world.device)
        if self.mesh.world.rank == 0:
            data = await self._data()
            size = self.config.batch_size // self.mesh.dp.size // self.config.pipeline.microbatches
            sample = data.batch(self._sampler(data).indices(0)[:size])
            found += torch.tensor(await self.mesh.compute(measure_cut, self.config, sample.inputs))
        return (await self.mesh.world.broadcast(found, root=0, timeout=self.config.comm.startup_timeout)).tolist()

    async def _data(self) -> Dataset:
        """Made when it is first asked for: who brings batches needs none."""
        if self._dataset is None:
            self._dataset = await asyncio.to_thread(make_dataset, self.config)
        return self._dataset

    def _sampler(self, data: Dataset) -> Sampler:
        dp, config = self.mesh.dp, self.config
        return Sampler(len(data), config.batch_size, dp.size, dp.rank, config.train.seed, config.data.shuffle)

    # What users ask for.

    @property
    def shards(self) -> Shards:
        """How each module is cut, over stages and tensor-parallel ranks."""
        return self._part.blueprint.shards

    @property
    def step(self) -> int:
        """The number of the next step; the first one is 0."""
        return self._num_steps

    @property
    def learning_rate(self) -> float:
        """The next step's. Set it on all ranks to override what the configuration says; None takes that back."""
        if self._own_rate is not None:
            return self._own_rate
        return learning_rate(self.config.optimizer, self.step, self.config.train.steps)

    @learning_rate.setter
    def learning_rate(self, rate: float | None) -> None:
        if rate is not None and not 0 <= rate < 1e6:
            raise InvalidCall(f"learning_rate = {rate!r}: give a number that is not negative, or None.")
        self._own_rate = rate

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's tensors that stay from step to step, by kind."""
        return {
            "weights": sum(each.nbytes for each in self._part.names),
            "gradients": self._sync.gradient_bytes,
            "optimizer": self._optimizer.state_bytes,
        }

    def performance(self) -> Performance:
        """What the steps so far took, and what for."""
        return self._performance

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
                if batches.step + 1 + prefetch <= stop:  # the last ones have none behind them
                    self.queue.note(batches.num_ready)

    async def train_step(self, batch: Batch | tuple[Any, Any]) -> TrainStep:
        """Forward, backward and update, all microbatches of the batch. The loss is the whole mesh's on every rank."""
        self._refuse_before_update("train_step")
        bind_step(self.step)
        start = time.monotonic()
        under_way = await self._start(self._executor, batch)
        rate = self.learning_rate
        async with self._closing_on_failure():
            await under_way.begun.finish()
            under_way.reduced = time.monotonic()
            taken = await self._optimizer.take(rate, self._told(under_way), under_way.scale)
        step = self._made(under_way, taken, rate, start)
        self._performance.add(step)
        return step

    def _made(self, under_way: _Pass, taken: Taken, rate: float, start: float) -> TrainStep:
        number, moments = self.step, self._moments(under_way)
        whole = self._end_step(moments)
        waited = 0.0 if moments.opened is None else moments.opened.seconds
        actions = tuple(under_way.begun.timed)
        return TrainStep(
            step=number,
            loss=taken.sums[0] * under_way.scale(taken.sums),
            grad_norm=taken.norm,
            learning_rate=rate,
            tokens=under_way.num_targets,
            seconds=whole.end - start,
            data_seconds=0.0 if moments.data is None else moments.data.seconds,
            reduce_seconds=waited + moments.reduced - actions[-1].end,
            optimizer_seconds=whole.end - moments.reduced - moments.met.seconds,
            meet_seconds=moments.met.seconds,
            tensor_seconds=sum(each.waited for each in actions),
            core_wait_seconds=core_wait(actions) if self.recorder is not None and self._computes_on_cpu else 0.0,
            actions=actions,
            began=whole.start,
            ended=whole.end,
            all_reduce_bandwidth=self._sync.bus_bandwidth or self._tensor_bandwidth(),
        )

    def _moments(self, under_way: _Pass) -> StepMoments:
        """Of a step that ends now."""
        return StepMoments(
            data=self._data_wait,
            opened=under_way.opened,
            acted=max(under_way.begun.timed[-1].end, self._sync.settled),
            reduced=under_way.reduced,
            met=Span(*self._optimizer.met),
            ended=time.monotonic(),
        )

    def _end_step(self, moments: StepMoments) -> Span:
        whole = self._events.end(self.step, moments)
        self._data_wait = None
        self._num_steps += 1
        return whole

    async def eval_step(self, batch: Batch | tuple[Any, Any]) -> float:
        """The loss of a batch, without gradients and without dropout."""
        self._refuse_between_passes("eval_step")
        modes = [(module, module.training) for stage in self._part.stages.values() for module in stage.module.modules()]
        for module, _ in modes:
            module.training = False
        try:
            under_way = await self._start(self._evaluator, batch)
            async with self._closing_on_failure():
                await under_way.begun.finish()
                return await self._settle_loss(under_way)
        finally:
            for module, was_training in modes:
                module.training = was_training

    async def forward_pass(self, batch: Batch | tuple[Any, Any]) -> float:
        """All forwards of a step; gives its loss. `backward_pass` and `optimizer_step` are to follow."""
        self._refuse_before_update("forward_pass")
        under_way = await self._start(self._executor_apart, batch)
        async with self._closing_on_failure():
            await under_way.begun.forward()
            came = time.monotonic()
            loss = await self._settle_loss(under_way)
            if self.recorder is not None:  # ranks wait for the last stage here
                self.recorder.record(What.MEET, self.step, came, time.monotonic())
        self._begun = under_way
        return loss

    async def backward_pass(self) -> None:
        """All backwards of the step that `forward_pass` began; its gradients are reduced then."""
        if self._begun is None:
            raise InvalidCall("backward_pass: call forward_pass before it.")
        under_way, self._begun = self._begun, None
        await under_way.begun.finish()
        under_way.reduced = time.monotonic()
        self._reduced = under_way

    async def optimizer_step(self) -> float:
        """Update the weights by the gradients of `backward_pass`; gives the gradients' norm."""
        under_way, self._reduced = self._reduced, None
        if under_way is None:
            raise InvalidCall("optimizer_step: call forward_pass and backward_pass before it.")
        norm = (await self._optimizer.take(self.learning_rate, scale=lambda _: under_way.final_scale)).norm
        self._end_step(self._moments(under_way))
        return norm

    async def measured(self, step: TrainStep) -> Measured:
        """A step's actions on all ranks of this pipeline, which have to be on one host and to call it; `compare` of it
        puts the plan beside it, and says what came late first and why."""
        return await self._executor.measured(step.actions)

    async def whole_weights(self) -> dict[str, torch.Tensor] | None:
        """Every parameter of the model by its path, put together from its parts; on the rank at dp=0 tp=0 pp=0, None
        elsewhere. All ranks have to call it."""
        return await gather_weights(self._part, self.mesh)

    # A pass over a batch.

    def _refuse_between_passes(self, call: str) -> None:
        if self._begun is not None:
            raise InvalidCall(f"{call}: a forward_pass waits for its backward_pass.")

    def _refuse_before_update(self, call: str) -> None:
        """Gradients of another pass would take their place, or be added to them."""
        self._refuse_between_passes(call)
        if self._reduced is not None:
            raise InvalidCall(
                f"{call}: gradients wait for their optimizer_step. To accumulate over several batches, make "
                "train.batch_size and pipeline.microbatches larger."
            )

    async def _start(self, executor: Executor, batch: Batch | tuple[Any, Any]) -> _Pass:
        """A batch that one replica refuses is refused by all, or they would go on with different steps."""
        refusal: InvalidCall | None = None
        try:
            inputs, targets = self._checked(batch)
        except InvalidCall as error:
            refusal, targets = error, torch.empty(0)
        known = self._loss.count(targets)
        dp = self.mesh.dp
        told = torch.zeros(2 + dp.size, dtype=torch.float64, device=dp.device)
        told[0], told[1], told[2 + dp.rank] = known or 0.0, targets.numel(), refusal is not None
        opened: Span | None = None
        if dp.size > 1:
            came = time.monotonic()
            async with self._closing_on_failure():
                await dp.all_reduce(told)
            opened = Span(came, time.monotonic())
        count, num_targets, *refused = told.tolist()
        if refusal is not None:
            raise refusal
        if any(refused):
            coords = self.mesh.coords._replace(dp=refused.index(1))
            message = f"the replica at dp={coords.dp} refuses its part of this step's batch."
            raise PeerRefused(message, rank=self.mesh.topology.rank(coords))
        weight = 1.0 if known is None else per_one(count)
        num = executor.table.microbatches
        parts = _cut(inputs, num), _cut(targets, num)
        begun = executor.begin(*parts, [weight] * num)
        return _Pass(begun, int(num_targets), opened, counts_later=known is None)

    @contextlib.asynccontextmanager
    async def _closing_on_failure(self) -> AsyncGenerator[None, None]:
        """Ranks that still wait for this one are told; but gradients that are not finite are so on all of them."""
        try:
            yield
        except NonFiniteGradient:
            raise
        except BaseException as error:
            self.mesh.abort(error if isinstance(error, CommunicationError) else farewell(self.mesh, error))
            self._sync.cancel(error)
            raise

    def _told(self, under_way: _Pass) -> tuple[float, float]:
        """This rank's loss and how much it counts; of each replica, one rank tells."""
        counted = self._loss.counted()
        return (under_way.begun.loss, counted) if self._part.tells_loss else (0.0, 0.0)

    async def _settle_loss(self, under_way: _Pass) -> float:
        """The whole mesh's loss, where no optimizer step brings it along."""
        found = torch.tensor(self._told(under_way), dtype=torch.float64, device=self.mesh.world.device)
        sums = (await self.mesh.world.all_reduce(found)).tolist()
        under_way.final_scale = under_way.scale(sums)
        return float(sums[0] * under_way.final_scale)

    def _checked(self, batch: Batch | tuple[Any, Any]) -> tuple[Any, torch.Tensor]:
        try:
            inputs, targets = batch
        except (TypeError, ValueError):
            raise InvalidCall(f"a batch is (inputs, targets), not {type(batch).__name__}.") from None
        tensors = inputs if isinstance(inputs, tuple | list) else (inputs,)
        batch_size, dp = self.config.batch_size, self.mesh.dp.size
        for name, tensor in (*(("inputs", each) for each in tensors), ("targets", targets)):
            if not isinstance(tensor, torch.Tensor) or not tensor.dim():
                found = type(tensor).__name__ if not isinstance(tensor, torch.Tensor) else "a single number"
                raise InvalidCall(f"the batch's {name}: a tensor with a row a sample is needed, not {found}.")
            if len(tensor) * dp != batch_size:
                raise InvalidCall(
                    f"the batch's {name} are {len(tensor)} samples of shape {tuple(tensor.shape[1:])}; a replica's "
                    f"part is train.batch_size({batch_size}) / dp({dp}) = {batch_size // dp}."
                )
            if tensor.is_floating_point() and not tensor.isfinite().all():
                row = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0])
                where = name_rank(self.mesh.rank, self.mesh.coords)
                raise InvalidCall(f"the batch's {name} on {where} have NaN or infinity, first in sample {row}.")
        device = self.mesh.world.device
        moved = [each.to(device) for each in tensors]
        return (tuple(moved) if isinstance(inputs, tuple | list) else moved[0]), targets.to(device)

    def _tensor_bandwidth(self) -> float | None:
        """Since it was asked for last."""
        if self._part.partners is None:
            return None
        exchange, (num_bytes, seconds) = self._part.partners.exchange, self._summed
        summed = exchange.moved[Outcome.ALL_REDUCE]
        self._summed = summed.num_bytes, summed.seconds
        moved, took = self._summed[0] - num_bytes, self._summed[1] - seconds
        return bus_factor("all_reduce", exchange.size) * moved / took / 1e9 if took > 0 else None

    @property
    def _computes_on_cpu(self) -> bool:
        return self.mesh.world.device.type == "cpu"

    def _tensor_waits(self) -> float:
        return 0.0 if self._part.partners is None else self._part.partners.exchange.waited


class _Pass:
    """A batch on its way."""

    def __init__(self, begun: Begun, num_targets: int, opened: Span | None, *, counts_later: bool) -> None:
        self.begun, self.num_targets, self._counts_later = begun, num_targets, counts_later
        self.final_scale = 1.0
        self.opened = opened
        """When replicas told each other how much their batches count."""
        self.reduced = 0.0
        """When its gradients were."""

    def scale(self, sums: Sequence[float]) -> float:
        """What loss and gradients are still to be multiplied with, by the sums of what ranks told: 1, unless only the
        loss function knew how much it counts."""
        return per_one(sums[1]) if self._counts_later else 1.0


def _cut(values: Any, num_microbatches: int) -> list[Any]:
    if isinstance(values, tuple):
        return list(zip(*(_cut(each, num_microbatches) for each in values), strict=True))
    return list(values.split(len(values) // num_microbatches))
