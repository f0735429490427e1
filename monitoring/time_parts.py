"""What the seconds of a step went into: the parts that are told apart, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARTS = ("compute", "tp_comm", "pp_comm", "dp_comm", "optimizer", "data", "other")
MEANINGS = {
    "compute": "forward and backward",
    "tp_comm": "waiting for tensor-parallel ranks",
    "pp_comm": "sending to other stages and waiting for them",
    "dp_comm": "reducing gradients after the last backward",
    "optimizer": "the optimizer's update",
    "data": "waiting for data",
    "other": "all that is none of these",
}


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Seconds of one rank, one number for each of `PARTS`; they add up to its wall time."""

    seconds: tuple[float, ...] = (0.0,) * len(PARTS)

    @staticmethod
    def of(total: float, known: Mapping[str, float]) -> TimeParts:
        """`other` is what is left of the total; clocks may disagree by a little, but no part is below zero."""
        left = total - sum(known.values())
        return TimeParts(tuple(max(0.0, known.get(part, left if part == "other" else 0.0)) for part in PARTS))

    @staticmethod
    def from_wire(values: object) -> TimeParts:
        """Raises ValueError for anything but a number for each part."""
        if not isinstance(values, list) or [type(value) for value in values] != [float] * len(PARTS):
            raise ValueError(f"the parts of a step are {len(PARTS)} numbers")
        return TimeParts(tuple(values))

    @property
    def total(self) -> float:
        return sum(self.seconds)

    def __add__(self, other: TimeParts) -> TimeParts:
        return TimeParts(tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True)))

    def shares(self) -> dict[str, float]:
        """Of the total, by name; all 0 where no time has passed."""
        total = self.total or 1.0
        return {part: value / total for part, value in zip(PARTS, self.seconds, strict=True)}

    def to_json(self) -> dict[str, float]:
        return dict(zip(PARTS, self.seconds, strict=True))


NO_TIME = TimeParts()


def mean_of(each: Sequence[TimeParts]) -> TimeParts:
    """Of several ranks."""
    total = sum(each, NO_TIME)
    return TimeParts(tuple(value / max(1, len(each)) for value in total.seconds))
