"""What a schedule's actions cost: seconds and memory of each stage, seconds of each link between stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from numbers import Real

from runtime.errors import InvalidCall

Numbers = float | Iterable[float]
"""One number for each stage or link, or one for all of them."""


@dataclass(frozen=True, slots=True, init=False)
class Costs:
    """Times are in seconds. Link s leads from stage s to stage s + 1, and back."""

    stages: int
    forward: tuple[float, ...]
    input_backward: tuple[float, ...]
    weight_backward: tuple[float, ...]
    """A backward that is not split takes as long as its two parts."""
    transfer: tuple[float, ...]
    """How much later a stage's output is at the next stage. Not used where both stages are on one rank."""
    backward_transfer: tuple[float, ...]
    """The same for the gradient on its way back."""
    memory: tuple[float, ...]
    """What a stage holds for one microbatch from its forward to the end of its backward, in any unit."""
    reduce_grad: tuple[float, ...]

    # Written by hand because it takes more than the fields hold: one number stands for all stages.
    def __init__(
        self,
        stages: int,
        forward: Numbers,
        input_backward: Numbers,
        weight_backward: Numbers,
        transfer: Numbers = 0.0,
        backward_transfer: Numbers | None = None,
        memory: Numbers = 1.0,
        reduce_grad: Numbers = 0.0,
    ) -> None:
        if stages < 1:
            raise InvalidCall(f"costs of {stages} stages: give at least 1.")
        there = _numbers("transfer", transfer, stages - 1, "link")
        values = {
            "stages": stages,
            "forward": _numbers("forward", forward, stages, "stage"),
            "input_backward": _numbers("input_backward", input_backward, stages, "stage"),
            "weight_backward": _numbers("weight_backward", weight_backward, stages, "stage"),
            "transfer": there,
            "backward_transfer": there
            if backward_transfer is None
            else _numbers("backward_transfer", backward_transfer, stages - 1, "link"),
            "memory": _numbers("memory", memory, stages, "stage"),
            "reduce_grad": _numbers("reduce_grad", reduce_grad, stages, "stage"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1.0,
        input_backward: float = 1.0,
        weight_backward: float = 1.0,
        transfer: float = 0.0,
    ) -> Costs:
        """All stages alike, all links alike."""
        return cls(stages, forward, input_backward, weight_backward, transfer)


def _numbers(name: str, given: Numbers, count: int, place: str) -> tuple[float, ...]:
    """One number a place, from what the caller gave."""
    if isinstance(given, Real):
        return (_number(name, given),) * count
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise InvalidCall(f"{name} = {given!r}: give one number, or {count} of them, one a {place}.")
    numbers = tuple(_number(f"{name} of {place} {index}", number) for index, number in enumerate(given))
    if len(numbers) != count:
        raise InvalidCall(
            f"{name} has length {len(numbers)}, but the number of {place}s is {count}: "
            f"give {count} numbers, or one for all."
        )
    return numbers


def _number(name: str, given: object) -> float:
    if not isinstance(given, Real) or not isfinite(given) or given < 0:
        raise InvalidCall(f"{name} = {given!r}: give a finite number that is not negative.")
    return float(given)
