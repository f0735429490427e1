"""Holds workers back, for moments, that are far ahead of others: sums that one adds to are still in the processor's
cache from the others then, and adding takes a third of the time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from runtime.link import Link
from runtime.step_sum import StepSum

_MOST_AHEAD = 2 << 20  # bytes: as float64, what all workers are at is a part of a processor's last cache
_MOST_SECONDS = 0.01  # that one waits: others may be slow for reasons of their own


class Linked(Protocol):
    """A worker's connection."""

    @property
    def link(self) -> Link: ...


class Pace:
    """Of the workers that send a step's gradients. On the event loop."""

    def __init__(self, workers: Mapping[int, Linked]) -> None:
        self._workers = workers
        self._held: dict[int, asyncio.TimerHandle] = {}
        self._free_until: dict[int, int] = {}
        """How many bytes of its gradient each worker may send before it is held back again."""

    def moved(self, total: StepSum, worker: int) -> None:
        """More has come of this worker."""
        lead = total.lead_of(worker)
        if lead > _MOST_AHEAD:
            self._hold(total, worker)
        elif not lead and self._held:
            for other in [each for each in self._held if total.lead_of(each) <= _MOST_AHEAD]:
                self._let_go(other)

    def _hold(self, total: StepSum, worker: int) -> None:
        num_bytes = total.bytes_of(worker)
        if worker in self._held or num_bytes < self._free_until.get(worker, 0):
            return
        self._workers[worker].link.pause()
        self._free_until[worker] = num_bytes + _MOST_AHEAD
        self._held[worker] = asyncio.get_running_loop().call_later(_MOST_SECONDS, self._let_go, worker)

    def _let_go(self, worker: int) -> None:
        self._held.pop(worker).cancel()
        if worker in self._workers:
            self._workers[worker].link.resume()

    def end(self) -> None:
        """Of these gradients; the next ones are measured anew."""
        for worker in [*self._held]:
            self._let_go(worker)
        self._free_until.clear()
