"""A model's whole weights, gathered from the shards of all ranks."""

from __future__ import annotations

import json

import torch

from parallel3d.tensor.sharded import Cut
from parallel3d.training.rank_model import RankModel
from process_groups.group import Group


async def gather_weights(model: RankModel) -> dict[str, torch.Tensor] | None:
    """Every parameter by its path, on the rank at dp=0 tp=0 pp=0; None elsewhere. All ranks have to call it."""
    mesh = model.mesh
    if mesh.coords.dp:
        return None  # replicas have the same weights
    mine = {}
    for shard in model.shards.values():
        weights = shard.parameter.detach()
        whole = weights if shard.cut is None else await _joined(weights, shard.cut, mesh.tp)
        if shard.owners[0] == mesh.pp.rank:
            mine[shard.name] = whole.clone()
    if mesh.coords.tp:
        return None
    if mesh.pp.rank:
        await _send(mine, mesh.pp)
        return None
    for rank in range(1, mesh.pp.size):
        mine |= await _receive(rank, mesh.pp)
    return {name: mine[name] for name, _ in model.blueprint.model.whole.named_parameters()}


async def _joined(weights: torch.Tensor, cut: Cut, tp: Group) -> torch.Tensor:
    """From all tensor-parallel ranks. Sizes may differ by one, so every slice is padded to the largest."""
    sizes = [Cut.of_rank(cut.dim, cut.whole_size, rank, tp.size).size for rank in range(tp.size)]
    first = weights.movedim(cut.dim, 0)
    padded = first.new_zeros((1, max(sizes), *first.shape[1:]))
    padded[0, : len(first)] = first
    parts = await tp.all_gather(padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, cut.dim).contiguous()


async def _send(weights: dict[str, torch.Tensor], pp: Group) -> None:
    header = [[name, list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in weights.items()]
    text = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8, device=pp.device)
    await pp.send(torch.tensor([len(text)], dtype=torch.int64, device=pp.device), 0)
    await pp.send(text, 0)
    for each in weights.values():
        await pp.send(each, 0)


async def _receive(rank: int, pp: Group) -> dict[str, torch.Tensor]:
    length = torch.zeros(1, dtype=torch.int64, device=pp.device)
    await pp.recv(length, rank)
    text = torch.empty(int(length), dtype=torch.uint8, device=pp.device)
    await pp.recv(text, rank)
    found = {}
    for name, shape, dtype in json.loads(bytes(text.tolist())):
        found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=pp.device)
        await pp.recv(found[name], rank)
    return found
