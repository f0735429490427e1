"""The workers of a gradient server's run: ids, progress, and those that left or were barred. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TypeVar

T = TypeVar("T")

_REMEMBERED = 4096  # former workers: bounds the memory when new ones come and go all the time


@dataclass(slots=True, eq=False)
class Member:
    """One worker, across its connections."""

    worker: int
    node_id: str
    version: int
    step: int
    """The step that it computes or waits for next."""
    has_state: bool
    """Whether it has weights that the run can continue from; no worker has before the first step."""
    is_stale: bool = False
    """Whether it returned with weights that are not the run's, and has not received the run's yet."""
    is_here: bool = True
    num_losses: int = 0
    """How often it was lost since the latest completed step."""

    def __str__(self) -> str:
        return f"worker {self.worker} ({self.node_id})"

    def has_weights_of(self, step: int) -> None:
        """It has the run's weights of this step now."""
        self.step, self.has_state, self.is_stale = step, True, False

    def is_ready(self, step: int) -> bool:
        """Whether it can compute this step now."""
        return self.is_here and self.has_state and self.step == step


@dataclass(frozen=True, slots=True)
class _Former:
    worker: int
    is_stale: bool = False
    """Whether its weights are of a step that was repeated without it."""


class Roster:
    """All members. A run has workers of one protocol version."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.reserved: frozenset[int] = frozenset()
        """Ids of the open round, not given to others: the gradient of a worker that left may be part of its sum."""
        self._former: dict[str, _Former] = {}
        self._barred: dict[str, str] = {}

    @property
    def version(self) -> int | None:
        """The workers' protocol version; None before the first join."""
        return next((member.version for member in self.members.values()), None)

    @property
    def here(self) -> list[Member]:
        """Connected members, in order of their ids."""
        return sorted((each for each in self.members.values() if each.is_here), key=lambda each: each.worker)

    def find(self, node_id: str) -> Member | None:
        """The member of version 2 with this name; version 1's names are not unique."""
        return next((each for each in self.members.values() if each.node_id == node_id and each.version == 2), None)

    def admit(self, node_id: str, version: int, step: int, has_state: bool) -> Member:
        """A worker joins or returns; it gets the id it had if that is free."""
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
        """Stop waiting for a member."""
        self.members.pop(member.worker, None)
        _remember(self._former, member.node_id, _Former(member.worker, member.is_stale))

    def outdate(self) -> None:
        """A step is repeated: former workers may have applied an average that no one else has."""
        self._former = {name: _Former(each.worker, is_stale=True) for name, each in self._former.items()}

    def bar(self, member: Member, why: str) -> None:
        """Refuse its return."""
        _remember(self._barred, member.node_id, why)

    def why_barred(self, node_id: str) -> str | None:
        return self._barred.get(node_id)


def _remember(names: dict[str, T], name: str, value: T) -> None:
    names.pop(name, None)
    names[name] = value
    if len(names) > _REMEMBERED:
        del names[next(iter(names))]
