"""What the built-in decoders share: blocks, tensor-parallel plan and initialization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from parallel3d.models.layered import LayeredModel

# As in GPT-2.
_DEVIATION = 0.02


class Decoder(nn.Module):
    """From tokens to logits."""

    def __init__(self, embedding: nn.Module, blocks: Iterable[nn.Module], norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embedding(tokens)
        for block in self.blocks:
            values = block(values)
        logits: torch.Tensor = self.head(self.norm(values))
        return logits


class Block(nn.Module):
    """A pre-norm transformer block: attention, then the MLP, each added to the residual stream."""

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module, dropout: float) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.mlp_norm = norm()
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.dropout(self.attention(self.attention_norm(values)))
        values = values + attended
        computed: torch.Tensor = self.dropout(self.mlp(self.mlp_norm(values)))
        return values + computed


def heads_of(values: torch.Tensor, head_width: int) -> torch.Tensor:
    """From batch x length x width to batch x heads x length x head_width. The number of heads follows from the width: a
    tensor-parallel rank has some of them."""
    batch, length, _ = values.shape
    return values.view(batch, length, -1, head_width).transpose(1, 2)


def without_heads(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(1, 2).flatten(2)


def layered(decoder: Decoder, plan: Mapping[str, str], heads: Mapping[str, int]) -> LayeredModel:
    """The decoder as a LayeredModel, with its blocks as layers."""
    blocks = tuple(f"blocks.{index}" for index in range(len(decoder.blocks)))
    return LayeredModel(decoder, ("embedding",), blocks, ("norm", "head"), plan, initialize, heads=heads)


def plan_of(mlp_inputs: Iterable[str]) -> dict[str, str]:
    """Shards the heads, the inner width of the MLP, and the vocabulary at both ends."""
    columns = [*(f"attention.{name}" for name in "qkv"), *(f"mlp.{name}" for name in mlp_inputs)]
    return {
        "embedding.tokens": "vocab",
        **{f"blocks.*.{name}": "column" for name in columns},
        "blocks.*.attention.o": "row",
        "blocks.*.mlp.down": "row",
        "head": "vocab",
    }


def residual(linear: nn.Linear, num_layers: int) -> nn.Linear:
    """Mark a projection that is added to the residual stream: with two of them per layer, the sum would grow with the
    depth if they were not initialized smaller."""
    vars(linear)["first_deviation"] = _DEVIATION / math.sqrt(2 * num_layers)
    return linear


def initialize(module: nn.Module) -> None:
    """As in GPT-2: normally distributed weights, zero biases; norms have weight 1."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=getattr(module, "first_deviation", _DEVIATION))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.reset_parameters()
