"""Split backward: weight gradients that wait, so that what another stage waits for comes first.

The input part of a backward (I) runs autograd with `collecting`: Linear and Embedding, and whatever else calls
`later`, leave their weight's part in a queue instead of doing it. The weight part (W) works that queue off. Nothing
runs twice, and what knows nothing of the queue is finished in I.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Job = Callable[[], None]
_collected: ContextVar[deque[Job] | None] = ContextVar("collected_weight_gradients", default=None)


def later(job: Job) -> None:
    """Do this in the weight part of the backward that is under way; now, if it is not split.

    For the `backward` of a `torch.autograd.Function` of your own: let `job` add to the weight's `.grad`, and return
    None as the weight's gradient.
    """
    queue = _collected.get()
    if queue is None:
        job()
    else:
        queue.append(job)


def is_split() -> bool:
    """Whether the backward that is under way is split."""
    return _collected.get() is not None


@contextlib.contextmanager
def collecting(queue: deque[Job]) -> Iterator[None]:
    """What is left for later in here goes into this queue."""
    token = _collected.set(queue)
    try:
        yield
    finally:
        _collected.reset(token)


def add_to_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As autograd would."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        ctx.bias = bias
        return functional.linear(values, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (gradient,) = gradients
        values, weight = ctx.saved_tensors
        bias = ctx.bias if ctx.bias is not None and ctx.bias.requires_grad else None
        later(partial(_add_linear, weight if weight.requires_grad else None, bias, values, gradient))
        return (gradient @ weight if ctx.needs_input_grad[0] else None), None, None


def _add_linear(
    weight: torch.Tensor | None, bias: torch.Tensor | None, values: torch.Tensor, gradient: torch.Tensor
) -> None:
    rows = gradient.reshape(-1, gradient.shape[-1])
    if weight is not None:
        inputs = values.reshape(-1, values.shape[-1])
        if weight.grad is None:
            weight.grad = rows.t() @ inputs
        else:
            weight.grad.addmm_(rows.t(), inputs)
    if bias is not None:
        add_to_gradient(bias, rows.sum(0))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(indices, weight)
        ctx.padding = padding
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        indices, weight = ctx.saved_tensors
        later(partial(_add_embedding, weight, indices, gradients[0], ctx.padding))
        return None, None, None


def _add_embedding(weight: torch.Tensor, indices: torch.Tensor, gradient: torch.Tensor, padding: int | None) -> None:
    rows, flat = gradient.reshape(-1, gradient.shape[-1]), indices.reshape(-1)
    if padding is not None:
        rows = rows.masked_fill((flat == padding).unsqueeze(-1), 0)
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    weight.grad.index_add_(0, flat, rows)


def _linear(module: nn.Linear, values: torch.Tensor) -> torch.Tensor:
    if _can_wait(module.weight, module.bias):
        return _Linear.apply(values, module.weight, module.bias)  # type: ignore[no-any-return, no-untyped-call]
    return nn.Linear.forward(module, values)


def _embedding(module: nn.Embedding, indices: torch.Tensor) -> torch.Tensor:
    if _can_wait(module.weight) and not (module.sparse or module.max_norm or module.scale_grad_by_freq):
        return _Embedding.apply(indices, module.weight, module.padding_idx)  # type: ignore[no-any-return, no-untyped-call]
    return nn.Embedding.forward(module, indices)


def _can_wait(*parameters: torch.Tensor | None) -> bool:
    """Whether gradients can be added to these by hand: each is a leaf, nobody has asked to be told of its gradient, and
    autocast does not change its type."""
    return (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
        and any(each is not None and each.requires_grad for each in parameters)
        and all(each is None or (each.is_leaf and not _has_hooks(each)) for each in parameters)
    )


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def split_weight_gradients(module: nn.Module) -> None:
    """Have every Linear and Embedding in here leave its weight's part for later; modules derived from these stay as
    they are, for their forward is their own."""
    for each in module.modules():
        if type(each) is nn.Linear:
            each.forward = partial(_linear, each)  # type: ignore[method-assign]
        elif type(each) is nn.Embedding:
            each.forward = partial(_embedding, each)  # type: ignore[method-assign]
