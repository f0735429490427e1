"""The events that a step leaves beside its actions, and the moment where one step ends and the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
    """Of one step on this rank; its actions lie between `opened` and `acted`."""

    data: Span | None
    """Waiting for its batch; None where the batch was not asked for here."""
    opened: Span | None
    """Telling the other replicas how much its batch counts; None where there are none."""
    acted: float
    """The end of its last action; where ranks of a replica add up gradients that they share, the end of that."""
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
        """When the step before ended; before the first, when all was set up."""
        self._exchange = None if exchange is None or exchange.is_recorded_by_group else exchange
        self._told = dict[Outcome, tuple[int, int, float]]()
        """Of the exchange: calls, bytes and seconds that were told of."""

    def end(self, step: int, moments: StepMoments) -> Span:
        """Leave the step's events, the one of the whole step last; gives the whole step."""
        whole = Span(self.ended, moments.ended)
        if self.recorder is not None:
            self._leave(self.recorder, step, moments)
            self._leave_exchanges(self.recorder, Span(self.ended, moments.reduced))
            self.recorder.record(What.STEP, step, *whole)
            self.recorder.step = step + 1
        self.ended = moments.ended
        return whole

    def _leave(self, recorder: Recorder, step: int, moments: StepMoments) -> None:
        record, met = recorder.record, moments.met
        if moments.data is not None:
            record(What.DATA, step, *moments.data)
        if moments.opened is not None:
            record(What.REDUCE, step, *moments.opened)
        record(What.REDUCE, step, moments.acted, moments.reduced)
        record(What.OPTIMIZER, step, moments.reduced, met.start)
        record(What.MEET, step, *met)
        record(What.OPTIMIZER, step, met.end, moments.ended)

    def _leave_exchanges(self, recorder: Recorder, within: Span) -> None:
        """Tensor-parallel ones, of which there are too many for an event each."""
        if self._exchange is None:
            return
        for outcome, moved in self._exchange.moved.items():
            calls, num_bytes, seconds = self._since_told(outcome, self._exchange.moved)
            if calls:
                kind = _CALLS[outcome]
                recorder.collective("tp", kind, "default", num_bytes, seconds, within.start, calls, within.end)
                self._told[outcome] = moved.calls, moved.num_bytes, moved.seconds

    def _since_told(self, outcome: Outcome, moved: Mapping[Outcome, Moved]) -> tuple[int, int, float]:
        calls, num_bytes, seconds = self._told.get(outcome, (0, 0, 0.0))
        now = moved[outcome]
        return now.calls - calls, now.num_bytes - num_bytes, max(0.0, now.seconds - seconds)
