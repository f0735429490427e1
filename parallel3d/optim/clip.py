"""Clipping by the global norm: a rank's share of the squared norm, and the factor that clips."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel3d.gradients.buckets import Bucket, Counts
from parallel3d.torch_internals import foreach_norm

_ROW = 1024  # elements that are summed in their own precision: a float32 sum of millions loses the fourth digit
_SHORT = 1 << 16  # elements: up to here hardly a digit is lost, and all such pieces together cost one call
_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipped gradients are the same


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """What gradients of this norm are multiplied by."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + _EPSILON))


class SquaredNorm:
    """The sum of squares of this rank's share of the gradients; call it in the engine thread. Each replica takes its
    slice of every bucket also where gradients are not sharded: no work is done twice, and the bits are the same."""

    def __init__(self, buckets: Sequence[Bucket], index: int, counts: Counts) -> None:
        self._counted = [bucket.counted(index, counts) for bucket in buckets]

    @torch.no_grad()
    def __call__(self) -> float:
        short, norms = [], []
        for each in [piece for counted in self._counted for piece in counted()]:
            if each.numel() > _SHORT:
                flat, end = each.view(-1), each.numel() // _ROW * _ROW
                norms.append(torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1, dtype=_wide(flat)).double())
                each = flat[end:]
            if each.numel():
                short.append(each.to(_wide(each)))
        if short:
            norms.append(torch.stack(foreach_norm(short)).double())
        if not norms:
            return 0.0
        joined = torch.cat(norms)
        return float(torch.dot(joined, joined))


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
