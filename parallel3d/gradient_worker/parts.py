"""Gradients as the parts in which they travel to a server: flat memory of one dtype, about 4 MiB each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from parallel3d.gradients.buckets import fill
from runtime.errors import InvalidCall
from runtime.gradient_server.client.raw_parts import RawPart
from runtime.gradient_server.wire.messages import Dtype

PART_BYTES = 4 << 20
"""Small enough that the first are on their way while most of backward is still to come."""
DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.float64: Dtype.FLOAT64,
    torch.float16: Dtype.FLOAT16,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.int64: Dtype.INT64,
    torch.int32: Dtype.INT32,
    torch.uint8: Dtype.UINT8,
    torch.bool: Dtype.BOOL,
    torch.int16: Dtype.INT16,
    torch.int8: Dtype.INT8,
}
"""That travel."""


class GradientPart:
    """Some parameters' gradients: as they were here, kept until the average of all workers' has come."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        """Whose gradients, or which themselves, are the part."""
        self._ends = np.cumsum([each.numel() for each in tensors]).tolist()
        self._sent, self._received = (torch.empty(self._ends[-1], dtype=tensors[0].dtype) for _ in range(2))
        self.sent, self.received = raw_part(self._sent), raw_part(self._received)
        """What goes out, and where the average comes in."""

    @torch.no_grad()
    def keep(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Copy them; one that is missing counts as zero."""
        for home, gradient in zip(self._cut(self._sent), gradients, strict=True):
            if gradient is None:
                home.zero_()
            else:
                home.copy_(gradient.to_dense() if gradient.layout is not torch.strided else gradient)

    def averages(self) -> list[torch.Tensor]:
        """What has come, for each tensor."""
        return self._cut(self._received)

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        starts = [0, *self._ends[:-1]]
        return [
            flat[start:end].view(each.shape) for each, start, end in zip(self.tensors, starts, self._ends, strict=True)
        ]


def cut_into_parts(tensors: Sequence[torch.Tensor], part_bytes: int = PART_BYTES) -> list[GradientPart]:
    """In reverse order, which is about the one in which backward makes them. Raises InvalidCall for integers."""
    for each in tensors:
        if not each.is_floating_point() or each.dtype not in DTYPES:
            raise InvalidCall(f"a gradient of {each.dtype} can't be averaged; use float32, float64, float16, bfloat16.")
    return [GradientPart(each) for each in _lists(tensors, part_bytes)]


def refill(parts: Sequence[GradientPart], tensors: Sequence[torch.Tensor], part_bytes: int = PART_BYTES) -> None:
    """Let parts be of other tensors, of the same shapes and dtypes."""
    for part, each in zip(parts, _lists(tensors, part_bytes), strict=True):
        part.tensors = each


def _lists(tensors: Sequence[torch.Tensor], part_bytes: int) -> list[list[torch.Tensor]]:
    return fill([each for each in reversed(tensors) if each.numel()], part_bytes)


def raw(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they lie."""
    return flat.detach().view(-1).view(torch.uint8).numpy().data


def raw_part(flat: torch.Tensor) -> RawPart:
    """The same as a part. Raises InvalidCall for a dtype that does not travel."""
    if flat.dtype not in DTYPES:
        raise InvalidCall(f"a tensor of {flat.dtype} can't be sent; those that can are {', '.join(map(str, DTYPES))}.")
    return RawPart(DTYPES[flat.dtype], raw(flat))
