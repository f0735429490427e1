"""Deferred weight gradients: added without autograd, and after the input gradients where the backward is split.

The input part of a backward (I) runs autograd with `collecting`: Linear, Embedding and everything else that calls
`defer_weight_grad` put the computation of their weight gradients into a queue. The weight part (W) runs that queue.
Nothing is computed twice; gradients of modules that defer nothing are complete after I.

A parameter may have a `main_grad`, memory for its gradient, and an `on_gradient` that is called after every addition
with whether it was made here (True) or by autograd (False). A step begins with `.grad` None; the first addition
overwrites `main_grad`, which then becomes `.grad`: nothing has to be zeroed.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from parallel3d.torch_internals import (
    are_functorch_transforms_active,
    backward_hooks,
    function_of_node,
    get_obj_in_tls,
    is_any_autocast_enabled,
    is_key_in_tls,
    lean_apply,
    parameters_of,
    post_accumulate_grad_hooks,
    stash_obj_in_tls,
    version_of,
)
from runtime.errors import InvalidCall

Job = Callable[[], None]
_MOST_ROWS_BY_PRODUCT = 128  # a bias gradient of more rows is less exact as a product with ones, and no faster
_ENOUGH_ROWS = 64  # from here on, a weight gradient spends most of its time multiplying, not reading and writing
_NUM_TURNS = 4  # groups of Linears that reach enough rows in different microbatches
_queue: ContextVar[deque[Job] | None] = ContextVar("collected_weight_gradients", default=None)
_TLS_KEY = "parallel3d.gradients.deferred"


def _collected() -> deque[Job] | None:
    """The queue of the running backward; None if it is not split.

    Autograd runs the backward of a GPU in a thread of its own, where a ContextVar is empty; torch's own thread-local
    state reaches it, but takes longer to read.
    """
    queue = _queue.get()
    return get_obj_in_tls(_TLS_KEY) if queue is None and is_key_in_tls(_TLS_KEY) else queue


def defer_weight_grad(job: Job) -> None:
    """Run `job` in the weight part of the running backward; now, if it is not split.

    For the `backward` of a `torch.autograd.Function` of your own: `job` calls `add_to_gradient`, and `backward` returns
    None as the weight's gradient.
    """
    queue = _collected()
    if queue is None:
        job()
    else:
        queue.append(job)


def is_split() -> bool:
    """Whether the running backward is split."""
    return _collected() is not None


@contextlib.contextmanager
def collecting(queue: deque[Job]) -> Iterator[None]:
    """Weight gradients that are deferred inside go into this queue."""
    token = _queue.set(queue)
    stash_obj_in_tls(_TLS_KEY, queue)
    try:
        yield
    finally:
        _queue.reset(token)
        stash_obj_in_tls(_TLS_KEY, _queue.get())


# Adding to a gradient: call these in a backward or a job, where autograd records nothing.


def notify_grad_added(parameter: torch.Tensor, by_hand: bool = True) -> None:
    """Call the parameter's `on_gradient`, after something was added to its gradient."""
    on_gradient = getattr(parameter, "on_gradient", None)
    if on_gradient is not None:
        on_gradient(by_hand)


def on_autograd_grad(parameter: torch.Tensor) -> None:
    """A hook for `register_post_accumulate_grad_hook`: autograd has added to the gradient."""
    notify_grad_added(parameter, by_hand=False)


def add_product(weight: torch.Tensor, gradients: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add the weight gradient of a Linear: transposed output gradients times inputs, both with a row per token."""
    if gradients.dtype is not weight.dtype:  # under autocast
        add_to_gradient(weight, torch.mm(gradients.t(), inputs))
        return
    if weight.grad is not None:
        weight.grad.addmm_(gradients.t(), inputs)
    else:
        main_grad = getattr(weight, "main_grad", None)
        weight.grad = torch.mm(gradients.t(), inputs, out=main_grad)
    notify_grad_added(weight)


def add_rows(bias: torch.Tensor, gradients: torch.Tensor) -> None:
    """Add the sum of all rows, the gradient of a bias."""
    if bias.grad is None:
        main_grad = getattr(bias, "main_grad", None)
        bias.grad = torch.sum(gradients, 0, dtype=bias.dtype, out=main_grad)
    elif gradients.dtype is bias.dtype and len(gradients) <= _MOST_ROWS_BY_PRODUCT:  # half the time of two calls
        bias.grad.addmv_(gradients.t(), _ones(len(gradients), bias.dtype, bias.device))
    else:
        bias.grad.add_(gradients.sum(0, dtype=bias.dtype))
    notify_grad_added(bias)


@functools.lru_cache(maxsize=16)
def _ones(num: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(num, dtype=dtype, device=device)


def add_to_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient, as autograd would. Without a `main_grad` the tensor itself may become `.grad`."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    else:
        main_grad = getattr(parameter, "main_grad", None)
        parameter.grad = gradient.to(parameter.dtype) if main_grad is None else main_grad.copy_(gradient)
    notify_grad_added(parameter)


def add_at_rows(weight: torch.Tensor, indices: torch.Tensor, gradients: torch.Tensor) -> None:
    """Add each row to the row of the weight's gradient that its index says."""
    if weight.grad is None:
        main_grad = getattr(weight, "main_grad", None)
        weight.grad = torch.zeros_like(weight) if main_grad is None else main_grad.zero_()
    weight.grad.index_add_(0, indices, gradients)
    notify_grad_added(weight)


# Linear and Embedding.

_Own = tuple[torch.Tensor, torch.Tensor | None]
"""A Linear's weight and bias."""


class _Linear(torch.autograd.Function):
    """Weight and bias are no inputs: autograd would visit both, only to find nothing to add.

    `anchor` needs a gradient where the values need none, so that autograd runs the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, anchor: torch.Tensor | None, own: _Own, dtype: torch.dtype | None
    ) -> torch.Tensor:
        weight, bias = own
        used = weight
        if dtype is not None:
            values, used = cast_values(values, dtype), cast_weight(weight, dtype)
            bias = None if bias is None else cast_values(bias, dtype)
        if values.dim() > 2:
            values = values.contiguous()
        ctx.save_for_backward(values)
        ctx.own, ctx.used, ctx.version = own, used, version_of(weight)
        return functional.linear(values, used, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (values,), (weight, bias) = ctx.saved_tensors, ctx.own
        if version_of(weight) != ctx.version:
            raise InvalidCall(f"a Linear's weight {tuple(weight.shape)} was changed between forward and backward.")
        of_values = torch.matmul(gradient, ctx.used) if ctx.needs_input_grad[0] else None
        if gradient.dim() > 2:
            gradient, values = gradient.flatten(0, -2), values.flatten(0, -2)
        queue = _queue.get()
        if queue is None and not gradient.is_cpu:
            queue = _collected()
        if queue is None:
            add_linear(weight, bias, gradient, values)
        else:
            queue.append(partial(add_linear, weight, bias, gradient, values))
        return of_values, None, None, None


def add_linear(weight: torch.Tensor, bias: torch.Tensor | None, gradients: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add the gradients of a Linear's weight and bias, from output gradients and inputs with a row per token."""
    gatherer = _gatherer.get()
    if gatherer is None:
        _add_linear((weight, bias), gradients, inputs)
    else:
        gatherer.add((weight, bias), gradients, inputs)


def _add_linear(own: _Own, gradients: torch.Tensor, inputs: torch.Tensor) -> None:
    weight, bias = own
    if weight.requires_grad:
        add_product(weight, gradients, inputs)
    if bias is not None and bias.requires_grad:
        add_rows(bias, gradients)


class Gatherer:
    """Joins the rows of several small microbatches. With few rows, the product of a weight gradient spends most of its
    time reading and writing the gradient; joined rows read and write it once.

    Inside of `gathering`, Linears add their gradients through this. With `holds`, rows are held until there are enough.
    The first time, some Linears have enough sooner than others, so that all backwards take about equally long.
    """

    def __init__(self) -> None:
        self._held: dict[_Own, _Rows] = {}
        self._known: set[_Own] = set()
        """Linears that were added in this step."""
        self._holds = False

    @contextlib.contextmanager
    def gathering(self, *, holds: bool) -> Iterator[None]:
        """Around a backward, or some jobs of its weight part."""
        token, self._holds = _gatherer.set(self), holds
        try:
            yield
        finally:
            _gatherer.reset(token)

    def add(self, own: _Own, gradients: torch.Tensor, inputs: torch.Tensor) -> None:
        rows = self._held.get(own)
        if rows is None:
            gains = gradients.is_cpu and gradients.dtype is own[0].dtype and 2 * len(gradients) <= _ENOUGH_ROWS
            enough = self._enough(own)
            if not (self._holds and gains) or len(gradients) >= enough:
                _add_linear(own, gradients, inputs)
                return
            rows = self._held[own] = _Rows(enough)
        rows.take(gradients, inputs)
        if not self._holds or rows.num_missing <= 0:
            self._add(own)

    def _enough(self, own: _Own) -> int:
        """Rows that the next product waits for."""
        if own in self._known:
            return _ENOUGH_ROWS
        turn = len(self._known) % _NUM_TURNS
        self._known.add(own)
        return _ENOUGH_ROWS * (turn + 1) // _NUM_TURNS

    def _add(self, own: _Own) -> None:
        _add_linear(own, *self._held.pop(own).together())

    def add_all(self) -> None:
        """Add what is still held, of weights that later microbatches did not use."""
        with torch.no_grad():
            for own in list(self._held):
                self._add(own)

    def forget(self) -> None:
        """Forget the step before, and what is still held if it failed."""
        self._held.clear()
        self._known.clear()


class _Rows:
    __slots__ = ("_gradients", "_inputs", "_versions", "num_missing")

    def __init__(self, enough: int) -> None:
        self._gradients: list[torch.Tensor] = []
        self._inputs: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.num_missing = enough

    def take(self, gradients: torch.Tensor, inputs: torch.Tensor) -> None:
        for rows, held in ((gradients, self._gradients), (inputs, self._inputs)):
            is_part = rows.untyped_storage().nbytes() > rows.nbytes
            held.append(
                rows.clone() if is_part else rows
            )  # a view would keep all of its memory, which others may write to
            self._versions.append(version_of(held[-1]))
        self.num_missing -= len(gradients)

    def together(self) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(self._gradients, self._inputs, strict=True)
        if [version_of(rows) for pair in pairs for rows in pair] != self._versions:
            raise InvalidCall(
                "a Linear's input was overwritten after its backward, but before its weight gradient was added with "
                "those of later microbatches: give each microbatch memory of its own."
            )
        return torch.cat(self._gradients), torch.cat(self._inputs)


_gatherer: ContextVar[Gatherer | None] = ContextVar("gatherer_of_weight_gradients", default=None)


def cast_values(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As autocast does, which leaves float64 alone."""
    return values if values.dtype is torch.float64 else values.to(dtype)


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same for a weight. If it has an attribute `cast_in_step`, the copy is kept there. GradientSync sets that to
    None when a step begins, and deletes it before the weight changes.

    (Autocast's own cache must not be filled in a Function's forward: others would get the copy without its history.)
    """
    kept: torch.Tensor | None = getattr(weight, "cast_in_step", None)
    if kept is None or kept.dtype is not dtype:
        kept = cast_values(weight.detach(), dtype)
        if hasattr(weight, "cast_in_step"):
            weight.cast_in_step = kept
    return kept


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, anchor: torch.Tensor, module: nn.Embedding) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding = module.weight, module.padding_idx
        return functional.embedding(indices, module.weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        (indices,) = ctx.saved_tensors
        defer_weight_grad(partial(_add_embedding, ctx.weight, indices, gradient, ctx.padding))
        return None, None, None


def _add_embedding(weight: torch.Tensor, indices: torch.Tensor, gradient: torch.Tensor, padding: int | None) -> None:
    rows, flat = gradient.reshape(-1, gradient.shape[-1]), indices.reshape(-1)
    if padding is not None:
        rows = rows.masked_fill((flat == padding).unsqueeze(-1), 0)
    add_at_rows(weight, flat, rows)


def adds_by_hand(node: object) -> bool:
    """Whether a node of the graph is a Linear's or an Embedding's, whose weight gradient autograd does not see."""
    return function_of_node(node) in (_Linear, _Embedding)


@functools.cache
def anchor() -> torch.Tensor:
    """A tensor that needs a gradient and never gets one: as an input of a Function it makes autograd run the backward.
    (A weight would do so too, but its hooks would be called for nothing.)"""
    return torch.empty(0, requires_grad=True)


_apply_linear, _apply_embedding = lean_apply(_Linear), lean_apply(_Embedding)


def _linear(module: nn.Linear, values: torch.Tensor) -> torch.Tensor:
    own = parameters_of(module)
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or values.dim() < 2 or not can_defer(weight, bias):
        return nn.Linear.forward(module, values)
    return _apply_linear(values, None if values.requires_grad else anchor(), (weight, bias), autocast_dtype(values))


def _embedding(module: nn.Embedding, indices: torch.Tensor) -> torch.Tensor:
    if can_defer(module.weight) and not (module.sparse or module.max_norm or module.scale_grad_by_freq):
        return _apply_embedding(indices, anchor(), module)
    return nn.Embedding.forward(module, indices)


def autocast_dtype(values: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast computes a product of these values in; None where it is off."""
    if not is_any_autocast_enabled():
        return None
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def can_defer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether gradients can be added without autograd: each is a leaf without hooks other than `on_autograd_grad`."""
    if not torch.is_grad_enabled() or are_functorch_transforms_active() or not _is_free(weight):
        return False
    if bias is None:
        return weight.requires_grad
    return _is_free(bias) and (weight.requires_grad or bias.requires_grad)


def _is_free(parameter: torch.Tensor) -> bool:
    hooks = post_accumulate_grad_hooks(parameter)
    if hooks and [*hooks.values()] != [on_autograd_grad]:
        return False
    return not backward_hooks(parameter) and parameter.is_leaf


def split_weight_gradients(module: nn.Module) -> None:
    """Have every Linear and Embedding inside add its weight gradient without autograd, deferred where the backward is
    split. Subclasses stay as they are: they may have a forward of their own."""
    for each in module.modules():
        if type(each) is nn.Linear:
            each.forward = partial(_linear, each)  # type: ignore[method-assign]
        elif type(each) is nn.Embedding:
            each.forward = partial(_embedding, each)  # type: ignore[method-assign]
