"""Weight gradients, added by hand: into memory of their own, and later than the rest where the backward is split.

The input part of a backward (I) runs autograd with `collecting`: Linear and Embedding, and whatever else calls
`later`, leave their weight's part in a queue instead of doing it. The weight part (W) works that queue off. Nothing
runs twice, and what knows nothing of the queue is finished in I.

A parameter may have a `gradient_home`, memory that its gradient shall lie in, and an `on_gradient` that wants to be
told of every addition, and whether it was made by hand. A step begins with `.grad` None; the first addition then writes
the home, so that nothing has to be zeroed, and the home becomes the `.grad`.
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
from torch._C import _get_obj_in_tls, _is_key_in_tls, _stash_obj_in_tls
from torch.nn import functional

from runtime.errors import InvalidCall

Job = Callable[[], None]
_FEW = 128  # rows whose sum may be a product: of many it would be less exact, and no faster
_ENOUGH = 64  # rows of a product that takes most of its time to multiply
_TURNS = 4  # that Linears take at having enough
_here: ContextVar[deque[Job] | None] = ContextVar("collected_weight_gradients", default=None)
_EVERYWHERE = "parallel3d.gradients.deferred"


def _collected() -> deque[Job] | None:
    """The queue of the backward that is under way.

    What is on a GPU autograd runs in a thread of its own, which finds nothing in a ContextVar, but has what torch keeps
    for all threads of a backward. Looking there takes longer.
    """
    queue = _here.get()
    return _get_obj_in_tls(_EVERYWHERE) if queue is None and _is_key_in_tls(_EVERYWHERE) else queue


def later(job: Job) -> None:
    """Do this in the weight part of the backward that is under way; now, if it is not split.

    For the `backward` of a `torch.autograd.Function` of your own: let `job` call `add_to_gradient`, and return None as
    the weight's gradient.
    """
    queue = _collected()
    if queue is None:
        job()
    else:
        queue.append(job)


def is_split() -> bool:
    """Whether the backward that is under way is split."""
    return _collected() is not None


@contextlib.contextmanager
def collecting(queue: deque[Job]) -> Iterator[None]:
    """What is left for later in here goes into this queue."""
    token = _here.set(queue)
    _stash_obj_in_tls(_EVERYWHERE, queue)
    try:
        yield
    finally:
        _here.reset(token)
        _stash_obj_in_tls(_EVERYWHERE, _here.get())


# Adding to a gradient, in a backward or a job: where nothing is differentiated.


def gradient_is_there(parameter: torch.Tensor, by_hand: bool = True) -> None:
    """Something was added to the parameter's gradient."""
    told = getattr(parameter, "on_gradient", None)
    if told is not None:
        told(by_hand)


def autograd_was_there(parameter: torch.Tensor) -> None:
    """A hook for `register_post_accumulate_grad_hook` that tells of what autograd itself adds."""
    gradient_is_there(parameter, by_hand=False)


def add_product(weight: torch.Tensor, gradients: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add a linear's part: the gradients of its outputs, a row each, transposed times its inputs, a row each."""
    if gradients.dtype is not weight.dtype:  # under autocast
        add_to_gradient(weight, torch.mm(gradients.t(), inputs))
        return
    if weight.grad is not None:
        weight.grad.addmm_(gradients.t(), inputs)
    else:
        home = getattr(weight, "gradient_home", None)
        weight.grad = torch.mm(gradients.t(), inputs, out=home)
    gradient_is_there(weight)


def add_rows(bias: torch.Tensor, gradients: torch.Tensor) -> None:
    """Add the sum of all rows."""
    if bias.grad is None:
        home = getattr(bias, "gradient_home", None)
        bias.grad = torch.sum(gradients, 0, dtype=bias.dtype, out=home)
    elif gradients.dtype is bias.dtype and len(gradients) <= _FEW:  # half the time of two calls
        bias.grad.addmv_(gradients.t(), _ones(len(gradients), bias.dtype, bias.device))
    else:
        bias.grad.add_(gradients.sum(0, dtype=bias.dtype))
    gradient_is_there(bias)


@functools.lru_cache(maxsize=16)
def _ones(num: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(num, dtype=dtype, device=device)


def add_to_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add this, as autograd would: it may be kept, unless the parameter's gradient has a home."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    else:
        home = getattr(parameter, "gradient_home", None)
        parameter.grad = gradient.to(parameter.dtype) if home is None else home.copy_(gradient)
    gradient_is_there(parameter)


def add_at_rows(weight: torch.Tensor, indices: torch.Tensor, gradients: torch.Tensor) -> None:
    """Add each row to the row of the weight's gradient that its index names."""
    if weight.grad is None:
        home = getattr(weight, "gradient_home", None)
        weight.grad = torch.zeros_like(weight) if home is None else home.zero_()
    weight.grad.index_add_(0, indices, gradients)
    gradient_is_there(weight)


# Linear and Embedding.

_Own = tuple[torch.Tensor, torch.Tensor | None]
"""A Linear's weight and bias."""


class _Linear(torch.autograd.Function):
    """Weight and bias are no inputs of it: autograd would visit both only to learn that there is nothing to add.

    `anchor` needs a gradient where the values need none, so that there is a backward at all.
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
        ctx.own, ctx.used, ctx.version = own, used, weight._version
        return functional.linear(values, used, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (values,), (weight, bias) = ctx.saved_tensors, ctx.own
        if weight._version != ctx.version:
            raise InvalidCall(f"a Linear's weight {tuple(weight.shape)} was changed between forward and backward.")
        of_values = torch.matmul(gradient, ctx.used) if ctx.needs_input_grad[0] else None
        if gradient.dim() > 2:
            gradient, values = gradient.flatten(0, -2), values.flatten(0, -2)
        queue = _here.get()
        if queue is None and not gradient.is_cpu:
            queue = _collected()
        if queue is None:
            add_linear(weight, bias, gradient, values)
        else:
            queue.append(partial(add_linear, weight, bias, gradient, values))
        return of_values, None, None, None


def add_linear(weight: torch.Tensor, bias: torch.Tensor | None, gradients: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add a linear's part, of the gradients of its outputs and its inputs, a row each."""
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
    """Puts the rows of several small microbatches together. Of few rows, a product takes most of its time to read and
    write the weight's gradient; for more of them it has to do so only once.

    Inside of `gathering`, Linears' parts come here. They are held as long as that is wanted, until there are enough
    rows. Linears take turns at that, so that backwards are about equally long: the first time some have enough sooner.
    """

    def __init__(self) -> None:
        self._held: dict[_Own, _Rows] = {}
        self._known: set[_Own] = set()
        """That were here in this step."""
        self._holds = False

    @contextlib.contextmanager
    def gathering(self, *, holds: bool) -> Iterator[None]:
        """Around a backward, or some of its weight part."""
        token, self._holds = _gatherer.set(self), holds
        try:
            yield
        finally:
            _gatherer.reset(token)

    def add(self, own: _Own, gradients: torch.Tensor, inputs: torch.Tensor) -> None:
        rows = self._held.get(own)
        if rows is None:
            gains = gradients.is_cpu and gradients.dtype is own[0].dtype and 2 * len(gradients) <= _ENOUGH
            enough = self._enough(own)
            if not (self._holds and gains) or len(gradients) >= enough:
                _add_linear(own, gradients, inputs)
                return
            rows = self._held[own] = _Rows(enough)
        rows.take(gradients, inputs)
        if not self._holds or rows.num_missing <= 0:
            self._add(own)

    def _enough(self, own: _Own) -> int:
        """Rows, for the next product."""
        if own in self._known:
            return _ENOUGH
        turn = len(self._known) % _TURNS
        self._known.add(own)
        return _ENOUGH * (turn + 1) // _TURNS

    def _add(self, own: _Own) -> None:
        _add_linear(own, *self._held.pop(own).together())

    def add_all(self) -> None:
        """What is held, too, of weights that later microbatches have not used."""
        with torch.no_grad():
            for own in list(self._held):
                self._add(own)

    def forget(self) -> None:
        """The step before, and what is left of it if it failed."""
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
            held.append(rows.clone() if is_part else rows)  # else all of it would be kept, and nobody may write to it
            self._versions.append(held[-1]._version)
        self.num_missing -= len(gradients)

    def together(self) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(self._gradients, self._inputs, strict=True)
        if [rows._version for pair in pairs for rows in pair] != self._versions:
            raise InvalidCall(
                "a Linear's input was written over after its backward, and before its weight's gradient was added with "
                "those of later microbatches: give each microbatch memory of its own."
            )
        return torch.cat(self._gradients), torch.cat(self._inputs)


_gatherer: ContextVar[Gatherer | None] = ContextVar("gatherer_of_weight_gradients", default=None)


def cast_values(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As autocast does, which leaves float64 alone."""
    return values if values.dtype is torch.float64 else values.to(dtype)


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same for a weight. Where it has an attribute `cast_in_step`, the copy is kept there: whoever set that to
    None, at the beginning of a step, deletes it before the weight changes.

    (What autocast itself keeps must not be made in a Function's forward: others would get it without its history.)
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
        later(partial(_add_embedding, ctx.weight, indices, gradient, ctx.padding))
        return None, None, None


def _add_embedding(weight: torch.Tensor, indices: torch.Tensor, gradient: torch.Tensor, padding: int | None) -> None:
    rows, flat = gradient.reshape(-1, gradient.shape[-1]), indices.reshape(-1)
    if padding is not None:
        rows = rows.masked_fill((flat == padding).unsqueeze(-1), 0)
    add_at_rows(weight, flat, rows)


def adds_by_hand(node: object) -> bool:
    """Whether a node of autograd's graph is a Linear's or an Embedding's, whose gradient autograd does not see."""
    return getattr(type(node), "_forward_cls", None) in (_Linear, _Embedding)


@functools.cache
def anchor() -> torch.Tensor:
    """Needs a gradient and never gets one: as an input of a Function it makes autograd come to the backward. (A weight
    would do, but its hooks would be called too, for nothing.)"""
    return torch.empty(0, requires_grad=True)


def lean_apply(function: type[torch.autograd.Function]) -> Callable[..., torch.Tensor]:
    """The function's `apply` without what that does for functorch, which takes as long as a small product: only for
    where `can_wait` was asked."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


_apply_linear, _apply_embedding = lean_apply(_Linear), lean_apply(_Embedding)


def _linear(module: nn.Linear, values: torch.Tensor) -> torch.Tensor:
    own = module._parameters
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or values.dim() < 2 or not can_wait(weight, bias):
        return nn.Linear.forward(module, values)
    return _apply_linear(values, None if values.requires_grad else anchor(), (weight, bias), autocast_dtype(values))


def _embedding(module: nn.Embedding, indices: torch.Tensor) -> torch.Tensor:
    if can_wait(module.weight) and not (module.sparse or module.max_norm or module.scale_grad_by_freq):
        return _apply_embedding(indices, anchor(), module)
    return nn.Embedding.forward(module, indices)


def autocast_dtype(values: torch.Tensor) -> torch.dtype | None:
    """What a product of these is cast to; None where autocast is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def can_wait(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether gradients can be added to these by hand: each is a leaf, and nobody else has asked to be told of its
    gradient."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or not _is_free(weight):
        return False
    if bias is None:
        return weight.requires_grad
    return _is_free(bias) and (weight.requires_grad or bias.requires_grad)


def _is_free(parameter: torch.Tensor) -> bool:
    hooks = parameter._post_accumulate_grad_hooks
    if hooks and [*hooks.values()] != [autograd_was_there]:
        return False
    return not parameter._backward_hooks and parameter.is_leaf


def split_weight_gradients(module: nn.Module) -> None:
    """Have every Linear and Embedding in here add its weight's part by hand, and later where the backward is split;
    modules derived from these stay as they are, for their forward is their own."""
    for each in module.modules():
        if type(each) is nn.Linear:
            each.forward = partial(_linear, each)  # type: ignore[method-assign]
        elif type(each) is nn.Embedding:
            each.forward = partial(_embedding, each)  # type: ignore[method-assign]
