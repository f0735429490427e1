"""Tensor-parallel mappings: what the ranks exchange where activations go into and out of sharded layers.

                      forward                      backward
    column input      identity (all-gather)        all-reduce (reduce-scatter)
    row output        all-reduce (reduce-scatter)  identity (all-gather)
    split_sequence    this rank's slice            all-gather
    gather_sequence   all-gather                   this rank's slice

In parentheses: with sequence parallelism, where the activations around columns and rows are slices of dimension 1.

Partial sums are computed straight into registered memory. Under autocast they are exchanged in bfloat16: a product of
such numbers is rounded to it anyway, so float32 would only be twice as many bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from parallel3d.gradients.deferred import Job, autocast_dtype, defer_weight_grad, is_split
from parallel3d.torch_internals import lean_apply, version_of
from process_groups.tensor_exchange import Outcome, TensorExchange, slice_of

SEQUENCE_DIM = 1
"""The dimension that sequence parallelism shards."""


class _LastInput(NamedTuple):
    """The input that columns were given last, and what was made of it."""

    values: weakref.ref[torch.Tensor]
    key: object
    shared: torch.Tensor
    column_input: ColumnInput | None


class TPContext:
    """What the sharded modules of a rank share: the exchange with the other ranks, and the last input of columns."""

    def __init__(self, exchange: TensorExchange) -> None:
        self.exchange, self.rank, self.size = exchange, exchange.rank, exchange.size
        self.pending: ColumnInput | None = None
        """The column input whose partial sum is in the exchange's buffer and not posted yet."""
        self._last: _LastInput | None = None

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, pending: ColumnInput | None = None) -> torch.Tensor:
        """Memory for this rank's part of the next exchange."""
        if self.pending is not None:
            self.pending.leave_buffer()
        self.pending = pending
        return self.exchange.room(shape, dtype)

    def column_input(self, values: torch.Tensor, sequence_parallel: bool) -> tuple[torch.Tensor, ColumnInput | None]:
        """The values as columns need them; columns that are given the same tensor (q, k and v) share one result.
        No ColumnInput where the values need no gradient."""
        dtype = product_dtype(values)
        needs_gradient = values.requires_grad and torch.is_grad_enabled()
        if not needs_gradient and not sequence_parallel:
            return values.to(dtype), None
        key = dtype, needs_gradient, sequence_parallel, 0 if values.is_inference() else version_of(values)
        last = self._last
        if last is not None and last.values() is values and last.key == key:
            return last.shared, last.column_input
        if needs_gradient:
            column_input = ColumnInput(self, sequence_parallel)
            shared = _apply_column_input(values, column_input, dtype)
        else:
            column_input, shared = None, self.all_gather(values.to(dtype))
        self._last = _LastInput(weakref.ref(values, self._forget), key, shared, column_input)
        return shared, column_input

    def _forget(self, values: weakref.ref[torch.Tensor]) -> None:
        if self._last is not None and self._last.values is values:
            self._last = None

    def post_sum(self, sequence_parallel: bool) -> None:
        """Start the all-reduce of what is in the buffer; a reduce-scatter with sequence parallelism."""
        self.pending = None
        if sequence_parallel:
            self.exchange.post(Outcome.REDUCE_SCATTER, SEQUENCE_DIM)
        else:
            self.exchange.post(Outcome.ALL_REDUCE)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' values."""
        self.buffer(values.shape, values.dtype).copy_(values)
        self.exchange.post(Outcome.ALL_REDUCE)
        return self.exchange.result()

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """The whole sequence, from all ranks' slices."""
        self.buffer(values.shape, values.dtype).copy_(values)
        self.exchange.post(Outcome.ALL_GATHER, SEQUENCE_DIM)
        return self.exchange.result()

    def sequence_slice(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's slice of the sequence."""
        start, length = slice_of(values.shape, SEQUENCE_DIM, self.rank, self.size)
        return values.narrow(SEQUENCE_DIM, start, length).clone(memory_format=torch.contiguous_format)


class ColumnInput:
    """One input of columns. In backward the columns' partial gradients of it add up here, straight in the exchange's
    buffer, and their weight gradients wait here until that sum is on its way."""

    __slots__ = ("_jobs", "_partial", "sequence_parallel", "tp")

    def __init__(self, tp: TPContext, sequence_parallel: bool) -> None:
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self._jobs: list[Job] = []
        self._partial: torch.Tensor | None = None

    def add(self, gradients: torch.Tensor, weight: torch.Tensor, shape: torch.Size) -> None:
        """Add a column's partial gradient of the input, which has this shape."""
        if self._partial is None:
            self._partial = self.tp.buffer(shape, gradients.dtype, pending=self)
            torch.mm(gradients, weight, out=self._partial.view(-1, shape[-1]))
        else:
            self._partial.view(-1, shape[-1]).addmm_(gradients, weight)

    def leave_buffer(self) -> None:
        """Copy the partial sum out of the buffer, which another exchange needs first."""
        assert self._partial is not None
        self._partial = self._partial.clone()

    def overlap(self, job: Job) -> None:
        """Compute a weight gradient while the sum is exchanged; in the weight part, where the backward is split."""
        if is_split():
            defer_weight_grad(job)
        else:
            self._jobs.append(job)

    def reduced(self) -> torch.Tensor:
        """The gradient of the input: the sum over columns and ranks."""
        values, jobs, tp = self._partial, self._jobs, self.tp
        assert values is not None
        self._partial, self._jobs = None, []
        if tp.pending is not self:
            tp.buffer(values.shape, values.dtype).copy_(values)
        tp.post_sum(self.sequence_parallel)
        for job in jobs:
            job()
        return tp.exchange.result()


class _CopyToColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, column_input: ColumnInput, dtype: torch.dtype) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.column_input = column_input
        if column_input.sequence_parallel:
            return column_input.tp.all_gather(values.to(dtype))
        # Not a view, which would keep the tensor alive by which TPContext remembers this one.
        return values.detach() if values.dtype is dtype else values.to(dtype)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[torch.Tensor, None, None]:
        # The columns return no gradients: each has added its own to the ColumnInput, which saves a pass over memory.
        return ctx.column_input.reduced(), None, None


class SplitSequence(torch.autograd.Function):
    """From the whole sequence, the same on every rank, to this rank's slice."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, tp: TPContext) -> torch.Tensor:
        ctx.tp = tp
        return tp.sequence_slice(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tp.all_gather(gradient), None


class GatherSequence(torch.autograd.Function):
    """From this rank's slice to the whole sequence, with which every rank then computes the same."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, tp: TPContext) -> torch.Tensor:
        ctx.tp = tp
        return tp.all_gather(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tp.sequence_slice(gradient), None


_apply_column_input = lean_apply(_CopyToColumns)
split_sequence, gather_sequence = lean_apply(SplitSequence), lean_apply(GatherSequence)


def product_dtype(values: torch.Tensor) -> torch.dtype:
    """What a matrix product of these values is computed in."""
    dtype = autocast_dtype(values)
    return values.dtype if dtype is None or values.dtype is torch.float64 else dtype
