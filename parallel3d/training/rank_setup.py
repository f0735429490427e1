"""What a rank sets up before its first step: the loss, how gradients are summed up, and the seeds of dropout."""

from __future__ import annotations

import torch
from torch import nn

from monitoring.events.recorder import Recorder
from parallel3d.config import RunConfig
from parallel3d.gradients.finalize import LateGradients
from parallel3d.gradients.reducer import GradientSync
from parallel3d.models.losses import OwnLoss, StepLoss, make_loss
from parallel3d.pipeline.schedules.actions import Kind
from parallel3d.rank_mesh import Mesh
from parallel3d.seeding import OwnNumbers, RankNumbers, seed_from_now_on, seed_of
from parallel3d.tensor.layers import is_column_sharded
from parallel3d.tensor.vocabulary import gather_logits, vocab_cross_entropy
from parallel3d.torch_internals import DropoutNd
from parallel3d.training.rank_part import RankPart

_NEVER_DRAW = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.ModuleList, nn.Sequential)


def loss_of(config: RunConfig, part: RankPart) -> StepLoss:
    """The configured one, for logits that may be cut over the tensor-parallel ranks."""
    cut, partners = part.blueprint.shards.logits_slice(part.tp_rank), part.partners
    if cut is None or partners is None:
        return make_loss(config.model.loss)

    def of_cut(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return vocab_cross_entropy(logits, targets, cut, partners)

    return make_loss(config.model.loss, of_cut, lambda logits: gather_logits(logits, cut, partners))


def sync_of(config: RunConfig, part: RankPart, rank_mesh: Mesh, recorder: Recorder | None = None) -> GradientSync:
    """For this rank's stages, in the order in which their gradients are there."""
    late = LateGradients(part.names, part.owners, rank_mesh, recorder)
    column = part.blueprint.table.with_communication().columns[rank_mesh.pp.rank]
    sync = GradientSync(
        rank_mesh,
        {index: list(stage.module.parameters()) for index, stage in part.stages.items()},
        [action.stage for action in column if action.kind is Kind.REDUCE_GRAD],
        bucket_bytes=config.comm.bucket_size,
        shard=config.optimizer.shard,
        late=late.parameters,
        settle_late=late.settle,
    )
    late.flat_grads = sync.flat_late(late.sequence_parallel)
    return sync


async def seed_dropout(config: RunConfig, part: RankPart, loss: StepLoss, rank_mesh: Mesh) -> None:
    """So that ranks drop what they should, also if they share a process."""
    if rank_mesh.shares_process:
        if not _may_draw(part, loss):  # nor may it touch numbers that others' first weights are made of
            return
        rank_mesh.draw_apart()
    await rank_mesh.compute(_seed_dropout, config, part, rank_mesh)


def _may_draw(part: RankPart, loss: StepLoss) -> bool:
    """Whether random numbers may be drawn in a forward of this rank. What is unknown may do so."""
    modules = (module for stage in part.stages.values() for module in stage.module.modules())
    return isinstance(loss, OwnLoss) or any(
        module.p > 0
        if isinstance(module, DropoutNd)
        else type(module) not in _NEVER_DRAW and not type(module).__module__.startswith("parallel3d.")
        for module in modules
    )


def _seed_dropout(config: RunConfig, part: RankPart, rank_mesh: Mesh) -> None:
    """Replicas and stages drop different values. Tensor-parallel ranks drop the same of what each of them has whole,
    and each for itself between a column and its row, where it has features of its own. Where the sequence is cut each
    has another part, and drops of it for itself: but not in the modules around those, where a gradient that was put
    together from all parts would meet another rank's choice."""
    dp, tp, pp = rank_mesh.coords
    alike, apart = (seed_of(config.train.seed, f"dropout {dp} {pp} {number}") for number in (0, tp + 1))
    model, blueprint = part.blueprint.model, part.blueprint
    sliced = blueprint.shards.sliced(model.row)
    seed_from_now_on(apart if sliced else alike)
    if not sliced:
        _drop_apart_in_cut_features(part, rank_mesh)
        return
    numbers = OwnNumbers(alike, rank_mesh.world.device)
    for stage in part.stages:
        for path in model.paths(blueprint.layers_per_stage, stage):
            if path not in sliced:
                numbers.give_to(model.module(path))


def _drop_apart_in_cut_features(part: RankPart, rank_mesh: Mesh) -> None:
    """In modules that do nothing else: what a function drops inside of others, such as attention, can't be told from
    the whole values that these may drop as well."""
    if part.partners is None:
        return
    numbers = RankNumbers(part.tp_rank, rank_mesh.world.device, is_column_sharded)
    for stage in part.stages.values():
        for module in stage.module.modules():
            if isinstance(module, DropoutNd) and module.p > 0:
                numbers.give_to(module)
