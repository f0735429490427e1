"""Seeds: where random numbers begin, the same on every rank of every mesh."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from parallel3d.torch_internals import TorchDispatchMode, operator_schema, pop_mode, push_mode
from runtime.errors import InvalidCall

_LARGEST_SEED = 2**63 - 1
# numpy takes no more.
_LARGEST_NUMPY_SEED = 2**32 - 1
_CPU = torch.device("cpu")

# The numbers are the process's own, and several ranks may live in one.
_TAKING_TURNS = threading.RLock()


class OwnDraws(TorchDispatchMode):
    """Lets one of several ranks in a process draw as if it had the process for itself: inside of it, what torch draws
    on the CPU comes from here. A call of torch takes some microseconds longer, and `torch.random.default_generator`
    stays a stand-in, as torch's checkpoint has no other place to be told."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator()
        self._takes_generator: dict[Any, bool | None] = {}
        """Of torch's operators: whether they can be told where to draw from; None where they don't draw."""
        if not isinstance(torch.random.default_generator, _Usual):
            torch.random.default_generator = _Usual()  # type: ignore[assignment]

    # Not by the ways of TorchDispatchMode: those keep notes for the whole process, as if only one thread had modes.
    def __enter__(self) -> Self:
        _here.draws = self
        push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        pop_mode()
        _here.draws = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        takes_generator = self._takes_generator.get(func, func)
        if takes_generator is func:
            takes_generator = self._takes_generator[func] = _takes_generator(func)
        if takes_generator is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if takes_generator:
            return func(*args, **(kwargs | {"generator": self.generator}))
        with _TAKING_TURNS:
            self._swap()
            try:
                return func(*args, **kwargs)
            finally:
                self._swap()

    def _swap(self) -> None:
        """The states of both generators, for what can't be told which one to use."""
        of_process = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator.get_state())
        self.generator.set_state(of_process)


def _takes_generator(operator: Any) -> bool | None:
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return None
    return any(each.name == "generator" for each in operator_schema(operator).arguments)


class _Usual:
    """Stands for torch's generator in `torch.random`, by whose functions torch's checkpoint keeps numbers: they shall
    find those that the calling thread draws. For a thread outside of OwnDraws, torch's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_generator(), name)


class _Here(threading.local):
    draws: OwnDraws | None = None
    """What this thread is inside of, as torch's modes are of one thread too."""


_here = _Here()


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
    generator = _generator()
    of_torch, of_python, of_numpy = generator.get_state(), random.getstate(), np.random.get_state()
    try:
        # Not torch.manual_seed, which also seeds every GPU, where it would stay, and walks the stack for it.
        generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & _LARGEST_NUMPY_SEED)
        yield
    finally:
        generator.set_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def numbers_kept(gpus: Sequence[int | torch.device] = ()) -> Iterator[None]:
    """Random numbers of torch and Python go on afterwards as if nothing had been drawn."""
    with _TAKING_TURNS, torch.random.fork_rng(gpus):
        of_python = random.getstate()
        try:
            yield
        finally:
            random.setstate(of_python)


def seed_from_now_on(seed: int) -> None:
    """What torch draws on this rank."""
    if _here.draws is not None:
        _here.draws.generator.manual_seed(seed)
        return
    with _TAKING_TURNS:
        torch.manual_seed(seed)


class RankNumbers:
    """Random numbers of one rank among those that draw the same: for what a module draws where each has another part.

    They follow from the usual numbers, which stay the same on all these ranks, so a forward that torch's checkpoint
    computes once more draws once more what it drew. Whether the input is a part, only autograd's graph tells."""

    def __init__(self, rank: int, device: torch.device, is_part: Callable[[torch.Tensor], bool]) -> None:
        self._rank, self._device, self._is_part = rank, device, is_part
        self._usual = _generator(device)
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
            self._kept = self._usual.get_state()
            state = hashlib.blake2b(self._kept.numpy().tobytes()).hexdigest()
            self._usual.manual_seed(seed_of(self._rank, state))

    def _end(self, *_: object) -> None:
        if self._kept is not None:
            self._usual.set_state(self._kept)
            self._kept = None
            torch.rand((), device=self._device)  # or the next module would begin where this one did


class OwnNumbers:
    """Random numbers beside the usual ones: modules that draw from here draw the same in every process that has
    such modules and the same seed, whatever others drew meanwhile."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._usual = _generator(device)
        self._kept = torch.Generator(device).manual_seed(seed).get_state()

    def give_to(self, module: nn.Module) -> None:
        """From now on its forward draws from here."""
        module.register_forward_pre_hook(self._swap)
        module.register_forward_hook(self._swap, always_call=True)

    def _swap(self, *_: object) -> None:
        current = self._usual.get_state()
        self._usual.set_state(self._kept)
        self._kept = current


def _generator(device: torch.device = _CPU) -> torch.Generator:
    """Where what this rank draws comes from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator if _here.draws is None else _here.draws.generator
