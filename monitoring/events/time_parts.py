"""The parts that a step's time is divided into, in display order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add

MEANINGS = {
    "compute": "forward and backward, as far as the rank had a core",
    "tp_comm": "tensor-parallel exchanges",
    "pp_comm": "messages between stages",
    "dp_comm": "reducing gradients, as far as nothing else went on meanwhile",
    "bubble": "waiting for other stages, as the schedule has it",
    "straggler": "waiting for ranks that came late",
    "data": "waiting for data",
    "optimizer": "norm, clipping and the optimizer's update",
    "checkpoint": "saving",
    "other": "between all these: hand-overs, and waiting for a core",
}
PARTS = tuple(MEANINGS)


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Seconds of one rank, one number for each of `PARTS`."""

    seconds: tuple[float, ...] = (0.0,) * len(PARTS)

    @staticmethod
    def of(known: Mapping[str, float]) -> TimeParts:
        """Missing parts are 0. Negative values, which come from small differences between clocks, become 0."""
        return TimeParts(tuple(max(0.0, known.get(part, 0.0)) for part in PARTS))

    def __getitem__(self, part: str) -> float:
        return self.seconds[PARTS.index(part)]

    @property
    def total(self) -> float:
        return sum(self.seconds)

    def __add__(self, other: TimeParts) -> TimeParts:
        return TimeParts(tuple(map(add, self.seconds, other.seconds)))

    def shares(self) -> dict[str, float]:
        """Shares of the total by name; all 0 if the total is 0."""
        total = self.total or 1.0
        return {part: value / total for part, value in zip(PARTS, self.seconds, strict=True)}

    def to_json(self) -> dict[str, float]:
        return dict(zip(PARTS, self.seconds, strict=True))


NO_TIME = TimeParts()


def mean_of(each: Sequence[TimeParts]) -> TimeParts:
    """The mean of each part; `NO_TIME` for an empty sequence."""
    if not each:
        return NO_TIME
    columns = zip(*[parts.seconds for parts in each], strict=True)
    return TimeParts(tuple([sum(column) / len(each) for column in columns]))
