"""The ranks' events put together step by step: a step is handed on once every rank has told all of it."""

from __future__ import annotations

from collections.abc import Iterable

from monitoring.events import Event, What

PATIENCE = 64
"""Complete steps that may wait for an older one of which a rank's end is missing; its events were dropped then."""
_STEP, _COLLECTIVE = int(What.STEP), int(What.COLLECTIVE)  # members are looked up each time
_MOST_OPEN = 512  # steps of one rank: what a rank sends that never ends a step shall not fill the memory
_MOST_EVENTS = 1 << 16  # of one rank in one step: four times what its recorder can hold


class Timeline:
    """Fed with what ranks send, in each rank's order. A rank's step is whole with its STEP event."""

    def __init__(self, world_size: int, patience: int = PATIENCE) -> None:
        self._world_size, self._patience = world_size, patience
        self._open: dict[int, dict[int, list[Event]]] = {}
        """By rank and step."""
        self._ended: dict[int, set[int]] = {}
        """By step: the ranks that have ended it."""
        self._done = -1
        """The latest step that was handed on or given up."""
        self.incomplete = 0
        """Steps that were given up."""

    def take(self, rank: int, events: Iterable[Event]) -> list[dict[int, list[Event]]]:
        """The steps that are complete with these, in order: their events by rank."""
        steps = self._open.setdefault(rank, {})
        step, found = -1, list[Event]()
        for event in events:
            what, at = event[:2]
            if at <= self._done:
                if what != _COLLECTIVE:
                    continue
                at = self._done + 1  # told late by the event loop; its bytes shall count somewhere
            if at != step:
                step, found = at, steps.setdefault(at, [])
            is_end = what == _STEP and rank not in self._ended.setdefault(step, set())
            if is_end:
                self._ended[step].add(rank)
            if is_end or len(found) < _MOST_EVENTS:  # with its end it is a step, whatever else is missing
                found.append(event)
        while len(steps) > _MOST_OPEN:
            self._give_up(min(steps))
        return self._ready()

    def _ready(self) -> list[dict[int, list[Event]]]:
        ready = []
        while self._ended:
            oldest = min(self._ended)
            if len(self._ended[oldest]) == self._world_size:
                ready.append(self._hand_on(oldest))
            elif sum(len(ranks) == self._world_size for ranks in self._ended.values()) >= self._patience:
                self._give_up(oldest)
            else:
                break
        return ready

    def _hand_on(self, step: int) -> dict[int, list[Event]]:
        found = {rank: self._open[rank][step] for rank in sorted(self._open)}
        self._close(step)
        return found

    def _give_up(self, step: int) -> None:
        self.incomplete += 1
        self._close(step)

    def _close(self, step: int) -> None:
        self._done = step
        self._ended = {each: ranks for each, ranks in self._ended.items() if each > step}
        for steps in self._open.values():
            for old in [each for each in steps if each <= step]:  # an older one that nobody ended was broken off
                del steps[old]
