"""Gradients as the parts in which they travel to a server: flat memory of one dtype, about 4 MiB each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from parallel3d.gradient_buckets import fill
from runtime.errors import InvalidCall

PART_BYTES = 4 << 20
"""Small enough that the first are on their way while most of backward is still to come."""


class GradientPart:
    """Some parameters' gradients: as they were here, kept until the average of all workers' has come."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._ends = np.cumsum([each.numel() for each in tensors]).tolist()
        self.sent, self.received = (torch.empty(self._ends[-1], dtype=tensors[0].dtype) for _ in range(2))

    @property
    def dtype(self) -> torch.dtype:
        return self.sent.dtype

    @torch.no_grad()
    def keep(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Copy them; one that is missing counts as zero."""
        for home, gradient in zip(self._cut(self.sent), gradients, strict=True):
            if gradient is None:
                home.zero_()
            else:
                home.copy_(gradient.to_dense() if gradient.layout is not torch.strided else gradient)

    def averages(self) -> list[torch.Tensor]:
        """What has come, for each tensor."""
        return self._cut(self.received)

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        starts = [0, *self._ends[:-1]]
        return [
            flat[start:end].view(each.shape)
            for each, start, end in zip(self.tensors, starts, self._ends, strict=True)
        ]


def cut_into_parts(tensors: Sequence[torch.Tensor], part_bytes: int = PART_BYTES) -> list[GradientPart]:
    """In reverse order, which is about the one in which backward makes them. Raises InvalidCall for integers."""
    for each in tensors:
        if not each.is_floating_point():
            raise InvalidCall(f"a gradient of {each.dtype} can't be averaged; use floating-point numbers.")
    return [GradientPart(each) for each in fill(reversed(tensors), part_bytes)]


def raw(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they lie."""
    return memoryview(flat.detach().view(-1).view(torch.uint8).numpy()).cast("B")
