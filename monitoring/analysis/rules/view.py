"""What a rule looks at: a window of steps, what is known of the run, and a plan that predicts other pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from monitoring.analysis.facts import RankFacts, RunFacts
from monitoring.analysis.observations import Bottleneck, RankWindow, Window

WORTH_IT = 0.05
"""Of a step: what would gain less is no better than the noise of a prediction."""
_MOST = 0.99  # of a step: no remedy saves all of it
_ALONE = 2.0  # times as late as any other rank


class Plan(Protocol):
    """What a step of a window would take if the pipeline were another one."""

    def step_seconds(
        self,
        *,
        schedule: str | None = None,
        microbatches: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
        virtual_stages: int | None = None,
    ) -> float | None:
        """What is not given stays as it is; the batch stays the same. None where there is no such pipeline, or where
        too little is known of this one."""

    def best_layers(self) -> tuple[int, ...] | None:
        """Layers of each stage, so that the slowest rank is as fast as it can be; None where they are not known."""

    def balanced_seconds(self) -> float | None:
        """If all stages took equally long."""


class Planner(Protocol):
    """Makes plans from what a window's stages took."""

    def plan(self, window: Window) -> Plan | None:
        """None where the window tells too little of the pipeline."""


@dataclass(frozen=True, slots=True)
class View:
    """The same for all rules. Shares are of the mean step, 0 to 1."""

    window: Window
    facts: RunFacts
    ranks: Mapping[int, RankFacts]
    plan: Plan | None = None
    found: list[Bottleneck] = field(default_factory=list)
    """By the rules before: causes come before their symptoms."""

    def share(self, seconds: float) -> float:
        return min(1.0, max(0.0, seconds / self.window.seconds))

    def part(self, name: str) -> float:
        """A part's share, the mean of all ranks."""
        return self.share(self.window.parts[name])

    def gain(self, step_seconds: float | None) -> float | None:
        """Of a remedy after which a step takes so long."""
        return None if step_seconds is None else saved(1 - step_seconds / self.window.seconds)

    def is_found(self, kinds: Iterable[str]) -> bool:
        return not {each.kind for each in self.found}.isdisjoint(kinds)

    @property
    def hosts(self) -> dict[str, list[RankFacts]]:
        found: dict[str, list[RankFacts]] = {}
        for rank in self.ranks.values():
            found.setdefault(rank.host, []).append(rank)
        return found

    def crosses_hosts(self, axis: str) -> bool:
        """Whether ranks that differ on this axis only are on several hosts."""
        hosts: dict[tuple[int, ...], set[str]] = {}
        for rank in self.ranks.values():
            others = tuple(value for name, value in rank.place._asdict().items() if name != axis)
            hosts.setdefault(others, set()).add(rank.host)
        return any(len(each) > 1 for each in hosts.values())

    def fits_into_hosts(self, axis: str) -> bool:
        """Whether ranks can be numbered so that those that differ on this axis only are on one host."""
        return all(len(members) % getattr(self.facts, axis) == 0 for members in self.hosts.values())

    def shares_hosts(self, axis: str) -> bool:
        """Whether some ranks that differ on this axis only are on one host."""
        places = [(rank.host, rank.place._replace(**{axis: 0})) for rank in self.ranks.values()]
        return len(set(places)) < len(places)

    def late_supplies(self) -> dict[int, float]:
        """Of each rank, the seconds by which another one is later because of its data or its saving: who needs that
        one's work waits so long, whatever the mesh."""
        own = {number: rank.parts["data"] + rank.parts["checkpoint"] for number, rank in self.window.ranks.items()}
        return {number: max(own.values()) - seconds for number, seconds in own.items()}

    def by_stage_rank(self) -> dict[int, list[RankWindow]]:
        """Ranks with the same work, by their place in the pipeline."""
        found: dict[int, list[RankWindow]] = {}
        for number, rank in self.ranks.items():
            if number in self.window.ranks:
                found.setdefault(rank.place.pp, []).append(self.window.ranks[number])
        return found


def saved(share: float) -> float:
    """A gain, 0 to below 1."""
    return min(_MOST, max(0.0, share))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """`31 ms`, `2.4 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def size(num_bytes: float) -> str:
    """`31 KiB`, `2.4 GiB`."""
    value, unit = float(num_bytes), "bytes"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def smaller(size: int) -> int:
    """An axis cut by its smallest factor: 8 gives 4, 9 gives 3, a prime number 1."""
    return next((size // factor for factor in range(2, size + 1) if size % factor == 0), 1)


def is_alone(late: Mapping[int, float], worst: int) -> bool:
    """Whether it is this rank's matter, and not everybody's."""
    others = [seconds for rank, seconds in late.items() if rank != worst]
    return bool(others) and late[worst] > _ALONE * max(others)
