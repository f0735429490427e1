"""One rank's part of a model with what trains it: stages, named parameters, loss, gradient reduction, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from monitoring.events.recorder import Recorder
from parallel3d.config import RunConfig
from parallel3d.gradients.finalize import LateGradients
from parallel3d.gradients.reducer import GradientSync
from parallel3d.models.build import build_model
from parallel3d.models.losses import StepLoss, make_loss
from parallel3d.models.materialize import materialize
from parallel3d.optim.optimizer import Optimizer
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.schedules.actions import Kind
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.stage import Stage
from parallel3d.planning.blueprint import Blueprint, draw, table_of
from parallel3d.rank_mesh import Mesh
from parallel3d.tensor.layers import ShardSlice, shard_slice_of
from parallel3d.tensor.mappings import TPContext
from parallel3d.tensor.shards import apply_shards
from parallel3d.tensor.vocabulary import gather_logits, vocab_cross_entropy
from process_groups.tensor_exchange import TensorExchange
from runtime.errors import NonFiniteGradient

_WEIGHT_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""By train.precision; bfloat16 is the dtype of activations only."""
Sample = Callable[[], Awaitable[Any]]
"""Gives the inputs of one microbatch."""


class NamedShard(NamedTuple):
    """A parameter of this rank."""

    name: str
    """Its path in the whole model."""
    parameter: nn.Parameter
    slice: ShardSlice | None
    """Which slice of the whole parameter it is; None if it is not split over tensor-parallel ranks."""
    owners: tuple[int, ...]
    """The pipeline ranks that have it: several for a tied parameter, such as an embedding that is also the head."""


@dataclass(frozen=True)
class RankModel:
    """What this rank has of a model. Make it with `build`."""

    config: RunConfig
    mesh: Mesh
    blueprint: Blueprint
    stages: dict[int, Stage]
    shards: dict[nn.Parameter, NamedShard]
    """Every parameter of this rank once, in the order of its stages."""
    tp_context: TPContext | None
    """Shared by the modules that are split over tensor-parallel ranks; None with a single one."""
    loss: StepLoss
    reducer: GradientSync
    optimizer: Optimizer

    @classmethod
    async def build(
        cls, config: RunConfig, mesh: Mesh, *, sample: Sample | None = None, recorder: Recorder | None = None
    ) -> RankModel:
        """Make this rank's part, with memory and first values for its own stages only. All ranks have to call it.

        sample: awaited on rank 0 if `pipeline.layers_per_stage` is `profile`, to time the layers with; without one the
        layers are split evenly.
        """
        layers_per_stage = None if sample is None else await _timed_split(config, mesh, sample)
        blueprint = await mesh.compute(draw, config, layers_per_stage)
        exchange = mesh.tp.tensor_exchange() if mesh.tp.size > 1 else None
        made = await mesh.compute(_materialize, blueprint, config, mesh, exchange)
        reducer = _reducer(config, mesh, blueprint.table, made, recorder)

        def counts_in_norm(parameter: nn.Parameter) -> bool:
            """Whether this rank is the one of its replica that counts the parameter."""
            shard = made.shards[parameter]
            return (mesh.tp.rank == 0 or shard.slice is not None) and shard.owners[0] == mesh.pp.rank

        return cls(
            config=config,
            mesh=mesh,
            blueprint=blueprint,
            stages=made.stages,
            shards=made.shards,
            tp_context=made.tp_context,
            loss=_loss(config, mesh, blueprint, made.tp_context),
            reducer=reducer,
            optimizer=Optimizer(config.optimizer, reducer, mesh, counts_in_norm),
        )

    def executor(self, table: Table, recorder: Recorder | None = None) -> Executor:
        """Runs this table with these stages. Make executors in the same order on every rank."""
        return Executor(
            self.mesh,
            table,
            self.stages,
            self.loss,
            gradients=self.reducer if table.has_backwards else None,
            autocast=torch.bfloat16 if self.config.train.precision == "bfloat16" else None,
            collective_seconds=self._collective_seconds,
            recorder=recorder,
        )

    @contextlib.asynccontextmanager
    async def closing_on_failure(self) -> AsyncGenerator[None, None]:
        """Around what ranks do together: a failure here ends it on all of them. Not NonFiniteGradient, which every rank
        raises."""
        try:
            yield
        except NonFiniteGradient:
            raise
        except BaseException as error:
            self.mesh.fail(error)
            self.reducer.cancel(error)
            raise

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The path of each parameter in the whole model."""
        return {parameter: shard.name for parameter, shard in self.shards.items()}

    @property
    def num_parameters(self) -> int:
        """Elements of this rank's parameters."""
        return sum(each.numel() for each in self.shards)

    @property
    def reports_loss(self) -> bool:
        """Whether this rank reports its replica's loss: the one at tp=0 that has the last stage."""
        return self.mesh.tp.rank == 0 and any(stage.is_last for stage in self.stages.values())

    @property
    def exchange(self) -> TensorExchange | None:
        """With tensor-parallel peers; None without any."""
        return None if self.tp_context is None else self.tp_context.exchange

    def _collective_seconds(self) -> float:
        return 0.0 if self.tp_context is None else self.tp_context.exchange.waited


async def _timed_split(config: RunConfig, mesh: Mesh, sample: Sample) -> list[int] | None:
    """Layers of each stage if they are split by time. Rank 0 measures for all: no two would measure the same."""
    if config.pipeline.layers_per_stage != "profile":
        return None
    found = torch.zeros(config.num_stages, dtype=torch.int64, device=mesh.world.device)
    if mesh.world.rank == 0:
        found += torch.tensor(await mesh.compute(_time_layers, config, await sample()))
    return (await mesh.world.broadcast(found, root=0, timeout=config.comm.startup_timeout)).tolist()


def _time_layers(config: RunConfig, inputs: Any) -> tuple[int, ...]:
    """The split whose slowest rank is fastest, by what layers take here. Holds the whole model meanwhile."""
    table, model = table_of(config), build_model(config)
    materialize(model, [("", model.whole)], config.train.seed, _WEIGHT_DTYPES[config.train.precision], "cpu")
    return model.cut(table.stages, "profile", sample=inputs, rank_of_stage=table.rank_of_stage)


class _Made(NamedTuple):
    stages: dict[int, Stage]
    shards: dict[nn.Parameter, NamedShard]
    tp_context: TPContext | None


def _materialize(blueprint: Blueprint, config: RunConfig, mesh: Mesh, exchange: TensorExchange | None) -> _Made:
    """Give this rank's stages their memory and first values; the other stages stay on `meta`."""
    model, table = blueprint.model, blueprint.table
    tp_context = None if exchange is None else apply_shards(model, blueprint.shards, exchange)
    mine = table.stages_of_rank(mesh.pp.rank)
    owners = dict(_shared_over_ranks(blueprint))
    modules = {path: module for stage in mine for path, module in _modules(blueprint, stage)}
    materialize(model, modules.items(), config.train.seed, _WEIGHT_DTYPES[config.train.precision], mesh.world.device)
    # A single backward of a single replica is fastest by autograd alone.
    by_hand = table.splits_backward or table.microbatches > 1 or mesh.dp.size > 1
    stages = {
        index: Stage(index, table.stages, model.stage(blueprint.layers_per_stage, index), splits_backward=by_hand)
        for index in mine
    }
    names, shards = model.names(), dict[nn.Parameter, NamedShard]()
    for parameter in (each for stage in stages.values() for each in stage.module.parameters()):
        name = names[id(parameter)]
        shards[parameter] = NamedShard(name, parameter, shard_slice_of(parameter), owners.get(name, (mesh.pp.rank,)))
    return _Made(stages, shards, tp_context)


def _modules(blueprint: Blueprint, stage: int) -> Iterator[tuple[str, nn.Module]]:
    """All modules of a stage by their paths in the whole model."""
    return blueprint.model.located(blueprint.model.stage(blueprint.layers_per_stage, stage))


def _shared_over_ranks(blueprint: Blueprint) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of parameters that stages of several pipeline ranks have, and those ranks."""
    ranks_of: dict[str, set[int]] = {}
    for stage, rank in enumerate(blueprint.table.rank_of_stage):
        for path, module in _modules(blueprint, stage):
            for name, _ in module.named_parameters(recurse=False):
                ranks_of.setdefault(f"{path}.{name}", set()).add(rank)
    for first, paths in blueprint.model.tied().items():
        ranks = sorted(set().union(*(ranks_of.get(path, ()) for path in paths)))
        if len(ranks) > 1:
            yield first, tuple(ranks)


def _loss(config: RunConfig, mesh: Mesh, blueprint: Blueprint, tp_context: TPContext | None) -> StepLoss:
    """The configured one, for logits that may be split over tensor-parallel ranks."""
    cut = blueprint.shards.logits_slice(mesh.tp.rank)
    if cut is None or tp_context is None:
        return make_loss(config.model.loss)

    def of_cut(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return vocab_cross_entropy(logits, targets, cut, tp_context)

    return make_loss(config.model.loss, of_cut, lambda logits: gather_logits(logits, cut, tp_context))


def _reducer(config: RunConfig, mesh: Mesh, table: Table, made: _Made, recorder: Recorder | None) -> GradientSync:
    """Reduces stages in the order in which the table completes their gradients."""
    names = {shard.name: parameter for parameter, shard in made.shards.items() if parameter.requires_grad}
    shared = {shard.name: shard.owners for shard in made.shards.values() if len(shard.owners) > 1}
    late = LateGradients(names, shared, mesh, recorder)
    reducer = GradientSync(
        mesh,
        {index: list(stage.module.parameters()) for index, stage in made.stages.items()},
        [each.stage for each in table.with_communication().columns[mesh.pp.rank] if each.kind is Kind.REDUCE_GRAD],
        bucket_bytes=config.comm.bucket_size,
        shard=config.optimizer.shard,
        late=late.parameters,
        settle_late=late.settle,
    )
    late.flat_grads = reducer.flat_late(late.sequence_parallel)
    return reducer
