"""Who takes part in a gradient server's run: worker ids, where each one stands, and who was there before. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TypeVar

T = TypeVar("T")

_REMEMBERED = 4096  # of those who have left: names of some bytes each, however often somebody comes and goes


@dataclass(slots=True, eq=False)
class Member:
    """One worker, over all its connections."""

    worker: int
    node_id: str
    version: int
    step: int
    """The one that it computes or waits for next."""
    has_state: bool
    """Whether it has weights that the run can go on from; none has before the first step."""
    is_stale: bool = False
    """Whether it came back with weights that are not the run's, and has no others yet."""
    is_here: bool = True
    num_losses: int = 0
    """Since the latest step that was completed."""

    def __str__(self) -> str:
        return f"worker {self.worker} ({self.node_id})"

    def has_weights_of(self, step: int) -> None:
        """The run's: it can go on from there."""
        self.step, self.has_state, self.is_stale = step, True, False

    def is_ready(self, step: int) -> bool:
        """Whether it can compute this step now."""
        return self.is_here and self.has_state and self.step == step


@dataclass(frozen=True, slots=True)
class _Former:
    worker: int
    is_stale: bool = False
    """Whether its weights are of a step that was made anew without it."""


class Roster:
    """All members; a run has workers of one version."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.reserved: frozenset[int] = frozenset()
        """Ids of the round that is open: the gradient of one who has left may be part of its sum."""
        self._former: dict[str, _Former] = {}
        self._barred: dict[str, str] = {}

    @property
    def version(self) -> int | None:
        """None while nobody has joined."""
        return next((member.version for member in self.members.values()), None)

    @property
    def here(self) -> list[Member]:
        """In order of their ids."""
        return sorted((each for each in self.members.values() if each.is_here), key=lambda each: each.worker)

    def find(self, node_id: str) -> Member | None:
        """By the name that version 2 knows a worker by, whatever its connection."""
        return next((each for each in self.members.values() if each.node_id == node_id and each.version == 2), None)

    def admit(self, node_id: str, version: int, step: int, has_state: bool) -> Member:
        """One who joins, or comes back: with the id it had, where that is still free."""
        former = self._former.pop(node_id, None) if version == 2 else None
        member = self.find(node_id) if version == 2 else None
        if member is None:
            worker = former.worker if former is not None and self._is_free(former.worker) else self._lowest_free()
            member = self.members[worker] = Member(worker, node_id, version, step, has_state)
            member.is_stale = former is not None and former.is_stale
        member.step, member.has_state, member.is_here = step, has_state and not member.is_stale, True
        return member

    def _is_free(self, worker: int) -> bool:
        return worker not in self.members and worker not in self.reserved

    def _lowest_free(self) -> int:
        return next(number for number in count() if self._is_free(number))

    def remove(self, member: Member) -> None:
        """It is waited for no longer."""
        self.members.pop(member.worker, None)
        _remember(self._former, member.node_id, _Former(member.worker, member.is_stale))

    def outdate(self) -> None:
        """A step is made anew: who was there and is not now may have applied what nobody else has."""
        self._former = {name: _Former(each.worker, is_stale=True) for name, each in self._former.items()}

    def bar(self, member: Member, why: str) -> None:
        """It shall not come back."""
        _remember(self._barred, member.node_id, why)

    def why_barred(self, node_id: str) -> str | None:
        return self._barred.get(node_id)


def _remember(names: dict[str, T], name: str, value: T) -> None:
    names.pop(name, None)
    names[name] = value
    if len(names) > _REMEMBERED:
        del names[next(iter(names))]
