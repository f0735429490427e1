"""Vocabulary-parallel embedding, head and cross-entropy: the logits are never gathered.

Each rank has the rows of some tokens, and the head gives it those tokens' logits. A vocabulary that does not divide
evenly gives the first ranks one row more.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel3d.gradients.deferred import add_at_rows, anchor, defer_weight_grad
from parallel3d.models.losses import IGNORED
from parallel3d.tensor.layers import ColumnLinear, ShardedModule, ShardSlice, reduce_partial_grads
from parallel3d.tensor.mappings import TPContext
from parallel3d.torch_internals import lean_apply
from process_groups.tensor_exchange import Outcome, TensorExchange
from runtime.errors import InvalidCall


def vocab_cross_entropy(
    local_logits: torch.Tensor, targets: torch.Tensor, own: ShardSlice, tp: TPContext
) -> torch.Tensor:
    """`cross_entropy_sum` of sharded logits, the same on every rank; `own` is this rank's slice of the vocabulary. For
    each target, ranks exchange three numbers: the largest logit, the sum of exponentials, and the target's logit."""
    _check_tokens("target", targets, own.whole_size, IGNORED)
    if local_logits.requires_grad:
        reduce_partial_grads(local_logits, "the loss", tp)
    return _apply_cross_entropy(local_logits, targets, own, tp.exchange)


def gather_logits(local_logits: torch.Tensor, own: ShardSlice, tp: TPContext) -> torch.Tensor:
    """All logits, on every rank: for a loss that cannot be computed from sharded ones. Every rank computes it."""
    if local_logits.requires_grad:
        reduce_partial_grads(local_logits, "the loss", tp)
    return _apply_gather(local_logits, own, tp.exchange)


def _check_tokens(what: str, numbers: torch.Tensor, vocabulary: int, ignored: int | None = None) -> None:
    """Refuse numbers outside of the vocabulary: each rank would take them for another rank's."""
    if numbers.device.type != "cpu" or not numbers.numel():  # on a GPU it would wait for all queued kernels
        return
    low, high = map(int, torch.aminmax(numbers))
    if low < 0 and low == ignored:
        others = numbers[numbers != ignored]
        low = int(others.min()) if others.numel() else 0
    if low < 0 or high >= vocabulary:
        raise InvalidCall(
            f"{what} {high if high >= vocabulary else low} is not in the vocabulary of {vocabulary}, "
            f"0 to {vocabulary - 1}."
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, own: ShardSlice, exchange: TensorExchange
    ) -> torch.Tensor:
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        if logits.dtype.itemsize < 4:  # as autocast does
            logits = logits.float()
        logits, targets = logits.reshape(-1, own.size), targets.reshape(-1)
        counts = targets != IGNORED
        local, is_here = _local(targets, own)
        local = local.unsqueeze(-1)
        buffer = exchange.room((1, 3, len(targets)), logits.dtype)
        highest, total, target_logit = buffer[0]
        torch.amax(logits, -1, out=highest)
        highest.clamp_(min=torch.finfo(highest.dtype).min)  # a shard whose logits are all masked has only -inf
        exponentials = torch.sub(logits, highest.unsqueeze(-1)).exp_()
        torch.sum(exponentials, -1, out=total)
        # Masked and not multiplied by 0: the logit may be infinite.
        target_logit.copy_(logits.gather(-1, local).squeeze(-1)).masked_fill_(~is_here, 0)
        exchange.post(Outcome.ALL_GATHER)
        highest_of, total_of, target_logit_of = exchange.result().unbind(1)
        highest = highest_of.amax(0)
        scales = (highest_of - highest).exp_()
        total = (total_of * scales).sum(0)
        if ctx.needs_input_grad[0]:
            ctx.kept = exponentials, scales[exchange.rank].div_(total).mul_(counts), local, is_here
        losses = total.log().add_(highest).sub_(target_logit_of.sum(0))
        return losses.masked_fill_(~counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.kept is None:
            raise RuntimeError("a second backward through the cross-entropy: the first one has overwritten its values.")
        exponentials, shares, local, is_here = ctx.kept
        ctx.kept = None
        # In place: the exponentials are as large as the logits, and not needed afterwards.
        of_logits = exponentials.mul_((shares * gradient).unsqueeze(-1))
        of_logits.scatter_add_(-1, local, (is_here * -gradient).to(exponentials.dtype).unsqueeze(-1))
        return of_logits.view(ctx.shape).to(ctx.dtype), None, None, None


def _local(numbers: torch.Tensor, own: ShardSlice) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of these tokens on this rank, 0 for those of other ranks; and which are on this rank."""
    local = numbers - own.start
    is_here = (local >= 0) & (local < own.size)
    return local.mul_(is_here), is_here


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, own: ShardSlice, exchange: TensorExchange) -> torch.Tensor:
        ctx.slice = ShardSlice(logits.dim() - 1, own.start, own.stop, own.whole_size)
        slices = [ShardSlice.of_rank(0, own.whole_size, rank, exchange.size) for rank in range(exchange.size)]
        # Every rank sends as much as the first, which has the largest shard.
        exchange.room((*logits.shape[:-1], slices[0].size), logits.dtype)[..., : own.size] = logits
        exchange.post(Outcome.ALL_GATHER, logits.dim() - 1)
        joined = exchange.result()
        if all(each.size == slices[0].size for each in slices):
            return joined
        parts = joined.chunk(len(slices), -1)
        return torch.cat([part[..., : each.size] for part, each in zip(parts, slices, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.slice.of(gradient), None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, anchor: torch.Tensor | None, module: VocabEmbedding) -> torch.Tensor:
        weight, tp = module.weight, module.tp
        local, is_here = _local(tokens.reshape(-1), module.shard_slice)
        ctx.save_for_backward(local, is_here)
        ctx.module = module
        buffer = tp.buffer((*tokens.shape, weight.shape[1]), weight.dtype)
        rows = buffer.view(-1, weight.shape[1])
        torch.index_select(weight, 0, local, out=rows)
        rows.masked_fill_(~is_here.unsqueeze(-1), 0)
        tp.post_sum(sequence_parallel=False)
        return tp.exchange.result()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        local, is_here = ctx.saved_tensors
        defer_weight_grad(partial(_add_embedding, ctx.module, local, is_here, gradient))
        return None, None, None


def _add_embedding(module: VocabEmbedding, local: torch.Tensor, is_here: torch.Tensor, gradient: torch.Tensor) -> None:
    if module.padding is not None:
        is_here = is_here & (local != module.padding)
    rows = gradient.reshape(-1, gradient.shape[-1])
    add_at_rows(module.weight, local[is_here], rows[is_here])


_apply_cross_entropy, _apply_gather = lean_apply(_CrossEntropy), lean_apply(_Gather)
_apply_embedding = lean_apply(_Embedding)


class VocabEmbedding(ShardedModule):
    """The rows of some tokens of an Embedding; the output is complete on every rank."""

    weight: nn.Parameter

    def __init__(
        self,
        tp: TPContext,
        whole: nn.Embedding,
        slices: Mapping[str, ShardSlice],
        known: dict[int, nn.Parameter] | None = None,
        path: str = "",
    ) -> None:
        super().__init__(whole, slices, known, path)
        self.tp, self.shard_slice = tp, self.slices["weight"]
        padding = whole.padding_idx
        is_here = padding is not None and self.shard_slice.start <= padding < self.shard_slice.stop
        self.padding = padding - self.shard_slice.start if padding is not None and is_here else None
        """The row that never gets a gradient, if this rank has it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _check_tokens("token", tokens, self.shard_slice.whole_size)
        needs_backward = self.weight.requires_grad and torch.is_grad_enabled()
        return _apply_embedding(tokens, anchor() if needs_backward else None, self)


class VocabHead(ColumnLinear):
    """The logits of this rank's tokens."""

    @property
    def shard_slice(self) -> ShardSlice:
        return self.slices["weight"]
