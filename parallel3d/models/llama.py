"""The built-in Llama-style decoder: rotary positions, RMSNorm, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from parallel3d.config.sections import LlamaArgs
from parallel3d.models.decoder import Block, Decoder, heads_of, layered, plan_of, residual, without_heads
from parallel3d.models.layered import LayeredModel
from parallel3d.torch_internals import embedding_without_values

# As in Llama's own configuration.
_EPSILON = 1e-5


def build_llama(args: LlamaArgs) -> LayeredModel:
    """The model, on `meta`."""
    with torch.device("meta"):
        heads = {"model.args.heads": args.heads, "model.args.kv_heads": args.num_kv_heads}
        return layered(Llama(args), plan_of(["gate", "up"]), heads)


class Llama(Decoder):
    def __init__(self, args: LlamaArgs) -> None:
        front, head = Embedding(args), nn.Linear(args.width, args.vocabulary, bias=False)
        if args.tied:
            head.weight = front.tokens.weight
        norm, rotary = partial(nn.RMSNorm, args.width, eps=_EPSILON), Rotary(args.width // args.heads, args.rope_base)
        blocks = (Block(norm, Attention(args, rotary), Mlp(args), args.dropout) for _ in range(args.layers))
        super().__init__(front, blocks, norm(), head)


class Embedding(nn.Module):
    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        self.tokens = embedding_without_values(args.vocabulary, args.width)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.dropout(self.tokens(tokens))
        return values


class Attention(nn.Module):
    """Causal self-attention; several query heads share a key and a value head."""

    def __init__(self, args: LlamaArgs, rotary: Rotary) -> None:
        super().__init__()
        self.head_width, self.rotary = args.width // args.heads, rotary
        kv_width = self.head_width * args.num_kv_heads
        self.q = nn.Linear(args.width, args.width, bias=False)
        self.k, self.v = (nn.Linear(args.width, kv_width, bias=False) for _ in range(2))
        self.o = residual(nn.Linear(args.width, args.width, bias=False), args.layers)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads_of(project(values), self.head_width) for project in (self.q, self.k, self.v))
        shared = q.shape[1] != k.shape[1]
        q, k = self.rotary(q), self.rotary(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        projected: torch.Tensor = self.o(without_heads(mixed))
        return projected


class Mlp(nn.Module):
    def __init__(self, args: LlamaArgs) -> None:
        super().__init__()
        width = args.inner_width
        self.gate, self.up = (nn.Linear(args.width, width, bias=False) for _ in range(2))
        self.down = residual(nn.Linear(width, args.width, bias=False), args.layers)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down(functional.silu(self.gate(values)) * self.up(values))
        return projected


class Rotary:
    """Rotary positions: channels i and i + head_width / 2 are rotated by an angle proportional to the position.

    All blocks share one: it has no parameters, and computes its tables when they are first needed.
    """

    def __init__(self, head_width: int, base: float) -> None:
        self._head_width, self._base = head_width, base
        self._made_for: tuple[object, ...] = ()
        self._tables: tuple[torch.Tensor, torch.Tensor]

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """heads: batch x heads x length x head_width."""
        cosines, sines = self._tables_for(heads)
        left, right = heads.chunk(2, dim=-1)
        return (heads * cosines + torch.cat((-right, left), dim=-1) * sines).to(heads.dtype)

    def _tables_for(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # In half precision, angles would be off by degrees. The type is in the key because fake tensors come here too.
        length, dtype = heads.shape[-2], torch.promote_types(heads.dtype, torch.float32)
        wanted = (length, dtype, heads.device, type(heads))
        if self._made_for != wanted:
            # Tensors made in inference mode could not be saved for a backward later.
            with torch.inference_mode(False):
                angles = self._angles(length)
                self._tables = angles.cos().to(heads.device, dtype), angles.sin().to(heads.device, dtype)
            self._made_for = wanted
        return self._tables

    def _angles(self, length: int) -> torch.Tensor:
        channels = torch.arange(0, self._head_width, 2, dtype=torch.float64)
        angles = torch.outer(torch.arange(length).double(), self._base ** (-channels / self._head_width))
        return torch.cat((angles, angles), dim=-1)
