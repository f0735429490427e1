"""A step's batch on one replica: checked, agreed on with the other replicas, split into microbatches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel3d.data import Batch
from parallel3d.models.losses import per_one
from parallel3d.rank_mesh import Mesh
from parallel3d.training.rank_model import RankModel
from parallel3d.training.step_events import Span
from runtime.errors import InvalidCall, PeerRefused, name_rank


@dataclass(frozen=True, slots=True)
class StepBatch:
    """This replica's part of a step."""

    inputs: list[Any]
    """By microbatch."""
    targets: list[torch.Tensor]
    weight: float
    """Of each microbatch's loss."""
    num_targets: int
    """Of all replicas."""
    agreed: Span | None
    """When replicas exchanged how much their parts count; None with a single replica."""
    is_counted_by_loss: bool
    """Whether only the loss function knows how much the batch counts."""

    @classmethod
    async def open(cls, batch: Batch | tuple[Any, Any], model: RankModel) -> StepBatch:
        """All replicas have to call it. A batch that one replica rejects is rejected by all, or they would go on with
        different steps."""
        rejected: InvalidCall | None = None
        try:
            inputs, targets = _checked(batch, model)
        except InvalidCall as error:
            rejected, targets = error, torch.empty(0)
        known, dp = model.loss.count(targets), model.mesh.dp
        sums = torch.zeros(2 + dp.size, dtype=torch.float64, device=dp.device)
        sums[0], sums[1], sums[2 + dp.rank] = known or 0.0, targets.numel(), rejected is not None
        agreed: Span | None = None
        if dp.size > 1:
            start = time.monotonic()
            async with model.closing_on_failure():
                await dp.all_reduce(sums)
            agreed = Span(start, time.monotonic())
        if rejected is not None:
            raise rejected
        count, num_targets, *rejections = sums.tolist()
        _raise_if_any(rejections, model.mesh)
        num = model.blueprint.table.microbatches
        weight = 1.0 if known is None else per_one(count)
        return cls(_split(inputs, num), _split(targets, num), weight, int(num_targets), agreed, known is None)

    def scale(self, sums: Sequence[float]) -> float:
        """What loss and gradients are still to be multiplied with, given the sums of all ranks' (loss, weight)."""
        return per_one(sums[1]) if self.is_counted_by_loss else 1.0


def _raise_if_any(rejections: Sequence[float], mesh: Mesh) -> None:
    if any(rejections):
        coords = mesh.coords._replace(dp=rejections.index(1))
        rank = mesh.topology.rank(coords)
        raise PeerRefused(f"{name_rank(rank, coords)} rejected its part of this step's batch.", rank=rank)


def _checked(batch: Batch | tuple[Any, Any], model: RankModel) -> tuple[Any, torch.Tensor]:
    """Inputs and targets on this rank's device."""
    try:
        inputs, targets = batch
    except (TypeError, ValueError):
        raise InvalidCall(f"a batch is (inputs, targets), not {type(batch).__name__}.") from None
    tensors = inputs if isinstance(inputs, tuple | list) else (inputs,)
    for name, tensor in (*(("inputs", each) for each in tensors), ("targets", targets)):
        _check_tensor(name, tensor, model)
    device = model.mesh.world.device
    moved = [each.to(device) for each in tensors]
    return (tuple(moved) if isinstance(inputs, tuple | list) else moved[0]), targets.to(device)


def _check_tensor(name: str, tensor: Any, model: RankModel) -> None:
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        found = type(tensor).__name__ if not isinstance(tensor, torch.Tensor) else "a single number"
        raise InvalidCall(f"the batch's {name}: a tensor with a row a sample is needed, not {found}.")
    batch_size, dp = model.config.batch_size, model.mesh.dp.size
    if len(tensor) * dp != batch_size:
        raise InvalidCall(
            f"the batch's {name} are {len(tensor)} samples of shape {tuple(tensor.shape[1:])}; a replica's "
            f"part is train.batch_size({batch_size}) / dp({dp}) = {batch_size // dp}."
        )
    if tensor.is_floating_point() and not tensor.isfinite().all():
        row = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0])
        where = name_rank(model.mesh.rank, model.mesh.coords)
        raise InvalidCall(f"the batch's {name} on {where} have NaN or infinity, first in sample {row}.")


def _split(values: Any, num_microbatches: int) -> list[Any]:
    if isinstance(values, tuple):
        return list(zip(*(_split(each, num_microbatches) for each in values), strict=True))
    return list(values.split(len(values) // num_microbatches))
