"""The built-in GPT: pre-norm blocks, learned positions, biases."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from parallel3d.config.sections import GptArgs
from parallel3d.models.decoder import Block, Decoder, heads_of, layered, plan_of, residual, without_heads
from parallel3d.models.layered import LayeredModel
from parallel3d.torch_internals import embedding_without_values
from runtime.errors import InvalidCall


def build_gpt(args: GptArgs) -> LayeredModel:
    """The model, on `meta`."""
    with torch.device("meta"):
        return layered(Gpt(args), plan_of(["up"]), {"model.args.heads": args.heads})


class Gpt(Decoder):
    def __init__(self, args: GptArgs) -> None:
        front, head = Embedding(args), nn.Linear(args.width, args.vocabulary, bias=False)
        if args.tied:
            head.weight = front.tokens.weight
        norm = partial(nn.LayerNorm, args.width)
        blocks = (Block(norm, Attention(args), Mlp(args), args.dropout) for _ in range(args.layers))
        super().__init__(front, blocks, norm(), head)


class Embedding(nn.Module):
    """Token and position embedding. It sees the whole sequence, also with sequence parallelism."""

    def __init__(self, args: GptArgs) -> None:
        super().__init__()
        self.tokens = embedding_without_values(args.vocabulary, args.width)
        self.positions = embedding_without_values(args.sequence, args.width)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length, most = tokens.shape[-1], self.positions.num_embeddings
        if length > most:
            raise InvalidCall(f"samples of {length} tokens, but model.args.sequence = {most}: give no more than that.")
        positions = torch.arange(length, device=tokens.device)
        values: torch.Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return values


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, args: GptArgs) -> None:
        super().__init__()
        width = args.width
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = residual(nn.Linear(width, width), args.layers)
        self.head_width = width // args.heads

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads_of(project(values), self.head_width) for project in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.o(without_heads(mixed))
        return projected


class Mlp(nn.Module):
    def __init__(self, args: GptArgs) -> None:
        super().__init__()
        self.up = nn.Linear(args.width, 4 * args.width)
        self.down = residual(nn.Linear(4 * args.width, args.width), args.layers)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down(functional.gelu(self.up(values)))
        return projected
