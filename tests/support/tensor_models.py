"""Small models cut over tensor-parallel ranks, and what they have to give: loss and gradients of the whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallel3d.gradients.deferred import split_weight_gradients
from parallel3d.gradients.finalize import needs_tp_sum
from parallel3d.models.build import reset_parameters
from parallel3d.models.layered import LayeredModel
from parallel3d.models.losses import cross_entropy_sum
from parallel3d.tensor.layers import shard_slice_of
from parallel3d.tensor.mappings import TPContext
from parallel3d.tensor.shards import Shards, apply_shards, plan_shards
from parallel3d.tensor.vocabulary import gather_logits, vocab_cross_entropy
from process_groups.tensor_exchange import TensorExchange

WIDTH, HEAD, VOCABULARY = 12, 4, 17
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24, bias=bias), nn.Linear(24, WIDTH, bias=bias)

    def forward(self, values):
        return values + self.down(torch.tanh(self.up(self.norm(values))))


class Attention(nn.Module):
    """With a norm of each head, which every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 12 * HEAD) for _ in range(3))
        self.head_norm = nn.LayerNorm(HEAD)
        self.o = nn.Linear(12 * HEAD, WIDTH)

    def forward(self, values):
        heads = (self.head_norm(each(values).unflatten(-1, (-1, HEAD))) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads), is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Parallel(nn.Module):
    """Attention and MLP of the same input, so that a row's backward comes between those of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, values):
        inputs = self.norm(values)
        return values + self.attention(inputs) + self.down(torch.tanh(self.up(inputs)))


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3), nn.Embedding(24, WIDTH)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))


class Whole(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], *, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.front, self.blocks = Front(), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.front.tokens.weight


PLAN = {
    "front.tokens": "vocab",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "blocks.*.attention.[qkv]": "column",
    "blocks.*.attention.o": "row",
    "head": "vocab",
}


def plan_for(module: nn.Module) -> dict[str, str]:
    """The part of the plan that is for this model."""
    names = [name.split(".") for name, _ in module.named_modules()]
    ends = {".".join(name[2:]) if name[0] == "blocks" else ".".join(name) for name in names}
    wanted = {"front.tokens": "front.tokens", "up": "blocks.*.up", "down": "blocks.*.down", "head": "head"}
    wanted |= {"attention.q": "blocks.*.attention.[qkv]", "attention.o": "blocks.*.attention.o"}
    return {pattern: PLAN[pattern] for end, pattern in wanted.items() if end in ends}


def row_of(whole: Whole, plan: Mapping[str, str] | None = None) -> LayeredModel:
    blocks = tuple(f"blocks.{index}" for index in range(len(whole.blocks)))
    own = plan_for(whole) if plan is None else plan
    return LayeredModel(whole, ("front",), blocks, ("norm", "head"), own, reset_parameters)


def make(*blocks: type[nn.Module], dtype: torch.dtype = torch.float64, **options: Any) -> LayeredModel:
    """The same model every time."""
    torch.manual_seed(5)
    return row_of(Whole([block() for block in blocks], **options).to(dtype))


def batch(number: int = 0, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """With targets that are ignored."""
    generator = torch.Generator().manual_seed(number)
    tokens, targets = torch.randint(0, VOCABULARY, (2, 2, length), generator=generator)
    targets[0, 3] = targets[1, :2] = -100
    return tokens, targets


class CutModel:
    """A sharded model, as one rank has it."""

    def __init__(self, model: LayeredModel, exchange: TensorExchange, *, sequence_parallel: bool = False) -> None:
        self.model, self.layers = model, (len(model.layers),)
        self.shards: Shards = plan_shards(
            model, model.plan, exchange.size, sequence_parallel=sequence_parallel, layers_per_stage=self.layers
        )
        tp = apply_shards(model, self.shards, exchange)
        assert tp is not None
        self.tp: TPContext = tp
        self.stage = model.stage(self.layers, 0)
        split_weight_gradients(self.stage)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        cut = self.shards.logits_slice(self.tp.rank)
        assert cut is not None
        return vocab_cross_entropy(logits, targets, cut, self.tp)

    def gathered_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        cut = self.shards.logits_slice(self.tp.rank)
        assert cut is not None
        return cross_entropy_sum(gather_logits(logits, cut, self.tp), targets)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Complete ones, by the paths of parameters."""
        return {
            name: self.tp.all_reduce(each.grad) if needs_tp_sum(each) else each.grad
            for name, each in self.model.whole.named_parameters()
            if each.grad is not None
        }


def whole_step(model: LayeredModel, *numbers: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole model, by autograd alone."""
    stage, total = model.stage((len(model.layers),), 0), 0.0
    for tokens, targets in map(batch, numbers or (0,)):
        loss = cross_entropy_sum(stage(tokens), targets)
        loss.backward()
        total += loss.item()
    return total, {name: each.grad for name, each in model.whole.named_parameters() if each.grad is not None}


def check_equal(
    cut: CutModel, loss: float, expected: tuple[float, Mapping[str, torch.Tensor]], tolerance: float = 1e-12
) -> None:
    """Loss, and gradients of this rank's parts."""
    assert abs(loss - expected[0]) <= tolerance * abs(expected[0])
    parameters, found = dict(cut.model.whole.named_parameters()), cut.gradients()
    assert found.keys() == expected[1].keys()
    for name, gradient in found.items():
        own = shard_slice_of(parameters[name])
        wanted = expected[1][name] if own is None else own.of(expected[1][name])
        torch.testing.assert_close(
            gradient, wanted, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_model(
    exchange: TensorExchange, model: LayeredModel, expected: tuple[float, Mapping[str, torch.Tensor]], **options: Any
) -> CutModel:
    """Shard a copy of this model and compare."""
    cut = CutModel(copy.deepcopy(model), exchange, **options)
    tokens, targets = batch()
    loss = cut.loss(cut.stage(tokens), targets)
    loss.backward()
    check_equal(cut, loss.item(), expected)
    return cut
