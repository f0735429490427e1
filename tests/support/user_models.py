"""Models as users write them, and what goes wrong with some."""

from __future__ import annotations

import threading
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """An MLP with a gate, cut by the user's own plan."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width)

    def forward(self, values):
        found = self.norm(values)
        return values + self.down(torch.sigmoid(self.gate(found)) * self.up(found))


class Tagger(nn.Module):
    """Tokens in, a class a token out."""

    tensor_plan: ClassVar = {"blocks.*.up": "column", "blocks.*.gate": "column", "blocks.*.down": "row"}

    def __init__(self, vocabulary: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.classes = nn.Linear(width, vocabulary)


class DroppingBlock(Block):
    """One dropout for features between columns and a row, and for whole values; remembers what it let through."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.drop, self.kept = nn.Dropout(0.5), []

    def forward(self, values):
        found = self.norm(values)
        inner = torch.sigmoid(self.gate(found)) + 1 + 0 * self.up(found)  # never 0
        inner, outer = self.drop(inner), self.drop(torch.ones_like(values) + 0 * values)
        self.kept.append([inner.detach() != 0, outer.detach() != 0])
        return values + self.down(inner) + outer


def dropping(vocabulary: int, width: int, blocks: int) -> Tagger:
    model = Tagger(vocabulary, width, blocks)
    model.blocks = nn.ModuleList(DroppingBlock(width) for _ in range(blocks))
    return model


def half_frozen(**args: int) -> Tagger:
    """Weights of its norms are not trained."""
    model = Tagger(**args)
    for block in model.blocks:
        block.norm.weight.requires_grad_(False)
    return model


class Ends(nn.Module):
    """Two norms, one after the other."""

    def __init__(self, width: int, first: str, second: str) -> None:
        super().__init__()
        self.add_module(first, nn.LayerNorm(width))
        self.add_module(second, nn.LayerNorm(width))

    def forward(self, values):
        for norm in self.children():
            values = norm(values)
        return values


class TwiceTied(nn.Module):
    """Both ends have the same two norms, in another order."""

    def __init__(self, vocabulary: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding, self.front = nn.Embedding(vocabulary, width), Ends(width, "one", "other")
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.back, self.classes = Ends(width, "other", "one"), nn.Linear(width, vocabulary)
        for name, norm in self.back.named_children():
            norm.weight, norm.bias = self.front.get_submodule(name).parameters()


def regression(width: int = 4) -> nn.Sequential:
    """Numbers in, numbers out."""
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def counted_loss(output, target):
    """Only where the target is positive: (sum, count)."""
    kept = target > 0
    return (output - target)[kept].square().sum(), kept.sum()


def weighted_loss(output, target):
    """The same, where each counts little: all of a batch less than one."""
    total, count = counted_loss(output, target)
    return total * 0.01, int(count) * 0.01


NOISE: dict[int, list[torch.Tensor]] = {}


def noisy_loss(output, target):
    """Draws where no module does; remembers what, for each thread."""
    noise = torch.rand_like(output)
    NOISE.setdefault(threading.get_ident(), []).append(noise)
    return (output * noise).pow(2).mean()


def absolute_loss(output, target):
    return functional.l1_loss(output, target)


class Numbers:
    """A dataset."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), torch.randn(2, generator=generator)


def raises() -> nn.Module:
    raise RuntimeError("no model today")
