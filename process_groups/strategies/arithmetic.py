"""How values are combined: in which type sums add up, and what is done at the end."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """The type of partial results. Sums of 16-bit floats are float32 until the end, so that they are rounded once."""
    is_short_float = dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_short_float and op in ("sum", "mean") else dtype


def combine(mine: torch.Tensor, theirs: torch.Tensor, op: str, out: torch.Tensor | None = None) -> None:
    """mine (op) theirs, in place of mine unless told otherwise; a mean is a sum until `finish`."""
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
    """What is left to do, in place, once the values of all `size` ranks are combined. A mean is of floats only."""
    if op == "mean":
        total.div_(size)
