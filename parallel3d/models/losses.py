"""Losses as (sum, count), so that the mean over a batch is exact however it is divided over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional

from parallel3d.config.factories import load_factory
from runtime.errors import InvalidCall

IGNORED = -100
"""A target that is ignored."""
Sum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From output and target to the sum of the losses."""
Whole = Callable[[Any], Any]
"""From an output that may be sharded to the whole one."""


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy summed over targets that are not ignored; the logits' last dimension is the vocabulary."""
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


class StepLoss(Protocol):
    """The sum of a loss, and the count that makes it a mean."""

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        """The sum over one microbatch."""

    def count(self, targets: torch.Tensor) -> float | None:
        """The count, before anything is computed; None where only the loss function knows it."""

    def counted(self) -> float:
        """The count over the calls since the last time, where `count` gave None."""


class CrossEntropy:
    """The cross entropy over targets that are not ignored."""

    def __init__(self, total: Sum = cross_entropy_sum) -> None:
        self._total = total

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.shape[:-1].numel() != target.numel():
            raise InvalidCall(
                f"model.loss = cross_entropy: the model gives {tuple(output.shape)}, the last for the classes, so the "
                f"target must be {tuple(output.shape[:-1])} class numbers, but is {tuple(target.shape)}."
            )
        return self._total(output, target)

    def count(self, targets: torch.Tensor) -> float:
        return float((targets != IGNORED).sum())

    def counted(self) -> float:
        return 0.0  # `count` knows it before


class SquaredError:
    """The mean squared error of each sample, summed over samples."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = self._whole(output)
        if output.shape != target.shape:
            raise InvalidCall(
                f"model.loss = mse: the model gives {tuple(output.shape)}, but the target is {tuple(target.shape)}."
            )
        return functional.mse_loss(output, target, reduction="mean") * len(target)

    def count(self, targets: torch.Tensor) -> float:
        return float(len(targets))

    def counted(self) -> float:
        return 0.0


class OwnLoss:
    """A user's function of (output, target), which returns a mean over its samples, or (sum, count)."""

    def __init__(self, name: str, whole: Whole) -> None:
        self._name, self._function, self._whole = name, load_factory("model.loss", name), whole
        self._counted = 0.0

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        output = self._whole(output)
        found = self._function(output, target)
        total, count = found if isinstance(found, tuple) else (found * len(target), len(target))
        if not isinstance(total, torch.Tensor) or total.dim():
            raise InvalidCall(
                f"model.loss = {self._name} gives {_shape(total)}; a mean over the samples, or (sum, count), is "
                "needed, where mean and sum are tensors of a single number."
            )
        learns = isinstance(output, torch.Tensor) and output.requires_grad
        if learns and not total.requires_grad and float(count):  # with a count of 0, a constant zero is fine
            raise InvalidCall(
                f"model.loss = {self._name} gives a tensor without a gradient: nothing would be learned. "
                "Look for .detach(), .item(), torch.no_grad() or torch.tensor(...) in it."
            )
        self._counted += float(count)
        return total

    def count(self, targets: torch.Tensor) -> None:
        return None

    def counted(self) -> float:
        counted, self._counted = self._counted, 0.0
        return counted


def per_one(counted: float) -> float:
    """The factor that turns a sum into a mean; 1 where nothing was counted, so that a sum of 0 stays 0."""
    return 1.0 / counted if counted > 0 else 1.0


def _shape(value: object) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def make_loss(name: str, cross_entropy: Sum = cross_entropy_sum, whole: Whole = lambda output: output) -> StepLoss:
    """`cross_entropy`, `mse` or a user's function.

    cross_entropy: computes the sum from logits that may be sharded.
    whole: gathers such logits, for the other losses.
    """
    if name == "cross_entropy":
        return CrossEntropy(cross_entropy)
    return SquaredError(whole) if name == "mse" else OwnLoss(name, whole)
