"""A batch, and how samples are stacked into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

Inputs = torch.Tensor | tuple[torch.Tensor, ...]


class Batch(NamedTuple):
    """One replica's samples of one step, stacked along the first dimension."""

    inputs: Inputs
    targets: torch.Tensor


def collate(samples: Sequence[Any]) -> Batch:
    """Stack samples of (input, target) into a batch. Raises ValueError or TypeError, which say what does not fit."""
    for sample in samples:
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise TypeError(f"a sample must be (input, target), not {_described(sample)}")
    inputs, targets = zip(*samples, strict=True)
    if not isinstance(inputs[0], (tuple, list)):
        return Batch(_stacked(inputs, "inputs"), _stacked(targets, "targets"))
    lengths = {len(each) if isinstance(each, (tuple, list)) else None for each in inputs}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError("inputs must be tuples of the same length")
    columns = zip(*inputs, strict=True)
    return Batch(tuple(_stacked(column, "inputs") for column in columns), _stacked(targets, "targets"))


def _stacked(values: Sequence[Any], what: str) -> torch.Tensor:
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        raise ValueError(f"{what} differ: {' and '.join(sorted(kinds))}")
    if isinstance(values[0], torch.Tensor):
        return torch.stack(list(values))
    if isinstance(values[0], (np.ndarray, np.generic)):
        return torch.from_numpy(np.stack(values))
    if isinstance(values[0], (bool, int, float)):
        return torch.tensor(values)
    raise TypeError(f"{what} must be tensors, arrays or numbers, not {_described(values[0])}")


def _kind(value: Any) -> str:
    """What must be equal for values to be stacked: dtype and shape, or the type."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} array {value.shape}"
    return type(value).__name__


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"
