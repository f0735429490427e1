"""Collects the ranks' events by step, and returns a step once all ranks have ended it."""

from __future__ import annotations

from collections.abc import Iterable

from monitoring.events.events import Event, What

_STEP, _COLLECTIVE = int(What.STEP), int(What.COLLECTIVE)  # members are looked up each time
_MOST_OPEN = 512  # steps of one rank: what a rank sends that never ends a step shall not fill the memory
_MOST_EVENTS = 1 << 16  # of one rank in one step: four times what its recorder can hold


class Timeline:
    """Fed with what ranks send, in each rank's order. A rank's step is whole with its STEP event; a step of which some
    were lost is given up."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: dict[int, dict[int, list[Event]]] = {}
        """By rank and step."""
        self._ended: dict[int, set[int]] = {}
        """By step: the ranks that have ended it."""
        self._latest: dict[int, int] = {}
        """By rank: the last step that it has ended."""
        self._missed: set[int] = set()
        """Ranks of which events were lost, and none has come since."""
        self._torn: set[int] = set()
        """Steps of which some rank's events were lost."""
        self._done = -1
        """The latest step that was handed on or given up."""
        self.incomplete = 0
        """Steps that were given up."""

    def lose(self, rank: int) -> None:
        """Events of this rank are lost that would have come now: those of the step under way, if not more."""
        self._missed.add(rank)

    def take(self, rank: int, events: Iterable[Event]) -> list[dict[int, list[Event]]]:
        """The steps that are complete with these, in order: their events by rank."""
        steps = self._open.setdefault(rank, {})
        step, found = -1, list[Event]()
        for event in events:
            what, at = event[0], event[1]
            if at <= self._done:
                if what != _COLLECTIVE:
                    continue
                at = self._done + 1  # recorded late by the event loop; counted in the next step
            if at != step:
                step, found = at, steps.setdefault(at, [])
                if rank in self._missed:
                    self._missed.discard(rank)
                    self._torn.add(step)
            is_end = what == _STEP and rank not in self._ended.setdefault(step, set())
            if is_end:
                self._ended[step].add(rank)
                self._latest[rank] = step
            if is_end or len(found) < _MOST_EVENTS:  # with its end it is a step, whatever else is missing
                found.append(event)
        while len(steps) > _MOST_OPEN:
            self._give_up(min(steps))
        return self._ready()

    def _ready(self) -> list[dict[int, list[Event]]]:
        ready = []
        while self._ended:
            oldest = min(self._ended)
            if any(self._latest.get(rank, -1) < oldest for rank in range(self._world_size)):
                break  # a rank may end it yet
            if len(self._ended[oldest]) == self._world_size and oldest not in self._torn:
                ready.append(self._hand_on(oldest))
            else:
                self._give_up(oldest)
        return ready

    def flush(self) -> None:
        """Nothing comes any more: what some rank has ended and others have not is given up."""
        while self._ended:
            self._give_up(min(self._ended))

    def _hand_on(self, step: int) -> dict[int, list[Event]]:
        found = {rank: self._open[rank][step] for rank in sorted(self._open)}
        self._close(step)
        return found

    def _give_up(self, step: int) -> None:
        self.incomplete += 1
        self._close(step)

    def _close(self, step: int) -> None:
        if self._done >= 0:
            self.incomplete += max(0, step - self._done - 1)  # all ranks' ends of those between were lost
        self._done = step
        self._ended = {each: ranks for each, ranks in self._ended.items() if each > step}
        self._torn = {each for each in self._torn if each > step}
        for steps in self._open.values():
            for old in [each for each in steps if each <= step]:  # an older one that nobody ended was broken off
                del steps[old]
