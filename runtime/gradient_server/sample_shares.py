"""Shares of a step's samples: contiguous, even or by measured speed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

WORTH = 0.05
"""Fraction of a step's time that new shares must save, so that noise does not move samples back and forth."""
_LATEST = 0.3  # weight of the latest step in a worker's speed


class Share(NamedTuple):
    """Samples [start, end) of a step."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


Shares: TypeAlias = dict[int, Share]
"""Share by worker id, in order of the ids."""


def even(total: int, workers: Iterable[int]) -> Shares:
    """Equal shares; the last also gets the remainder."""
    order = sorted(workers)
    size = total // len(order)
    lengths = [size] * (len(order) - 1)
    return _laid_out(order, [*lengths, total - sum(lengths)])


def by_speed(total: int, speeds: Mapping[int, float]) -> Shares:
    """Shares that take all workers about the same time. Each gets a sample if there are enough."""
    order = sorted(speeds)
    least = 1 if total >= len(order) else 0
    whole = sum(speeds.values())
    lengths = {worker: max(least, int(total * speeds[worker] / whole)) for worker in order}
    while (missing := total - sum(lengths.values())) != 0:
        if missing > 0:
            lengths[min(order, key=lambda worker: (lengths[worker] + 1) / speeds[worker])] += 1
        else:
            spare = [worker for worker in order if lengths[worker] > least]
            lengths[max(spare, key=lambda worker: lengths[worker] / speeds[worker])] -= 1
    return _laid_out(order, lengths.values())


def _laid_out(order: Iterable[int], lengths: Iterable[int]) -> Shares:
    shares: Shares = {}
    start = 0
    for worker, length in zip(order, lengths, strict=True):
        shares[worker] = Share(start, start + length)
        start += length
    return shares


class Speeds:
    """Samples per second of each worker, averaged over its latest steps."""

    def __init__(self) -> None:
        self._speeds: dict[int, float] = {}

    def note(self, worker: int, samples: int, seconds: float) -> None:
        """Record how long a worker took for its share of a step."""
        if samples > 0 and seconds > 0:
            speed = samples / seconds
            self._speeds[worker] = speed if worker not in self._speeds else self._blend(self._speeds[worker], speed)

    def _blend(self, before: float, now: float) -> float:
        return before + _LATEST * (now - before)

    def forget(self, worker: int) -> None:
        self._speeds.pop(worker, None)

    def shares(self, total: int, workers: Iterable[int], current: Shares | None = None) -> Shares:
        """Shares by speed; the current ones if new ones save too little, even ones until all workers are measured."""
        order = sorted(workers)
        if not all(worker in self._speeds for worker in order):
            return even(total, order)
        speeds = {worker: self._speeds[worker] for worker in order}
        best = by_speed(total, speeds)
        is_kept = current is not None and [*current] == order and max(each.end for each in current.values()) == total
        if current is not None and is_kept and _seconds(best, speeds) > (1 - WORTH) * _seconds(current, speeds):
            return current
        return best


def _seconds(shares: Shares, speeds: Mapping[int, float]) -> float:
    return max(share.length / speeds[worker] for worker, share in shares.items())
