"""The events of a step beside its actions, and the moment where one step ends and the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from monitoring.events.collectives import bus_factor
from monitoring.events.events import What
from monitoring.events.recorder import Recorder
from process_groups.tensor_exchange import Moved, Outcome, TensorExchange

_CALLS = {Outcome.ALL_REDUCE: "all_reduce", Outcome.REDUCE_SCATTER: "reduce_scatter", Outcome.ALL_GATHER: "all_gather"}


class Span(NamedTuple):
    """Moments of time.monotonic."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StepMoments:
    """When the phases of one step ran on this rank; its actions lie between `agreed` and `acted`."""

    data: Span | None
    """Waiting for its batch; None if the batch did not come from the coordinator."""
    agreed: Span | None
    """Exchanging with the other replicas how much the batch counts; None with a single replica."""
    acted: float
    """The end of its last action; if ranks of a replica add up gradients that they share, the end of that."""
    reduced: float
    met: Span
    """Waiting for all ranks' norms and losses."""
    ended: float


class StepEvents:
    """Of one rank. Without a recorder it only knows when steps ended."""

    def __init__(
        self,
        recorder: Recorder | None,
        exchange: TensorExchange | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recorder = recorder
        self.ended = clock()
        """When the step before ended; before the first one, when the set-up ended."""
        self._exchange = exchange
        self._recorded = dict[Outcome, Moved]()
        self._measured = dict[Outcome, Moved]()

    def end(self, step: int, moments: StepMoments) -> Span:
        """Record the step's events, that of the whole step last; returns the whole step."""
        whole = Span(self.ended, moments.ended)
        if self.recorder is not None:
            self._record(self.recorder, step, moments)
            self._record_exchanges(self.recorder, Span(self.ended, moments.reduced))
            self.recorder.record(What.STEP, step, *whole)
            self.recorder.step = step + 1
        self.ended = moments.ended
        return whole

    def tensor_bandwidth(self) -> float | None:
        """Bus bandwidth of the tensor-parallel all-reduces since the last call, in 10⁹ bytes a second; None without
        any."""
        if self._exchange is None:
            return None
        moved = _since(self._exchange, Outcome.ALL_REDUCE, self._measured)
        factor = bus_factor("all_reduce", self._exchange.size)
        return factor * moved.num_bytes / moved.seconds / 1e9 if moved.seconds > 0 else None

    def _record(self, recorder: Recorder, step: int, moments: StepMoments) -> None:
        record, met = recorder.record, moments.met
        if moments.data is not None:
            record(What.DATA, step, *moments.data)
        if moments.agreed is not None:
            record(What.REDUCE, step, *moments.agreed)
        record(What.REDUCE, step, moments.acted, moments.reduced)
        record(What.OPTIMIZER, step, moments.reduced, met.start)
        record(What.MEET, step, *met)
        record(What.OPTIMIZER, step, met.end, moments.ended)

    def _record_exchanges(self, recorder: Recorder, within: Span) -> None:
        """One event a kind of tensor-parallel exchange: there are too many for one each."""
        if self._exchange is None or self._exchange.is_recorded_by_group:
            return
        for outcome in self._exchange.moved:
            moved = _since(self._exchange, outcome, self._recorded)
            if moved.calls:
                num_bytes, seconds = moved.num_bytes, max(0.0, moved.seconds)
                recorder.collective(
                    "tp", _CALLS[outcome], "default", num_bytes, seconds, within.start, moved.calls, within.end
                )


def _since(exchange: TensorExchange, outcome: Outcome, before: dict[Outcome, Moved]) -> Moved:
    """What was moved since the last call with this `before`, which is brought up to date."""
    now, then = exchange.moved[outcome], before.get(outcome, Moved())
    before[outcome] = Moved(now.calls, now.num_bytes, now.seconds)
    return Moved(now.calls - then.calls, now.num_bytes - then.num_bytes, now.seconds - then.seconds)
