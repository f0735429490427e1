"""Seeds of dropout: which ranks draw the same random numbers in a forward, and which their own."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from parallel3d.models.losses import OwnLoss
from parallel3d.seeding import OwnNumbers, RankNumbers, seed_from_now_on, seed_of
from parallel3d.tensor.layers import is_cut
from parallel3d.training.rank_model import RankModel

_NEVER_DRAW = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.ModuleList, nn.Sequential)


async def seed_dropout(model: RankModel) -> None:
    """Also where ranks share a process."""
    if model.mesh.shares_process:
        if not _may_draw(model):  # then leave the process's numbers alone: other ranks draw first weights from them
            return
        model.mesh.draw_apart()
    await model.mesh.compute(_seed_dropout, model)


def _may_draw(model: RankModel) -> bool:
    """Whether a forward of this rank may draw random numbers. Unknown modules and losses may."""
    modules = (module for stage in model.stages.values() for module in stage.module.modules())
    return isinstance(model.loss, OwnLoss) or any(
        module.p > 0
        if isinstance(module, _DropoutNd)
        else type(module) not in _NEVER_DRAW and not type(module).__module__.startswith("parallel3d.")
        for module in modules
    )


def _seed_dropout(model: RankModel) -> None:
    """Replicas and stages drop different values. Tensor-parallel ranks drop the same of values that each has whole, and
    their own between a column and a row layer, where each has other features. Where the sequence is split, each drops
    its own in modules that see a slice, and the same in the modules around them: there a gradient gathered from all
    slices would meet another rank's choice."""
    dp, tp, pp = model.mesh.coords
    alike, apart = (seed_of(model.config.train.seed, f"dropout {dp} {pp} {number}") for number in (0, tp + 1))
    layered, blueprint = model.blueprint.model, model.blueprint
    sliced = blueprint.shards.sliced(layered.row)
    seed_from_now_on(apart if sliced else alike)
    if not sliced:
        _drop_apart_in_cut_features(model)
        return
    numbers = OwnNumbers(alike, model.mesh.world.device)
    for stage in model.stages:
        for path in layered.paths(blueprint.layers_per_stage, stage):
            if path not in sliced:
                numbers.give_to(layered.module(path))


def _drop_apart_in_cut_features(model: RankModel) -> None:
    """Only in Dropout modules: dropout inside of another function, such as attention, can't be told from dropout of
    whole values in the same module."""
    if model.partners is None:
        return
    numbers = RankNumbers(model.mesh.tp.rank, model.mesh.world.device, is_cut)
    for stage in model.stages.values():
        for module in stage.module.modules():
            if isinstance(module, _DropoutNd) and module.p > 0:
                numbers.give_to(module)
