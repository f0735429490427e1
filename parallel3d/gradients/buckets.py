"""Gradient buckets: parameters that are reduced as one, and where they and their gradients lie.

Where there are several replicas, a bucket's gradients are flat memory. Cut for two of them (|):

    up.weight .. down.weight ... | up.bias . norm.weight . norm.bias .......

Matrices come first, then vectors, each on a cache line of its own. What lies between and at the end is zero, and stays
zero whatever is added up or updated. A single replica's gradients lie wherever they were made: that memory was used a
moment ago, and is still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from runtime.errors import InvalidCall

_LINE = 64  # bytes of a cache line
SLICE = 64
"""Elements: a replica's slice is a multiple of it, so that a vectorised loop leaves no rest, which it would round in
another way, and a slice's values don't depend on where it was cut."""

Allocate = Callable[[int, torch.dtype], torch.Tensor]
Counts = Callable[[nn.Parameter], bool]
T = TypeVar("T", bound=torch.Tensor)


class Part(NamedTuple):
    """Elements `start` to `stop` of a parameter, flattened, which begin at `offset` of a piece."""

    parameter: nn.Parameter
    start: int
    stop: int
    offset: int


class Bucket(Protocol):
    """What the optimizer needs to know of one. A slice is that of a replica; None means all of it."""

    stage: int | None
    """The one that is done last with it; None for what is reduced after all stages."""
    parameters: Sequence[nn.Parameter]
    dtype: torch.dtype
    strays: Sequence[torch.Tensor]
    """Gradients as they were on this rank, where they lie elsewhere than the sums."""

    def bring_home(self) -> None:
        """Have all gradients where they belong. One that there is none of counts as zero."""

    def weights(self, index: int | None) -> list[torch.Tensor]:
        """A slice, in pieces."""

    def gradients(self, index: int | None) -> list[torch.Tensor]:
        """The same of the gradients, once they are home."""

    def parts(self, index: int | None) -> list[list[Part]]:
        """What lies in each piece."""

    def counted(self, index: int, counts: Counts) -> Callable[[], list[torch.Tensor]]:
        """Gives the gradients in a slice that are counted, once they are home."""


class FlatBucket:
    """A Bucket whose parameters lie in `flat_weights`, and have a home in `flat_gradients`."""

    def __init__(
        self,
        stage: int | None,
        parameters: Sequence[nn.Parameter],
        num_slices: int,
        new_weights: Allocate,
        new_gradients: Allocate,
    ) -> None:
        self.stage, self.parameters, self.dtype, self._num_slices = stage, parameters, parameters[0].dtype, num_slices
        self.starts, numel = _lay_out(parameters, num_slices)
        """Of each parameter, in elements."""
        self.flat_weights = new_weights(numel, self.dtype).zero_()
        self.flat_gradients = new_gradients(numel, self.dtype).zero_()
        self._homes = [self._move_in(*each) for each in zip(parameters, self.starts, strict=True)]
        self.strays: Sequence[torch.Tensor] = ()

    @torch.no_grad()
    def _move_in(self, parameter: nn.Parameter, start: int) -> torch.Tensor:
        stop = start + parameter.numel()
        parameter.data = self.flat_weights[start:stop].view(parameter.shape).copy_(parameter)
        parameter.grad = None
        # Through .data, each has a version of its own: it tells whether this gradient was changed, not any.
        home = self.flat_gradients.data[start:stop].view(parameter.shape)
        parameter.gradient_home, parameter.on_gradient = home, None  # type: ignore[attr-defined]
        return home

    def bring_home(self) -> None:
        missing: list[torch.Tensor] = []
        homes: list[torch.Tensor] = []
        strays: list[torch.Tensor] = []
        for parameter, home in zip(self.parameters, self._homes, strict=True):
            gradient = parameter.grad
            if gradient is home:
                continue
            if gradient is None:
                missing.append(home)
            else:
                strays.append(_dense(gradient))
                homes.append(home)
            parameter.grad = home
        with torch.no_grad():
            if homes:
                torch._foreach_copy_(homes, strays)
            if missing:
                torch._foreach_zero_(missing)
        self.strays = strays

    def bounds(self, index: int | None) -> tuple[int, int]:
        """Where a slice begins and ends."""
        size = self.flat_weights.numel() // self._num_slices
        return (0, self.flat_weights.numel()) if index is None else (index * size, (index + 1) * size)

    def weights(self, index: int | None) -> list[torch.Tensor]:
        start, stop = self.bounds(index)
        return [self.flat_weights[start:stop]]

    def gradients(self, index: int | None) -> list[torch.Tensor]:
        start, stop = self.bounds(index)
        return [self.flat_gradients[start:stop]]

    def parts(self, index: int | None) -> list[list[Part]]:
        (low, high), found = self.bounds(index), []
        for parameter, first in zip(self.parameters, self.starts, strict=True):
            start, stop = max(first, low), min(first + parameter.numel(), high)
            if start < stop:
                found.append(Part(parameter, start - first, stop - first, start - low))
        return [found]

    def ranges(self, wanted: Counts, bounds: tuple[int, int]) -> list[tuple[int, int]]:
        """Where these parameters lie; neighbours, between which there is nothing, are one."""
        found: list[tuple[int, int]] = []
        follows = False
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            if wanted(parameter):
                first = found.pop()[0] if follows else start
                found.append((first, start + parameter.numel()))
            follows = wanted(parameter)
        cut = [(max(start, bounds[0]), min(stop, bounds[1])) for start, stop in found]
        return [(start, stop) for start, stop in cut if start < stop]

    def counted(self, index: int, counts: Counts) -> Callable[[], list[torch.Tensor]]:
        pieces = [self.flat_gradients[start:stop] for start, stop in self.ranges(counts, self.bounds(index))]
        return lambda: pieces


class LooseBucket:
    """A Bucket of a single replica: a piece for each parameter."""

    def __init__(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        self.stage: int | None = stage
        self.parameters, self.dtype = parameters, parameters[0].dtype
        self.strays: Sequence[torch.Tensor] = ()
        for parameter in parameters:
            parameter.data, parameter.grad = parameter.data.contiguous(), None
            parameter.gradient_home = parameter.on_gradient = None  # type: ignore[attr-defined]

    def bring_home(self) -> None:
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = torch.zeros_like(parameter)
            elif gradient.layout is not torch.strided or not gradient.is_contiguous():
                parameter.grad = _dense(gradient).contiguous()

    def weights(self, index: int | None) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.parameters]

    def gradients(self, index: int | None) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters]  # type: ignore[misc]

    def parts(self, index: int | None) -> list[list[Part]]:
        return [[Part(parameter, 0, parameter.numel(), 0)] for parameter in self.parameters]

    def counted(self, index: int, counts: Counts) -> Callable[[], list[torch.Tensor]]:
        found = [parameter for parameter in self.parameters if counts(parameter)]
        return lambda: [parameter.grad for parameter in found]  # type: ignore[misc]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _lay_out(parameters: Sequence[nn.Parameter], num_slices: int) -> tuple[list[int], int]:
    """Where each begins, and how long all are."""
    line, starts, end = max(1, _LINE // parameters[0].element_size()), [], 0
    for parameter in parameters:
        starts.append(end)
        end = _round_up(end + parameter.numel(), line)
    return starts, _round_up(max(end, 1), num_slices * SLICE)


def fill(parameters: Iterable[T], bucket_bytes: int) -> list[list[T]]:
    """Lists of about so many bytes, in order, each of one dtype."""
    lists: list[list[T]] = []
    filling: dict[torch.dtype, tuple[list[T], int]] = {}
    for parameter in parameters:
        found, num_bytes = filling.get(parameter.dtype, ([], bucket_bytes))
        if num_bytes + parameter.nbytes > bucket_bytes:
            found, num_bytes = [], 0
            lists.append(found)
        found.append(parameter)
        filling[parameter.dtype] = found, num_bytes + parameter.nbytes
    return lists


def matrices_first(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """What tensor parallelism cuts then lies together, so that most of what a rank counts in the norm is one piece."""
    return sorted(parameters, key=lambda parameter: parameter.dim() < 2)


def check(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Refuse what can't lie in flat memory of this device."""
    at: dict[int, nn.Parameter] = {}
    for parameter in parameters:
        what = f"a parameter {tuple(parameter.shape)} of {parameter.dtype}"
        if not parameter.is_floating_point():
            raise InvalidCall(f"{what} can't be trained here; use floating-point numbers.")
        if parameter.device.type != device.type:
            raise InvalidCall(f"{what} is on {parameter.device}, but the mesh is on {device}; move the model there.")
        if parameter.numel() and at.setdefault(parameter.data_ptr(), parameter) is not parameter:
            raise InvalidCall(f"{what} lies in another one's memory; tie them by having one parameter in both places.")


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
