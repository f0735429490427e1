"""The sum of squares of a rank's share of the gradients: its slice of every bucket, as far as this rank counts it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel3d.gradients.buckets import Bucket, Counts

_ROW = 1024  # elements that are added up in their own precision: in float32, millions would lose the fourth digit
_SHORT = 1 << 16  # elements: up to here hardly a digit is lost, and all such pieces together cost one call


class SquaredNorm:
    """Calling it, in the engine thread, gives the sum. Every replica takes the slice that it would have if gradients
    were sharded: they need not do the same work twice, and the sum has the same bits either way."""

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
            norms.append(torch.stack(torch._foreach_norm(short)).double())
        if not norms:
            return 0.0
        joined = torch.cat(norms)
        return float(torch.dot(joined, joined))


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
