"""Seeds: where random numbers begin, the same on every rank of every mesh."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from runtime.errors import InvalidCall

_LARGEST_SEED = 2**63 - 1
# numpy takes no more.
_LARGEST_NUMPY_SEED = 2**32 - 1

# The numbers are the process's own, and several ranks may live in one.
_TAKING_TURNS = threading.RLock()


def seed_of(seed: int, path: str) -> int:
    """The seed of the module at this path: 63 bits."""
    digest = hashlib.blake2b(f"{seed}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & _LARGEST_SEED


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch's CPU, Python and numpy begin here, and go on afterwards as if nothing had been drawn.

    All three, because each rank calls a user's code for itself and they must get the same model.
    """
    with _TAKING_TURNS:
        yield from _seeded(seed)


def _seeded(seed: int) -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()
    # Not torch.manual_seed, which also seeds every GPU, where it would stay, and walks the stack for it.
    with torch.random.fork_rng(devices=[]):
        try:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & _LARGEST_NUMPY_SEED)
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def seed_from_now_on(seed: int) -> None:
    """What torch draws in this process."""
    with _TAKING_TURNS:
        torch.manual_seed(seed)


class RankNumbers:
    """Random numbers of one rank among those that draw the same: for what a module draws where each has another part.

    They follow from the process's numbers, which stay the same on all these ranks, so a forward that torch's checkpoint
    computes once more draws once more what it drew. Whether the input is a part, only autograd's graph tells."""

    def __init__(self, rank: int, device: torch.device, is_part: Callable[[torch.Tensor], bool]) -> None:
        self._rank, self._device, self._is_part = rank, device, is_part
        self._process = _generator(device)
        self._kept: torch.Tensor | None = None

    def give_to(self, module: nn.Module) -> None:
        """From now on its forward draws from here where its input is a part."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if module.training and not torch.is_grad_enabled():
            raise InvalidCall(
                "a Dropout of a tensor-parallel model in training, but without gradients: torch's checkpoint would "
                "draw other numbers the second time. Use checkpoint(..., use_reentrant=False)."
            )
        if module.training and args and self._is_part(args[0]):
            self._kept = self._process.get_state()
            state = hashlib.blake2b(self._kept.numpy().tobytes()).hexdigest()
            self._process.manual_seed(seed_of(self._rank, state))

    def _end(self, *_: object) -> None:
        if self._kept is not None:
            self._process.set_state(self._kept)
            self._kept = None
            torch.rand((), device=self._device)  # or the next module would begin where this one did


class OwnNumbers:
    """Random numbers beside those of the process: modules that draw from here draw the same in every process that has
    such modules and the same seed, whatever others drew meanwhile."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._process = _generator(device)
        self._kept = torch.Generator(device).manual_seed(seed).get_state()

    def give_to(self, module: nn.Module) -> None:
        """From now on its forward draws from here."""
        module.register_forward_pre_hook(self._swap)
        module.register_forward_hook(self._swap, always_call=True)

    def _swap(self, *_: object) -> None:
        current = self._process.get_state()
        self._process.set_state(self._kept)
        self._kept = current


def _generator(device: torch.device) -> torch.Generator:
    """Of the process's numbers."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
