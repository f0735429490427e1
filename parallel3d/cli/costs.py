"""The options for the costs of pipeline actions, shared by the verbs that simulate."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from runtime.errors import InvalidCall

if TYPE_CHECKING:
    from parallel3d.pipeline.simulation.comparison import RankCosts
    from parallel3d.pipeline.simulation.costs import Costs

_METAVAR = "TIME[,TIME…]"

ForwardOption = Annotated[
    str, typer.Option("--forward", metavar=_METAVAR, help="Time of a forward: one for all stages, or one a stage.")
]
BackwardOption = Annotated[
    str, typer.Option("--backward", metavar=_METAVAR, help="Time of a whole backward, B = I + W.")
]
WeightBackwardOption = Annotated[
    str | None,
    typer.Option(
        "--weight-backward",
        metavar=_METAVAR,
        help="The weight part of it, W; I is the rest.",
        show_default="half of --backward",
    ),
]
TransferOption = Annotated[
    str,
    typer.Option(
        "--transfer", metavar=_METAVAR, help="Time from rank to rank: one for all, or one from each stage on."
    ),
]


class CostOptions(NamedTuple):
    """The options as the user wrote them."""

    forward: str = "1"
    backward: str = "2"
    weight_backward: str | None = None
    transfer: str = "0"

    def changed(self) -> str | None:
        """The first option that differs from its default."""
        names = (name for name, default in self._field_defaults.items() if getattr(self, name) != default)
        return next((f"--{name.replace('_', '-')}" for name in names), None)

    def of_stages(self, stages: int) -> Costs:
        """Costs of this many stages."""
        from parallel3d.pipeline.simulation.costs import Costs

        forward = _numbers("--forward", self.forward, stages, "stage")
        backward = _numbers("--backward", self.backward, stages, "stage")
        weight = self._weight(backward)
        _check_time_passes(forward, backward)
        rest = tuple(whole - part for whole, part in zip(backward, weight, strict=True))
        return Costs(stages, forward, rest, weight, _numbers("--transfer", self.transfer, stages - 1, "link"))

    def of_a_rank(self) -> RankCosts:
        """Costs of a whole rank, however many stages it has."""
        from parallel3d.pipeline.simulation.comparison import RankCosts

        forward, backward, transfer = (
            _one(option, text)
            for option, text in (
                ("--forward", self.forward),
                ("--backward", self.backward),
                ("--transfer", self.transfer),
            )
        )
        if self.weight_backward is not None:
            _one("--weight-backward", self.weight_backward)
        (weight,) = self._weight((backward,))
        _check_time_passes((forward,), (backward,))
        return RankCosts(forward, backward - weight, weight, transfer)

    def _weight(self, backward: Sequence[float]) -> tuple[float, ...]:
        if self.weight_backward is None:
            return tuple(whole / 2 for whole in backward)
        weight = _numbers("--weight-backward", self.weight_backward, len(backward), "stage")
        for stage, (part, whole) in enumerate(zip(weight, backward, strict=True)):
            if part > whole:
                raise InvalidCall(
                    f"--weight-backward {part:g} of stage {stage} is more than its --backward {whole:g}. "
                    f"Give at most {whole:g}."
                )
        return weight


def _numbers(option: str, text: str, places: int, noun: str) -> tuple[float, ...]:
    """One number per place: as given, or the single one repeated."""
    numbers = tuple(_number(option, part) for part in text.split(","))
    if len(numbers) == 1:
        return numbers * places
    if places == 0:
        raise InvalidCall(f"{option} has {len(numbers)} numbers, but one stage alone has no {noun}s. Leave it out.")
    if len(numbers) != places:
        there = "is 1" if places == 1 else f"are {places}"
        noun = noun if places == 1 else f"{noun}s"
        raise InvalidCall(
            f"{option} has {len(numbers)} numbers, but there {there} {noun}. Give {places}, or one for all."
        )
    return numbers


def _number(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not isfinite(number) or number < 0:
        raise InvalidCall(f"{option}: {text[:40]!r} is no time. Give a number that is not negative, such as 1.5.")
    return number


def _one(option: str, text: str) -> float:
    if "," in text:
        raise InvalidCall(f"{option} {text[:40]}: schedules have different numbers of stages. Give one number for all.")
    return _number(option, text)


def _check_time_passes(forward: Sequence[float], backward: Sequence[float]) -> None:
    if not any(forward) and not any(backward):
        raise InvalidCall("--forward 0 --backward 0: nothing takes time. Give one of them a number above 0.")
