"""Gradient buckets: parameters and their gradients in flat memory, so that many are reduced and updated as one.

A bucket's gradients, cut for two replicas (|): matrices come first, then vectors, each on a cache line of its own.
What lies between and at the end is zero, and stays zero whatever is added up or updated.

    up.weight .. down.weight ... | up.bias . norm.weight . norm.bias .......
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from runtime.errors import InvalidCall

_LINE = 64  # bytes of a cache line
SLICE = 64
"""Elements: a replica's slice is a multiple of it, so that a vectorised loop leaves no rest, which it would round in
another way, and a slice's values don't depend on where it was cut."""

Allocate = Callable[[int, torch.dtype], torch.Tensor]


class Place(NamedTuple):
    """Where a parameter lies in its bucket, in elements."""

    parameter: nn.Parameter
    start: int
    stop: int


class Bucket:
    """Parameters of one stage and one dtype. From now on they lie in `weights`, and have a home in `gradients`."""

    def __init__(
        self,
        stage: int | None,
        parameters: Sequence[nn.Parameter],
        num_slices: int,
        new_weights: Allocate,
        new_gradients: Allocate,
    ) -> None:
        self.stage, self.num_slices = stage, num_slices
        """Of the stage that is done last where several have them; None for what is reduced after all stages."""
        dtype = parameters[0].dtype
        self.places, numel = _lay_out(parameters, num_slices)
        self.weights, self.gradients = new_weights(numel, dtype).zero_(), new_gradients(numel, dtype).zero_()
        self._homes = [_move_in(place, self.weights, self.gradients) for place in self.places]
        self.strays: list[torch.Tensor] = []
        """Gradients that autograd made elsewhere, as they were on this rank."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [place.parameter for place in self.places]

    def bounds(self, index: int) -> tuple[int, int]:
        """Where the index-th slice begins and ends."""
        size = self.gradients.numel() // self.num_slices
        return index * size, (index + 1) * size

    def bring_home(self) -> None:
        """Have all gradients where they belong. One that there is none of counts as zero."""
        missing: list[torch.Tensor] = []
        homes: list[torch.Tensor] = []
        self.strays = []
        for place, home in zip(self.places, self._homes, strict=True):
            gradient = place.parameter.grad
            if gradient is home:
                continue
            if gradient is None:
                missing.append(home)
            else:
                self.strays.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
                homes.append(home)
            place.parameter.grad = home
        with torch.no_grad():
            if homes:
                torch._foreach_copy_(homes, self.strays)
            if missing:
                torch._foreach_zero_(missing)


def _lay_out(parameters: Sequence[nn.Parameter], num_slices: int) -> tuple[tuple[Place, ...], int]:
    line, places, end = max(1, _LINE // parameters[0].element_size()), [], 0
    for parameter in parameters:
        places.append(Place(parameter, end, end + parameter.numel()))
        end = _round_up(places[-1].stop, line)
    return tuple(places), _round_up(max(end, 1), num_slices * SLICE)


@torch.no_grad()
def _move_in(place: Place, weights: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    parameter, start, stop = place
    home = weights[start:stop].view(parameter.shape)
    home.copy_(parameter)
    parameter.data = home
    parameter.grad = None
    gradient_home = gradients[start:stop].view(parameter.shape)
    parameter.gradient_home, parameter.on_gradient = gradient_home, None  # type: ignore[attr-defined]
    return gradient_home


def fill(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Lists of about so many bytes, in order, each of one dtype."""
    lists: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
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
