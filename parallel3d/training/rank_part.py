"""One rank's part of a run: its stages with their weights, what these are called, and who else has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel3d.config import RunConfig
from parallel3d.models.build import build_model
from parallel3d.models.materialize import materialize
from parallel3d.pipeline.stage import Stage
from parallel3d.planning.blueprint import Blueprint, table_of
from parallel3d.rank_mesh import Mesh
from parallel3d.tensor.layers import Partners
from parallel3d.tensor.sharded import cut_of
from parallel3d.tensor.shards import apply_shards
from process_groups.tensor_exchange import TensorExchange

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""Of weights; bfloat16 is for activations."""


@dataclass(frozen=True)
class RankPart:
    """What this rank has of the model."""

    blueprint: Blueprint
    stages: dict[int, Stage]
    names: dict[nn.Parameter, str]
    """Of its parameters, each once: the path in the whole model."""
    owners: dict[str, tuple[int, ...]]
    """Of parameters that several pipeline ranks have, which have to stay the same: those ranks."""
    partners: Partners | None
    """What its cut modules have in common; None where nothing is cut."""
    tp_rank: int
    pp_rank: int

    @property
    def num_parameters(self) -> int:
        """Numbers that this rank has."""
        return sum(each.numel() for each in self.names)

    @property
    def tells_loss(self) -> bool:
        """Whether it is this rank of its replica that says what the loss is."""
        return self.tp_rank == 0 and any(stage.is_last for stage in self.stages.values())

    def first_owner(self, name: str) -> int:
        """The first pipeline rank that has a parameter of this rank."""
        return self.owners[name][0] if name in self.owners else self.pp_rank

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter belongs to this rank when each shall count once in its replica."""
        is_only_one = self.tp_rank == 0 or cut_of(parameter) is not None
        return is_only_one and self.first_owner(self.names[parameter]) == self.pp_rank


def assemble(blueprint: Blueprint, config: RunConfig, mesh: Mesh, exchange: TensorExchange | None) -> RankPart:
    """Make this rank's stages. They get their memory and first values here; the others' stay without."""
    model, table = blueprint.model, blueprint.table
    partners = None if exchange is None else apply_shards(model, blueprint.shards, exchange)
    mine = table.stages_of_rank(mesh.pp.rank)
    owners = dict(_shared_over_ranks(blueprint))
    modules = {path: module for stage in mine for path, module in _modules(blueprint, stage)}
    materialize(model, modules.items(), config.train.seed, DTYPES[config.train.precision], mesh.world.device)
    # One backward whose gradients stay where autograd makes them is quickest by autograd alone.
    by_hand = table.splits_backward or table.microbatches > 1 or mesh.dp.size > 1
    stages = {
        index: Stage(index, table.stages, model.stage(blueprint.layers_per_stage, index), splits_backward=by_hand)
        for index in mine
    }
    paths = model.names()
    parameters = {each: None for stage in stages.values() for each in stage.module.parameters()}
    names = {each: paths[id(each)] for each in parameters}
    return RankPart(blueprint, stages, names, owners, partners, mesh.tp.rank, mesh.pp.rank)


def _modules(blueprint: Blueprint, stage: int) -> Iterator[tuple[str, nn.Module]]:
    """All modules of a stage by their paths in the whole model."""
    return blueprint.model.located(blueprint.model.stage(blueprint.layers_per_stage, stage))


def _shared_over_ranks(blueprint: Blueprint) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters that stages of several pipeline ranks have, such as an embedding that is also the head."""
    table = blueprint.table
    ranks_of: dict[str, set[int]] = {}
    for stage, rank in enumerate(table.rank_of_stage):
        for path, module in _modules(blueprint, stage):
            for name, _ in module.named_parameters(recurse=False):
                ranks_of.setdefault(f"{path}.{name}", set()).add(rank)
    for first, paths in blueprint.model.tied().items():
        ranks = sorted(set().union(*(ranks_of.get(path, ()) for path in paths)))
        if len(ranks) > 1:
            yield first, tuple(ranks)


def measure_cut(config: RunConfig, sample: Any) -> tuple[int, ...]:
    """How many layers each stage gets if the slowest rank shall be as fast as it can be, by the time layers take here.

    For one rank: it holds the whole model while it measures.
    """
    table, model = table_of(config), build_model(config)
    materialize(model, [("", model.whole)], config.train.seed, DTYPES[config.train.precision], "cpu")
    return model.cut(table.stages, "profile", sample=sample, rank_of_stage=table.rank_of_stage)
