"""A model that is slow on one rank, from one step on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn


class Held(nn.Module):
    """Sleeps in its forward on one rank, from one step on."""

    def __init__(self, width: int, rank: int, first_step: int, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self._is_slow, self._first_step, self._seconds = os.environ.get("RANK") == str(rank), first_step, seconds
        self._num_forwards = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self._is_slow and self._num_forwards >= self._first_step:
            time.sleep(self._seconds)
        self._num_forwards += 1
        return values * self.scale


def held(pids: str, width: int = 256, layers: int = 6, **slow: float) -> nn.Sequential:
    """Numbers in, numbers out. Of a pipeline's two stages each has one that sleeps. Ranks leave their process's number
    in the folder `pids`."""
    if "RANK" in os.environ:
        Path(pids, os.environ["RANK"]).write_text(str(os.getpid()))

    def half() -> list[nn.Module]:
        return [Held(width, **slow), *(nn.Linear(width, width) for _ in range(layers // 2))]

    return nn.Sequential(*half(), *half())


class Numbers(torch.utils.data.Dataset):
    """Random inputs and targets."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(index))
        return values[0], values[1]
