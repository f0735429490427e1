"""How ranks' values are combined: in which dtype, in which order, and in pieces that fit the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

PIECE = 512 << 10
"""The most bytes of a piece."""

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


def wide_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """The type of partial results: float32 for sums of 16-bit floats, so that they are rounded once, at the end."""
    is_short_float = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_short_float and op in ("sum", "mean") else dtype


def combine(mine: torch.Tensor, theirs: torch.Tensor, op: str, out: torch.Tensor | None = None) -> None:
    """mine (op) theirs, into `out`, or else into `mine`; a mean is a sum until `finish`."""
    out = mine if out is None else out
    match op:
        case "sum" | "mean":
            torch.add(mine, theirs, out=out)
        case "min":
            torch.minimum(mine, theirs, out=out)
        case "max":
            torch.maximum(mine, theirs, out=out)
        case _:
            raise AssertionError(f"no such op: {op!r}")


def finish(total: torch.Tensor, op: str, size: int) -> None:
    """Turn the combined values of all `size` ranks into the result, in place. A mean is of floats only."""
    if op == "mean":
        total.div_(size)


class Reducer:
    """Reduces pieces; keeps one piece of memory for what is not finished yet. One thread at a time."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def __call__(self, out: torch.Tensor, inputs: Sequence[torch.Tensor], op: str) -> None:
        """`out` becomes the reduction of the inputs, 1-D and at most a piece long; it may be one of them.

        Where it is the first, what is not finished is written over it too, which needs less of the cache."""
        combine, (first, *others, last) = _COMBINE[op], inputs
        wide = wide_dtype(out.dtype, op)
        if wide is out.dtype or (not others and op != "mean"):  # one addition rounds once, whatever the dtype
            so_far = first
            for values in others:
                so_far = combine(so_far, values, out=out if out is first else self.scratch(out.numel(), wide))
            result = combine(so_far, last, out=out)
        else:
            result = self.scratch(out.numel(), wide).copy_(first)
            for values in (*others, last):
                combine(result, values, out=result)
        if op == "mean":
            result.div_(len(inputs))
        if result is not out:
            out.copy_(result)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a piece, until the next one."""
        if self._bytes is None:
            with torch.inference_mode(False):  # it is used by later calls too
                self._bytes = torch.empty(2 * PIECE, dtype=torch.uint8)  # a piece of 16-bit floats doubles
        return self._bytes[: numel * dtype.itemsize].view(dtype)


def piece_bytes(num_tensors: int) -> int:
    """So few that pieces of all these tensors stay in a core's cache, so many that Python's part does not count."""
    return PIECE if num_tensors <= 2 else PIECE // 2


def pieces(start: int, stop: int, itemsize: int, num_tensors: int) -> list[tuple[int, int]]:
    """Element ranges of at most a piece of so many tensors."""
    step = piece_bytes(num_tensors) // itemsize
    return [(a, min(stop, a + step)) for a in range(start, stop, step)]


def part(numel: int, index: int, num: int) -> tuple[int, int]:
    """The index-th of `num` parts, as even as whole elements allow."""
    return numel * index // num, numel * (index + 1) // num
