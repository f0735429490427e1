"""Linear layers cut over tensor-parallel ranks, and what their ranks exchange.

    whole values ─ column ─ this rank's part ─ … ─ row ─ whole values

A column has some of a Linear's outputs, a row some of its inputs. Between them nothing is exchanged; a row's outputs
are summed over the ranks, and in backward the gradients of what columns got. Columns that got the same tensor (q, k and
v) share one sum.

Where the sequence is cut (dimension 1), "whole values" are those of this rank's slice of it: columns join the slices,
and a row gives a slice of its sum. Backward is the mirror image.

Partial sums are computed straight into registered memory. Under autocast they travel in bfloat16: a product of such
numbers is rounded to it anyway, so float32 would only be twice as many bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from parallel3d.gradients.deferred import (
    Job,
    add_linear,
    anchor,
    autocast_dtype,
    cast_weight,
    is_split,
    later,
    lean_apply,
)
from parallel3d.tensor.partial_gradients import is_part, sum_partial_gradients
from parallel3d.tensor.sharded import Cut, Sharded
from process_groups.tensor_exchange import Outcome, TensorExchange, slice_of
from runtime.errors import InvalidCall

SEQUENCE = 1
"""The dimension that is cut where the sequence is."""


class _Entered(NamedTuple):
    """An input of columns, and what was made of it."""

    values: weakref.ref[torch.Tensor]
    key: object
    shared: torch.Tensor
    entrance: Entrance | None


class Partners:
    """What this rank's cut modules have in common: the exchange with the other ranks, and the input they saw last."""

    def __init__(self, exchange: TensorExchange) -> None:
        self.exchange, self.rank, self.size = exchange, exchange.rank, exchange.size
        self.holder: Entrance | None = None
        """Whose partial sum lies in the room and is not posted yet."""
        self._last: _Entered | None = None

    def room(self, shape: Sequence[int], dtype: torch.dtype, holder: Entrance | None = None) -> torch.Tensor:
        """Memory for this rank's part of the next exchange."""
        if self.holder is not None:
            self.holder.move_out()
        self.holder = holder
        return self.exchange.room(shape, dtype)

    def enter(self, values: torch.Tensor, cuts_sequence: bool) -> tuple[torch.Tensor, Entrance | None]:
        """The values as columns need them, one for all columns that are given this tensor. No entrance where it needs
        no gradient."""
        dtype = product_dtype(values)
        needs_gradient = values.requires_grad and torch.is_grad_enabled()
        if not needs_gradient and not cuts_sequence:
            return values.to(dtype), None
        key = dtype, needs_gradient, cuts_sequence, 0 if values.is_inference() else values._version
        last = self._last
        if last is not None and last.values() is values and last.key == key:
            return last.shared, last.entrance
        if needs_gradient:
            entrance = Entrance(self, cuts_sequence)
            shared = _apply_enter(values, entrance, dtype)
        else:
            entrance, shared = None, self.joined(values.to(dtype))
        self._last = _Entered(weakref.ref(values, self._forget), key, shared, entrance)
        return shared, entrance

    def _forget(self, values: weakref.ref[torch.Tensor]) -> None:
        if self._last is not None and self._last.values is values:
            self._last = None

    def post_sum(self, cuts_sequence: bool) -> None:
        """What lies in the room, of all ranks; or this rank's slice of that."""
        self.holder = None
        if cuts_sequence:
            self.exchange.post(Outcome.REDUCE_SCATTER, SEQUENCE)
        else:
            self.exchange.post(Outcome.ALL_REDUCE)

    def added_up(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' values."""
        self.room(values.shape, values.dtype).copy_(values)
        self.exchange.post(Outcome.ALL_REDUCE)
        return self.exchange.result()

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """The whole sequence, of all ranks' slices."""
        self.room(values.shape, values.dtype).copy_(values)
        self.exchange.post(Outcome.ALL_GATHER, SEQUENCE)
        return self.exchange.result()

    def slice_of(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the sequence, in memory of its own."""
        start, length = slice_of(values.shape, SEQUENCE, self.rank, self.size)
        return values.narrow(SEQUENCE, start, length).clone(memory_format=torch.contiguous_format)


class Entrance:
    """Where whole values go into the columns of one input. In backward the columns' parts of its gradient add up here,
    straight in the room, and their weights' parts wait here until that sum is on its way."""

    __slots__ = ("_jobs", "_part", "cuts_sequence", "partners")

    def __init__(self, partners: Partners, cuts_sequence: bool) -> None:
        self.partners, self.cuts_sequence = partners, cuts_sequence
        self._jobs: list[Job] = []
        self._part: torch.Tensor | None = None

    def add(self, gradients: torch.Tensor, weight: torch.Tensor, shape: torch.Size) -> None:
        """Add a column's part of the gradient of its input, which has this shape."""
        if self._part is None:
            self._part = self.partners.room(shape, gradients.dtype, holder=self)
            torch.mm(gradients, weight, out=self._part.view(-1, shape[-1]))
        else:
            self._part.view(-1, shape[-1]).addmm_(gradients, weight)

    def move_out(self) -> None:
        """Another exchange comes first."""
        assert self._part is not None
        self._part = self._part.clone()

    def put_off(self, job: Job) -> None:
        """Do a weight's part while others are waited for; later still, where the backward is split."""
        if is_split():
            later(job)
        else:
            self._jobs.append(job)

    def total(self) -> torch.Tensor:
        """The sum over columns and ranks."""
        part, jobs, partners = self._part, self._jobs, self.partners
        assert part is not None
        self._part, self._jobs = None, []
        if partners.holder is not self:
            partners.room(part.shape, part.dtype).copy_(part)
        partners.post_sum(self.cuts_sequence)
        for job in jobs:
            job()
        return partners.exchange.result()


class _Enter(torch.autograd.Function):
    """From whole values to columns."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, entrance: Entrance, dtype: torch.dtype) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.entrance = entrance
        if entrance.cuts_sequence:
            return entrance.partners.joined(values.to(dtype))
        # Not a view, which would keep the tensor alive that this one is remembered by.
        return values.detach() if values.dtype is dtype else values.to(dtype)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[torch.Tensor, None, None]:
        # The columns give no gradients: they have added them to the entrance, which is a pass less for each.
        return ctx.entrance.total(), None, None


class _Column(torch.autograd.Function):
    """Weight and bias are no inputs of it, for autograd has nothing to add to them. See `weight_gradients`."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, anchor: torch.Tensor | None, module: ColumnLinear, entrance: Entrance | None
    ) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        used = weight if weight.dtype is values.dtype else cast_weight(weight, values.dtype)
        values = values.contiguous()
        ctx.save_for_backward(values)
        ctx.entrance, ctx.module, ctx.used, ctx.version = entrance, module, used, weight._version
        return functional.linear(values, used, None if bias is None else bias.to(values.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        (values,), module, entrance = ctx.saved_tensors, ctx.module, ctx.entrance
        module.check_unchanged(ctx.version)
        gradients = gradient.reshape(-1, gradient.shape[-1])
        job = partial(add_linear, module.weight, module.bias, gradients, values.view(-1, values.shape[-1]))
        if entrance is None:
            later(job)
        else:
            entrance.add(gradients, ctx.used, values.shape)
            entrance.put_off(job)
        return None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, anchor: torch.Tensor | None, module: RowLinear) -> torch.Tensor:
        weight, bias, partners = module.weight, module.bias, module.partners
        dtype, shape = product_dtype(values), (*values.shape[:-1], weight.shape[0])
        used = weight if weight.dtype is dtype else cast_weight(weight, dtype)
        inputs = values.to(dtype).reshape(-1, values.shape[-1])
        ctx.save_for_backward(inputs)
        ctx.module, ctx.used, ctx.version = module, used, weight._version
        torch.mm(inputs, used.t(), out=partners.room(shape, dtype).view(-1, shape[-1]))
        partners.post_sum(module.cuts_sequence)
        total = partners.exchange.result()
        return total if bias is None else total.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (inputs,), module = ctx.saved_tensors, ctx.module
        module.check_unchanged(ctx.version)
        if module.cuts_sequence:
            gradient = module.partners.joined(gradient)
        gradients = gradient.reshape(-1, gradient.shape[-1])
        # All of them, also for the bias: that every rank has its whole gradient saves a sum over the ranks.
        later(partial(add_linear, module.weight, module.bias, gradients, inputs))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return torch.mm(gradients, ctx.used).view(*gradient.shape[:-1], -1), None, None


class _Split(torch.autograd.Function):
    """From the whole sequence, which every rank has, to this rank's slice of it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, partners: Partners) -> torch.Tensor:
        ctx.partners = partners
        return partners.slice_of(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.partners.joined(gradient), None


class _Join(torch.autograd.Function):
    """From this rank's slice of the sequence to all of it, where every rank does the same with that."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, partners: Partners) -> torch.Tensor:
        ctx.partners = partners
        return partners.joined(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.partners.slice_of(gradient), None


_apply_enter, _apply_column, _apply_row = lean_apply(_Enter), lean_apply(_Column), lean_apply(_Row)
split_sequence, join_sequence = lean_apply(_Split), lean_apply(_Join)
_GIVE_WHOLE_VALUES = (_Row, _Split, _Join)


class _CutLinear(Sharded):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        partners: Partners,
        whole: nn.Module,
        cuts: Mapping[str, Cut],
        known: dict[int, nn.Parameter] | None = None,
        path: str = "",
        *,
        cuts_sequence: bool = False,
    ) -> None:
        """cuts_sequence: whether the whole values around it are those of a slice of the sequence."""
        super().__init__(whole, cuts, known, path)
        self.partners, self.cuts_sequence = partners, cuts_sequence

    def anchor_for(self, values: torch.Tensor) -> torch.Tensor | None:
        """What makes autograd come to the backward, where the values don't."""
        if values.requires_grad or not torch.is_grad_enabled():
            return None
        return anchor() if any(each.requires_grad for each in self.parameters()) else None

    def check_unchanged(self, version: int) -> None:
        if self.weight._version != version:
            raise InvalidCall(f"the weight of {self.path} was changed between forward and backward.")

    def check_input(self, values: torch.Tensor, hint: str) -> None:
        found, wanted = values.shape[-1], self.weight.shape[1]
        if found != wanted:
            raise InvalidCall(f"{self.path} got {found} features, but it has weights for {wanted}. {hint}")


class ColumnLinear(_CutLinear):
    """Some outputs of a Linear."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.check_input(values, "What comes before a column must not be cut: see parallel.tensor_plan.")
        shared, entrance = self.partners.enter(values, self.cuts_sequence)
        return _apply_column(shared, self.anchor_for(shared), self, entrance)


class RowLinear(_CutLinear):
    """Some inputs of a Linear; gives the sum over all ranks."""

    _has_looked = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.check_input(values, "What comes before a row must be a column: see parallel.tensor_plan.")
        if not self._has_looked and values.requires_grad and torch.is_grad_enabled():
            self._has_looked = True
            look_inside(values, self.path, self.partners)
        return _apply_row(values, self.anchor_for(values), self)


def look_inside(values: torch.Tensor, path: str, partners: Partners) -> None:
    """Find parameters that are used between columns and these values, so that their gradients get complete."""
    if not _is_column(values.grad_fn):
        sum_partial_gradients(values, path, _is_column, _is_whole, partners.added_up)


def is_cut(values: torch.Tensor) -> bool:
    """Whether these lie between columns and what joins them again. Without gradients nobody knows."""
    return is_part(values, _is_column, _is_whole)


def _is_column(node: object) -> bool:
    return getattr(type(node), "_forward_cls", None) is _Column


def _is_whole(node: object) -> bool:
    return getattr(type(node), "_forward_cls", None) in _GIVE_WHOLE_VALUES


def product_dtype(values: torch.Tensor) -> torch.dtype:
    """What a product of these is computed in."""
    dtype = autocast_dtype(values)
    return values.dtype if dtype is None or values.dtype is torch.float64 else dtype
