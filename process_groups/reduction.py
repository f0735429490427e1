"""Sums, means, minima and maxima of several ranks' values, always in rank order, a cache-sized piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from process_groups.strategies.arithmetic import wide_dtype

PIECE = 512 << 10  # bytes: small enough to stay in a core's cache, large enough that Python's part does not count

_HALVES = (torch.float16, torch.bfloat16)
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


class Reducer:
    """Reduces pieces; keeps one piece of memory for what is not finished yet. One thread at a time."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def __call__(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], op: str) -> None:
        """`out` becomes the reduction of the inputs, 1-D and at most a piece long; it may be one of them."""
        combine, num = _COMBINE[op], len(inputs)
        if num == 2 and (op != "mean" or out.dtype not in _HALVES):  # one addition rounds once, whatever the dtype
            combine(inputs[0], inputs[1], out=out)
        else:
            total = self._scratch(out.numel(), wide_dtype(out.dtype, op))
            total.copy_(inputs[0])
            is_wide = total.dtype is not out.dtype
            for values in inputs[1:] if is_wide or op == "mean" else inputs[1:-1]:
                combine(total, values, out=total)
            if is_wide or op == "mean":
                if op == "mean":
                    total.div_(num)
                out.copy_(total)
            else:
                combine(total, inputs[-1], out=out)
            return
        if op == "mean":
            out.div_(num)

    def _scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._bytes is None:
            with torch.inference_mode(False):  # it is used by later calls too
                self._bytes = torch.empty(2 * PIECE, dtype=torch.uint8)  # a piece of 16-bit floats doubles
        return self._bytes[: numel * dtype.itemsize].view(dtype)


def pieces(start: int, stop: int, itemsize: int) -> list[tuple[int, int]]:
    """Element ranges of at most a piece."""
    step = PIECE // itemsize
    return [(a, min(stop, a + step)) for a in range(start, stop, step)]


def part(numel: int, index: int, num: int) -> tuple[int, int]:
    """The index-th of `num` parts, as even as whole elements allow."""
    return numel * index // num, numel * (index + 1) // num
