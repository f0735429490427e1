"""Values whose sum over all ranks is known, to find a contestant that computes something else.

Written for torch tensors and numpy arrays alike. The values are small, so that small dtypes hold their sum exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CYCLE = 3  # how far apart equal values are
_STEPS = 5  # how many ranks in a row contribute different values
_BLOCK = _CYCLE << 16  # elements that are written or compared at a time, so that checking needs little memory
Make = Callable[[list[int]], Any]
"""A tensor or array of these values, in the dtype of the buffer."""


def largest_sum(num_ranks: int) -> int:
    """No element's sum, on the way or in the end, is larger."""
    return num_ranks * (_CYCLE - 1 + _STEPS - 1)


def fill(buffer: Any, rank: int, make: Make) -> None:
    """What this rank contributes."""
    _for_blocks(buffer, make, [position + rank % _STEPS for position in range(_CYCLE)], _write)


def check_sum(buffer: Any, ranks: range, make: Make, what: str) -> None:
    """Raise ValueError where the buffer is not the sum of what these ranks contribute."""
    total = sum(rank % _STEPS for rank in ranks)
    values = [len(ranks) * position + total for position in range(_CYCLE)]

    def compare(start: int, part: Any, expected: Any) -> None:
        wrong = part != expected
        if bool(wrong.any()):
            index = wrong.tolist().index(True)
            raise ValueError(
                f"{what} gave {part[index].item()} at element {start + index}, not {expected[index].item()}"
            )

    _for_blocks(buffer, make, values, compare)


def _write(_start: int, part: Any, values: Any) -> None:
    part[:] = values


def _for_blocks(buffer: Any, make: Make, cycle: list[int], act: Callable[[int, Any, Any], None]) -> None:
    length = min(len(buffer), _BLOCK)
    values = make((cycle * (length // _CYCLE + 1))[:length])
    for start in range(0, len(buffer), _BLOCK):
        part = buffer[start : start + _BLOCK]
        act(start, part, values[: len(part)])
