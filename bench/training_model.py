"""The small GPT that `bench/training.py` trains, whole or some of its blocks."""

from __future__ import annotations

from typing import ClassVar

import torch
from pipeline_models import LAYERS, VOCABULARY, WIDTH, Block
from torch import nn

TENSOR_PLAN = {
    "embedding": "vocab",
    **{f"blocks.*.attention.{name}": "column" for name in ("query", "key", "value")},
    "blocks.*.attention.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "vocab",
}


class SmallGPT(nn.Module):
    """Blocks `first` to `last`; the embedding and the head only where they belong."""

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
