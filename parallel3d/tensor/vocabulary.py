"""A vocabulary cut over tensor-parallel ranks: embedding, head, and the cross-entropy of logits that nobody gathers.

Each rank has the rows of some tokens, and the head gives it those tokens' logits. A vocabulary that does not divide is
cut unevenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from parallel3d.gradients.deferred import add_at_rows, anchor, later, lean_apply
from parallel3d.tensor.layers import ColumnLinear, Partners, look_inside
from parallel3d.tensor.sharded import Cut, Sharded
from process_groups.tensor_exchange import Outcome, TensorExchange
from runtime.errors import InvalidCall

IGNORED = -100
"""A target that does not count."""


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over the targets that are not ignored. The last dimension of the logits is the vocabulary."""
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def vocab_cross_entropy(
    local_logits: torch.Tensor, targets: torch.Tensor, cut: Cut, partners: Partners
) -> torch.Tensor:
    """The same of this rank's logits, which are the `cut` of the vocabulary; on every rank the sum of all. One small
    exchange: of each target the largest logit, the sum of powers and the target's own."""
    _check_numbers("target", targets, cut.whole_size, IGNORED)
    if local_logits.requires_grad:
        look_inside(local_logits, "the loss", partners)
    return _apply_cross_entropy(local_logits, targets, cut, partners.exchange)


def gather_logits(local_logits: torch.Tensor, cut: Cut, partners: Partners) -> torch.Tensor:
    """All logits, on every rank, for a loss that is not made for a part of them; every rank computes it."""
    if local_logits.requires_grad:
        look_inside(local_logits, "the loss", partners)
    return _apply_gather(local_logits, cut, partners.exchange)


def _check_numbers(what: str, numbers: torch.Tensor, vocabulary: int, ignored: int | None = None) -> None:
    """A number that no rank has would be taken for one that another rank has."""
    if numbers.device.type != "cpu" or not numbers.numel():  # elsewhere a look would wait for all that is queued
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
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, cut: Cut, exchange: TensorExchange
    ) -> torch.Tensor:
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        if logits.dtype.itemsize < 4:  # as autocast does
            logits = logits.float()
        logits, targets = logits.reshape(-1, cut.size), targets.reshape(-1)
        counts = targets != IGNORED
        local, is_here = _local(targets, cut)
        local = local.unsqueeze(-1)
        room = exchange.room((1, 3, len(targets)), logits.dtype)
        highest, total, own = room[0]
        torch.amax(logits, -1, out=highest)
        highest.clamp_(min=torch.finfo(highest.dtype).min)  # of a slice that is masked out, all minus infinity
        powers = torch.sub(logits, highest.unsqueeze(-1)).exp_()
        torch.sum(powers, -1, out=total)
        own.copy_(logits.gather(-1, local).squeeze(-1)).masked_fill_(~is_here, 0)  # not times 0: it may be infinite
        exchange.post(Outcome.ALL_GATHER)
        highest_of, total_of, own_of = exchange.result().unbind(1)
        highest = highest_of.amax(0)
        scales = (highest_of - highest).exp_()
        total = (total_of * scales).sum(0)
        if ctx.needs_input_grad[0]:
            ctx.kept = powers, scales[exchange.rank].div_(total).mul_(counts), local, is_here
        losses = total.log().add_(highest).sub_(own_of.sum(0))
        return losses.masked_fill_(~counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.kept is None:
            raise RuntimeError("a second backward through the cross-entropy: what it needs was overwritten.")
        powers, shares, local, is_here = ctx.kept
        ctx.kept = None
        # In place: the powers are as large as the logits, and of no use afterwards.
        of_logits = powers.mul_((shares * gradient).unsqueeze(-1))
        of_logits.scatter_add_(-1, local, (is_here * -gradient).to(powers.dtype).unsqueeze(-1))
        return of_logits.view(ctx.shape).to(ctx.dtype), None, None, None


def _local(numbers: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows on this rank, 0 for what is not here; and what is here."""
    local = numbers - cut.start
    is_here = (local >= 0) & (local < cut.size)
    return local.mul_(is_here), is_here


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, cut: Cut, exchange: TensorExchange) -> torch.Tensor:
        ctx.cut = Cut(logits.dim() - 1, cut.start, cut.stop, cut.whole_size)
        cuts = [Cut.of_rank(0, cut.whole_size, rank, exchange.size) for rank in range(exchange.size)]
        # All parts have the room of the largest, which is the first.
        exchange.room((*logits.shape[:-1], cuts[0].size), logits.dtype)[..., : cut.size] = logits
        exchange.post(Outcome.ALL_GATHER, logits.dim() - 1)
        joined = exchange.result()
        if all(each.size == cuts[0].size for each in cuts):
            return joined
        parts = joined.chunk(len(cuts), -1)
        return torch.cat([part[..., : each.size] for part, each in zip(parts, cuts, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.cut.of(gradient), None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, anchor: torch.Tensor | None, module: VocabEmbedding) -> torch.Tensor:
        weight, partners = module.weight, module.partners
        local, is_here = _local(tokens.reshape(-1), module.cut)
        ctx.save_for_backward(local, is_here)
        ctx.module = module
        room = partners.room((*tokens.shape, weight.shape[1]), weight.dtype)
        rows = room.view(-1, weight.shape[1])
        torch.index_select(weight, 0, local, out=rows)
        rows.masked_fill_(~is_here.unsqueeze(-1), 0)
        partners.post_sum(cuts_sequence=False)
        return partners.exchange.result()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        local, is_here = ctx.saved_tensors
        later(partial(_add_embedding, ctx.module, local, is_here, gradient))
        return None, None, None


def _add_embedding(module: VocabEmbedding, local: torch.Tensor, is_here: torch.Tensor, gradient: torch.Tensor) -> None:
    if module.padding is not None:
        is_here = is_here & (local != module.padding)
    rows = gradient.reshape(-1, gradient.shape[-1])
    add_at_rows(module.weight, local[is_here], rows[is_here])


_apply_cross_entropy, _apply_gather = lean_apply(_CrossEntropy), lean_apply(_Gather)
_apply_embedding = lean_apply(_Embedding)


class VocabEmbedding(Sharded):
    """The rows of some tokens; gives all tokens' rows on every rank."""

    weight: nn.Parameter

    def __init__(
        self,
        partners: Partners,
        whole: nn.Embedding,
        cuts: Mapping[str, Cut],
        known: dict[int, nn.Parameter] | None = None,
        path: str = "",
    ) -> None:
        super().__init__(whole, cuts, known, path)
        self.partners, self.cut = partners, self.cuts["weight"]
        padding = whole.padding_idx
        is_here = padding is not None and self.cut.start <= padding < self.cut.stop
        self.padding = padding - self.cut.start if padding is not None and is_here else None
        """The row, if it is here, that never gets a gradient."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _check_numbers("token", tokens, self.cut.whole_size)
        needs_backward = self.weight.requires_grad and torch.is_grad_enabled()
        return _apply_embedding(tokens, anchor() if needs_backward else None, self)


class VocabHead(ColumnLinear):
    """Gives the logits of this rank's tokens."""

    @property
    def cut(self) -> Cut:
        return self.cuts["weight"]
