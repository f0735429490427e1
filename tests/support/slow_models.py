"""A model that is slow on one rank, from one step on, and writes down how long its ranks computed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Stopwatch:
    """How long a rank was in its forwards and backwards through a half of the model, a line each: what it did itself,
    whatever it waited for in between, and by another clock than the one it is watched with."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w", buffering=1)
        self._start = 0.0

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> None:
        self._file.write(f"{time.perf_counter() - self._start}\n")


class Entry(torch.autograd.Function):
    """Where a half's backward ends."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, watch: Stopwatch) -> torch.Tensor:
        ctx.watch = watch
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.watch.stop()
        return gradient, None


class Exit(torch.autograd.Function):
    """Where a half's forward ends, and its backward begins."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, watch: Stopwatch) -> torch.Tensor:
        ctx.watch = watch
        watch.stop()
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.watch.start()
        return gradient, None


class Held(nn.Module):
    """Sleeps in its forward on one rank, from one step on. A half's first layer."""

    def __init__(self, watch: Stopwatch | None, width: int, rank: int, first_step: int, seconds: float) -> None:
        super().__init__()
        self._watch = watch
        self.scale = nn.Parameter(torch.ones(width))
        self._is_slow, self._first_step, self._seconds = os.environ.get("RANK") == str(rank), first_step, seconds
        self._num_forwards = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self._watch is not None:
            self._watch.start()
        if self._is_slow and self._num_forwards >= self._first_step:
            time.sleep(self._seconds)
        self._num_forwards += 1
        values = values * self.scale
        return values if self._watch is None else Entry.apply(values, self._watch)


class Last(nn.Module):
    """A half's last layer."""

    def __init__(self, watch: Stopwatch | None) -> None:
        super().__init__()
        self._watch = watch

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._watch is None else Exit.apply(values, self._watch)


def held(folder: str, width: int = 256, layers: int = 6, **slow: float) -> nn.Sequential:
    """Numbers in, numbers out. Of a pipeline's two stages each has one that sleeps. Rank R leaves its process's number
    and its Stopwatch's lines in the folder: `R.pid` and `R.seconds`."""
    rank, watch = os.environ.get("RANK"), None
    if rank is not None:
        Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
        watch = Stopwatch(Path(folder, f"{rank}.seconds"))

    def half() -> list[nn.Module]:
        return [Held(watch, width, **slow), *(nn.Linear(width, width) for _ in range(layers // 2)), Last(watch)]

    return nn.Sequential(*half(), *half())


class Numbers(torch.utils.data.Dataset):
    """Random inputs and targets."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(index))
        return values[0], values[1]
