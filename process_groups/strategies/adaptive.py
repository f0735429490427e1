"""Chooses how an all-reduce of a given size is carried out: measured, agreed by all ranks, refined by real calls.

Everything here happens inside the calls themselves, in their order, so that all ranks choose alike: the first
adaptive call of a group measures, and every 512th of a size class compares notes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch

from process_groups.call import Call, Explanation
from process_groups.call_queue import Steps, Wait
from process_groups.strategies import measurements
from process_groups.strategies.measurements import Rows

CANDIDATES = ("default", "ring", "tree", "hierarchical")
_SIZES = (12, 16, 20, 24)  # measured classes: 4 KiB, 64 KiB, 1 MiB, 16 MiB
_CLASSES = 52  # that can be kept: one bit each of what a float64 counts exactly
_REPEATS = 5
_BUDGET = 1.0  # seconds that a size may be expected to take; one that takes longer is measured less often, or not
_MEASURING = 10.0  # seconds that measuring may take in all: twice what four such sizes and their barriers do
_HOPELESS = 4.0  # times slower than the best: not measured at larger sizes
_PERIOD = 512  # calls of a size class between two comparisons
_TRIES = 2  # calls before the last of a period: the first one meets what the strategy in use has left in the caches
_WORTH_A_TRY = 2.0  # times slower than the one in use, and still tried in most periods: things change
_ANY_EVERY = 4  # periods: then any is tried, for how slow the others are may have been measured in a bad moment
_CLEARLY = 0.9  # a change needs a gain of 10 %, or noise would decide

Pinned = tuple[tuple[int, str], ...]
"""(bytes, strategy): up to this size this one; above the last, the last."""

Run = Callable[[Call, str], Steps]
"""Carries out a call by a strategy."""


@dataclass(slots=True)
class _Class:
    """The calls of one size class."""

    chosen: int
    num_calls: int = 0
    tried: int = 0
    """In this period, once its tries have begun."""
    best: list[float] = field(default_factory=lambda: [math.inf] * len(CANDIDATES))
    """Seconds of this rank's fastest call since notes were compared. The last to arrive does not wait for others, so
    the least over all ranks is what the call itself takes."""


class Adaptive:
    """One group's table."""

    def __init__(
        self,
        run: Run,
        scratch: Callable[[int], torch.Tensor],
        me: int,
        layout: str,
        pinned: Pinned,
        device: torch.device | None = None,
        above: int = 0,
    ) -> None:
        """`scratch` gives bytes to measure with; `layout` is what measurements are kept for, on a kind of host; only
        calls of more bytes than `above` will come."""
        self._device = device
        self._sizes = [size for size in _SIZES if 1 << size > above]
        self._run, self._scratch, self._me, self._layout, self._pinned = run, scratch, me, layout, pinned
        self._rows: Rows = {}
        self._source = ""
        self._classes: dict[int, _Class] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a call does no more than its own work."""
        return bool(self._rows or self._pinned)

    @property
    def extra_seconds(self) -> float:
        """What the next call may take beside its own work."""
        return 0.0 if self.is_ready else _MEASURING

    def steps(self, call: Call) -> Steps:
        """An adaptive all-reduce."""
        assert call.target is not None
        num_bytes = call.target.nbytes
        if self._pinned:
            call.carried_out_by = self._pinned_for(num_bytes)
            yield from self._run(call, call.carried_out_by)
            return
        if not self._rows:
            yield from self._find_rows()
        size = num_bytes.bit_length()
        found = self._classes.get(size)
        if found is None:
            found = self._classes[size] = _Class(_least(self._row(size)))
        found.num_calls += 1
        turn = found.num_calls % _PERIOD
        if turn == _PERIOD - _TRIES:
            found.tried = self._to_try(found, size)
        index = found.tried if turn >= _PERIOD - _TRIES else found.chosen
        call.carried_out_by = CANDIDATES[index]
        began = time.perf_counter()
        yield from self._run(call, CANDIDATES[index])
        found.best[index] = min(found.best[index], time.perf_counter() - began)
        if turn == 0:
            yield from self._compare(found, size)

    def explain(self, num_bytes: int) -> Explanation:
        """What an adaptive call of so many bytes would use."""
        if self._pinned:
            return Explanation(self._pinned_for(num_bytes), "pinned by comm.strategy_table")
        if not self._rows:
            return Explanation("default", "not decided: the first adaptive call measures, unless an earlier run has")
        size = num_bytes.bit_length()
        row, found = self._row(size), self._classes.get(size)
        index = _least(row) if found is None else found.chosen
        why = f"the fastest of its size class, {self._source}"
        if found is not None and found.num_calls >= _PERIOD:
            why += f" and refined by {found.num_calls // _PERIOD * _PERIOD} calls"
        known = {name: seconds for name, seconds in zip(CANDIDATES, row, strict=True) if seconds < math.inf}
        return Explanation(CANDIDATES[index], why, known)

    def _pinned_for(self, num_bytes: int) -> str:
        return next((name for limit, name in self._pinned if num_bytes <= limit), self._pinned[-1][1])

    def _row(self, size: int) -> list[float]:
        """The row of the nearest class that has one."""
        return self._rows[min(self._rows, key=lambda known: (abs(known - size), known))]

    def _to_try(self, found: _Class, size: int) -> int:
        """Another candidate that may have become the best."""
        row, period = self._row(size), found.num_calls // _PERIOD + 1
        limit, turn = _WORTH_A_TRY * row[found.chosen], period
        if period % _ANY_EVERY == 0:
            limit, turn = math.inf, period // _ANY_EVERY - 1
        worth = [index for index, seconds in enumerate(row) if index != found.chosen and seconds <= limit]
        return worth[turn % len(worth)] if worth else found.chosen

    def _compare(self, found: _Class, size: int) -> Steps:
        seen = yield from self._agree(found.best, "min")
        row = [now if now < math.inf else before for now, before in zip(seen, self._row(size), strict=True)]
        self._rows = {**self._rows, size: row}  # `explain` may be looking, in another thread
        best = _least(row)
        if row[best] < _CLEARLY * row[found.chosen]:
            found.chosen = best
            self._keep()
        found.best = [math.inf] * len(CANDIDATES)

    # Measuring.

    def _find_rows(self) -> Steps:
        """From what an earlier run has kept, as the group's first rank knows it; else by measuring."""
        kept = (measurements.load(self._layout, CANDIDATES) or {}) if self._me == 0 else {}
        known = sum(1 << size for size in kept if 0 <= size < _CLASSES and kept[size][0] < math.inf)
        (known_to_all,) = yield from self._agree([float(known)], "max")
        rows: Rows = {}
        for size in (size for size in range(_CLASSES) if int(known_to_all) >> size & 1):
            rows[size + 1] = yield from self._agree(kept.get(size, [math.inf] * len(CANDIDATES)), "min")
        if rows:
            self._rows, self._source = rows, "measured by an earlier run on this kind of host"
            return
        rows = yield from self._measure()
        self._rows, self._source = rows, "measured by this group's first adaptive call"
        self._keep()

    def _keep(self) -> None:
        """For the next run."""
        if self._me == 0:
            measurements.save(self._layout, CANDIDATES, {size - 1: row for size, row in self._rows.items()})

    def _measure(self) -> Generator[Wait, None, Rows]:
        rows: Rows = {}
        candidates, repeats = set(range(len(CANDIDATES))), _REPEATS
        for size, next_size in zip(self._sizes, (*self._sizes[1:], math.inf), strict=True):
            values = self._scratch(1 << size).view(torch.float32).zero_()
            best = [math.inf] * len(CANDIDATES)
            for _ in range(repeats):  # in turns: a noisy moment shall not decide
                for index in sorted(candidates):
                    seconds = yield from self._time(values, CANDIDATES[index])
                    best[index] = min(best[index], seconds)
            row = yield from self._agree(best, "max")
            rows[size + 1] = row
            candidates = {index for index in candidates if row[index] <= _HOPELESS * min(row)}
            expected = 2 * sum(row[index] for index in candidates) * 2.0 ** (next_size - size)
            repeats = min(_REPEATS, int(_BUDGET / expected))
            if repeats == 0:
                break
        return rows

    def _time(self, values: torch.Tensor, strategy: str) -> Generator[Wait, None, float]:
        """Seconds of a call that all ranks begin together; the second of two, which finds in the caches what the first
        has left there."""
        seconds = math.inf
        for _ in range(2):
            yield from self._run(Call("barrier"), "default")
            began = time.perf_counter()
            yield from self._run(Call("all_reduce", values, values, op="sum"), strategy)
            seconds = time.perf_counter() - began
        return seconds

    def _agree(self, row: Sequence[float], op: str) -> Generator[Wait, None, list[float]]:
        values = torch.tensor(row, dtype=torch.float64, device=self._device)
        yield from self._run(Call("all_reduce", values, values, op=op), "default")
        return values.tolist()


def _least(row: Sequence[float]) -> int:
    """The fastest; `default`, which comes first, unless another is clearly faster."""
    best = min(range(len(row)), key=row.__getitem__)
    return best if row[best] < _CLEARLY * row[0] else 0
