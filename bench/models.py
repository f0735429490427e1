"""Models of the benchmarks: stages that sleep, and a small GPT, whole or in parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from parallel3d.gradients.deferred import defer_weight_grad, is_split

WIDTH, HEADS, VOCABULARY, LAYERS = 256, 4, 1024, 4
TENSOR_PLAN = {
    "embedding": "vocab",
    **{f"blocks.*.attention.{name}": "column" for name in ("query", "key", "value")},
    "blocks.*.attention.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "vocab",
}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, stage: Sleeping) -> torch.Tensor:
        ctx.stage, ctx.weight = stage, weight
        time.sleep(stage.forward_seconds)
        return values + 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        stage, weight = ctx.stage, ctx.weight

        def weight_part() -> None:
            with stage.timing(stage.backwards):
                time.sleep(stage.backward_seconds / 2)
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)

        with stage.timing(stage.backwards):
            if is_split():
                time.sleep(stage.backward_seconds / 2)
                defer_weight_grad(weight_part)
            else:
                time.sleep(stage.backward_seconds)
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        return gradients[0], None, None


class Sleeping(nn.Module):
    """Sleeps instead of computing. `forwards` and `backwards` are the seconds that it really took."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.weight = nn.Parameter(torch.zeros(1))
        self.forwards: list[float] = []
        self.backwards: list[float] = []
        """Of whole backwards, or of their halves if split."""

    @contextmanager
    def timing(self, log: list[float]) -> Iterator[None]:
        start = time.perf_counter()
        yield
        log.append(time.perf_counter() - start)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with self.timing(self.forwards):
            return _Sleep.apply(values, self.weight, self)

    def seconds(self) -> float:
        """Mean of a forward and a backward since the last call."""
        total = (sum(self.forwards) + sum(self.backwards)) / len(self.forwards)
        self.forwards.clear()
        self.backwards.clear()
        return total


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        batch, length, _ = values.shape

        def heads(layer: nn.Linear) -> torch.Tensor:
            return layer(values).view(batch, length, HEADS, -1).transpose(1, 2)

        found = functional.scaled_dot_product_attention(
            heads(self.query), heads(self.key), heads(self.value), is_causal=True
        )
        return self.out(found.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.up, self.down = Attention(), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values + self.attention(self.before(values))
        return values + self.down(functional.gelu(self.up(self.between(values))))


class SmallGPT(nn.Module):
    """Blocks `first` to `last`, with the embedding before the first and the head after the last."""

    tensor_plan: ClassVar = TENSOR_PLAN

    def __init__(self, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(first, last))
        self.head = nn.Linear(WIDTH, VOCABULARY) if last == LAYERS else None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values if self.embedding is None else self.embedding(values)
        for block in self.blocks:
            values = block(values)
        return values if self.head is None else self.head(values)


def gpt_layers() -> list[nn.Module]:
    """An embedding, four blocks, a head."""
    torch.manual_seed(0)
    return [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCABULARY)]


def gpt_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.reshape(-1, VOCABULARY), target.reshape(-1))
