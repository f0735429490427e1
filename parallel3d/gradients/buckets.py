"""Gradient buckets: parameters that are reduced in one collective, and the memory of their weights and gradients.

With several replicas, a bucket's weights and gradients are flat tensors. Sharded over two replicas (|):

    up.weight .. down.weight ... | up.bias . norm.weight . norm.bias .......

Matrices come first, then vectors, each aligned to a cache line. The padding is zero, and stays zero through sums and
updates. With a single replica, gradients stay where they were computed: that memory is still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from parallel3d.torch_internals import foreach_copy_, foreach_zero_
from runtime.errors import InvalidCall

_LINE = 64  # bytes of a cache line
SLICE = 64
"""Elements: a replica's slice is a multiple of it. A vectorised loop then has no remainder, which it would round in
another way, and values don't depend on where a slice begins."""

Allocate = Callable[[int, torch.dtype], torch.Tensor]
Counts = Callable[[nn.Parameter], bool]
T = TypeVar("T", bound=torch.Tensor)


class Part(NamedTuple):
    """Elements `start` to `stop` of a flattened parameter, at `offset` of a piece of a bucket."""

    parameter: nn.Parameter
    start: int
    stop: int
    offset: int


class Bucket(Protocol):
    """What the reducer and the optimizer need of a bucket. `index` is that of a replica's slice; None: all of it."""

    stage: int | None
    """The last stage that adds to it; None for a bucket that is reduced after all stages."""
    parameters: Sequence[nn.Parameter]
    dtype: torch.dtype
    local_grads: Sequence[torch.Tensor]
    """Gradients of this rank alone that were copied into the bucket, until they are released."""

    def copy_into_bucket(self) -> None:
        """Copy gradients that autograd made elsewhere. A missing gradient counts as zero."""

    def weights(self, index: int | None) -> list[torch.Tensor]:
        """A slice of the weights, in pieces."""

    def gradients(self, index: int | None) -> list[torch.Tensor]:
        """A slice of the gradients, in pieces; after `copy_into_bucket`."""

    def parts(self, index: int | None) -> list[list[Part]]:
        """The parameters in each piece."""

    def counted(self, index: int, counts: Counts) -> Callable[[], list[torch.Tensor]]:
        """A function that gives the gradients of a slice that count in the norm; call it after `copy_into_bucket`."""


class FlatBucket:
    """A Bucket whose parameters are views of `flat_weights`, and whose main grads are views of `flat_gradients`."""

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
        """The first element of each parameter."""
        self.flat_weights = new_weights(numel, self.dtype).zero_()
        self.flat_gradients = new_gradients(numel, self.dtype).zero_()
        self._main_grads = [self._move_in(*each) for each in zip(parameters, self.starts, strict=True)]
        self.local_grads: Sequence[torch.Tensor] = ()

    @torch.no_grad()
    def _move_in(self, parameter: nn.Parameter, start: int) -> torch.Tensor:
        stop = start + parameter.numel()
        parameter.data = self.flat_weights[start:stop].view(parameter.shape).copy_(parameter)
        parameter.grad = None
        # A view of .data has a version of its own, which changes only when this gradient is written.
        main_grad = self.flat_gradients.data[start:stop].view(parameter.shape)
        parameter.main_grad, parameter.on_gradient = main_grad, None  # type: ignore[attr-defined]
        return main_grad

    def copy_into_bucket(self) -> None:
        missing: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        local_grads: list[torch.Tensor] = []
        for parameter, main_grad in zip(self.parameters, self._main_grads, strict=True):
            gradient = parameter.grad
            if gradient is main_grad:
                continue
            if gradient is None:
                missing.append(main_grad)
            else:
                local_grads.append(_dense(gradient))
                targets.append(main_grad)
            parameter.grad = main_grad
        with torch.no_grad():
            if targets:
                foreach_copy_(targets, local_grads)
            if missing:
                foreach_zero_(missing)
        self.local_grads = local_grads

    def bounds(self, index: int | None) -> tuple[int, int]:
        """The first element of a slice, and the one after its last."""
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
        """The elements of these parameters inside the bounds; neighbours are one range, with the padding in between."""
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
    """A Bucket of a single replica: each parameter is a piece."""

    def __init__(self, stage: int, parameters: Sequence[nn.Parameter]) -> None:
        self.stage: int | None = stage
        self.parameters, self.dtype = parameters, parameters[0].dtype
        self.local_grads: Sequence[torch.Tensor] = ()
        for parameter in parameters:
            parameter.data, parameter.grad = parameter.data.contiguous(), None
            parameter.main_grad = parameter.on_gradient = None  # type: ignore[attr-defined]

    def copy_into_bucket(self) -> None:
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
    """The first element of each parameter, and the length of the bucket."""
    line, starts, end = max(1, _LINE // parameters[0].element_size()), [], 0
    for parameter in parameters:
        starts.append(end)
        end = _round_up(end + parameter.numel(), line)
    return starts, _round_up(max(end, 1), num_slices * SLICE)


def fill(parameters: Iterable[T], bucket_bytes: int) -> list[list[T]]:
    """Parameters in lists of one dtype and at most `bucket_bytes`, in order; a larger parameter has its own list."""
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
    """Sharded parameters then lie together, so that most of what a rank counts in the norm is one range."""
    return sorted(parameters, key=lambda parameter: parameter.dim() < 2)


def check(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Refuse parameters that cannot be views of a flat tensor on this device."""
    at: dict[int, nn.Parameter] = {}
    for parameter in parameters:
        what = f"a parameter {tuple(parameter.shape)} of {parameter.dtype}"
        if not parameter.is_floating_point():
            raise InvalidCall(f"{what} cannot be trained; use floating-point numbers.")
        if parameter.device.type != device.type:
            raise InvalidCall(f"{what} is on {parameter.device}, but the mesh is on {device}; move the model there.")
        if parameter.numel() and at.setdefault(parameter.data_ptr(), parameter) is not parameter:
            raise InvalidCall(f"{what} shares memory with another one; to tie them, use one parameter in both places.")


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
