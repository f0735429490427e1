"""Observes a live run: processes its ranks' messages, and notifies subscribers of changes.

Not thread-safe: one thread calls `take` and reads `state` and `analysis`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from monitoring.analysis.facts import Place, RankFacts, RunFacts
from monitoring.analysis.observations import Bottleneck, StepTimes, Straggler
from monitoring.analysis.rules.bottlenecks import Planner, find_bottlenecks
from monitoring.events.events import Event
from monitoring.events.time_parts import mean_of
from monitoring.live.run_state import RunState
from monitoring.live.step_analysis import Find, StepAnalysis
from monitoring.messages import (
    ClockOffset,
    Collectives,
    DataQueue,
    Events,
    Joined,
    LogLine,
    LoopLag,
    Malformed,
    Memory,
    Message,
    NonFinite,
    RankEndpoint,
    Ready,
    RunStep,
)

OnChange = Callable[[str, Any], None]
"""Called with a kind and its payload. "step": `RunStep.to_json_with` the parts, which are mostly still null; "parts":
{step, seconds, parts, stragglers}, usually after the step; "bottlenecks" and "stragglers": those that changed,
each with a `state`, `found` or `gone`; "log": the record."""


class ChangeFeed:
    """Holds changes back until `flush`, so that subscribers see the state after the whole message."""

    def __init__(self) -> None:
        self._callbacks: list[OnChange] = []
        self._pending: list[tuple[str, Any]] = []

    def subscribe(self, callback: OnChange) -> None:
        self._callbacks.append(callback)

    def put(self, kind: str, payload: Any) -> None:
        self._pending.append((kind, payload))

    def put_difference(self, kind: str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
        """Put the entries that were added or removed; nothing if the keys are the same."""
        found = [{"state": "found", **after[key].to_json()} for key in after if key not in before]
        gone = [{"state": "gone", **before[key].to_json()} for key in before if key not in after]
        if found or gone:
            self.put(kind, found + gone)

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        for kind, payload in pending:
            for callback in self._callbacks:
                callback(kind, payload)


class Observer:
    """The observer of one run. `planner` is passed to the rules."""

    def __init__(
        self,
        facts: RunFacts,
        planner: Planner | None = None,
        *,
        find: Find = find_bottlenecks,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = RunState(facts)
        self.analysis = StepAnalysis(self.state, planner, find, clock=clock)
        self.changes = ChangeFeed()
        self._now, self._clock = now, clock
        self._takers: dict[type[Message], Callable[[int, Any], None]] = {
            Joined: self._take_joined,
            Ready: self._take_ready,
            RunStep: self._take_step,
            Events: self._take_events,
            Memory: self._take_memory,
            DataQueue: self._take_queue,
            LoopLag: self._take_lag,
            Collectives: self._take_collectives,
            ClockOffset: self._take_clock,
            LogLine: self._take_log_line,
            NonFinite: self._take_nonfinite,
            RankEndpoint: self._take_endpoint,
            Malformed: self._take_malformed,
        }

    def take(self, rank: int, message: Message | None) -> None:
        """Process a rank's message. None (a message of another kind) only shows that the rank is alive."""
        self.state.last_seen[rank] = self._now()
        if message is not None:
            self._takers[type(message)](rank, message)
            self.changes.flush()

    def finish(self) -> None:
        """Call after the last message: evaluates the rules once more."""
        self.analysis.flush()
        self._find_bottlenecks()
        self.changes.flush()

    def note(self, record: Mapping[str, Any]) -> None:
        """Add a log record of the run itself, not of a rank."""
        self._log(dict(record))
        self.changes.flush()

    def summary(self) -> dict[str, Any]:
        """For `metrics.json`. `parts` are shares of the ranks' mean time; times exclude the warm-up steps."""
        state, analysis = self.state, self.analysis
        return {
            "parts": mean_of([each.counted.parts for each in analysis.totals.values()]).shares(),
            "bottlenecks": [each.to_json() for each in analysis.bottlenecks],
            "stragglers": [each.to_json() for each in analysis.stragglers],
            "nonfinite_gradients": state.nonfinite,
            "events_dropped": sum(state.dropped.values()),
            "incomplete_steps": analysis.incomplete,
            "ranks": {rank: self._summary_of(rank) for rank in sorted(state.ranks)},
        }

    def _summary_of(self, rank: int) -> dict[str, Any]:
        state, totals = self.state, self.analysis.totals.get(rank)
        return {
            "host": state.ranks[rank].host,
            "memory_bytes": state.peak_memory.get(rank),
            "memory_kinds": state.memory.get(rank, {}),
            "straggler_score": self.analysis.scores.get(rank),
            "steps": 0,
            **(totals.counted.to_json() if totals is not None else {}),
        }

    # Messages.

    def _take_joined(self, rank: int, message: Joined) -> None:
        ready = self.state.ready.get(rank)
        place = Place(message.dp, message.tp, message.pp)
        self.state.ranks[rank] = RankFacts(rank, place, **(asdict(ready) if ready is not None else {}))

    def _take_ready(self, rank: int, message: Ready) -> None:
        self.state.ready[rank] = message
        if rank in self.state.ranks:
            self.state.ranks[rank] = replace(self.state.ranks[rank], **asdict(message))

    def _take_step(self, _: int, step: RunStep) -> None:
        self.state.add_step(step)
        self.changes.put("step", step.to_json_with(self.state.parts.get(step.step)))

    def _take_events(self, rank: int, message: Events) -> None:
        state = self.state
        if message.dropped > state.dropped.get(rank, 0):
            self.analysis.lose(rank)
        state.dropped[rank] = message.dropped
        try:
            events = message.unpack(state.offsets.get(rank, 0.0))
            state.traffic.take_events(rank, events)
            self._analyse(rank, events)
        except (KeyError, ValueError, OverflowError):  # records, or a combination of them, that no coordinator writes
            state.malformed += 1

    def _analyse(self, rank: int, events: Sequence[Event]) -> None:
        before = self.analysis.stragglers
        for times in self.analysis.take(rank, events):
            self._note_step(times, before)
            before = self.analysis.stragglers

    def _note_step(self, times: StepTimes, before: Sequence[Straggler]) -> None:
        """Publish the changes that follow from a step's attributed time."""
        slow = self.analysis.stragglers
        ranks = [each.rank for each in slow]
        fields = {"step": times.step, "seconds": times.seconds, "parts": times.parts.to_json(), "stragglers": ranks}
        self.changes.put("parts", fields)
        self.changes.put_difference("stragglers", _by_rank(before), _by_rank(slow))
        if self.analysis.is_due:
            self._find_bottlenecks()

    def _find_bottlenecks(self) -> None:
        before = _by_identity(self.analysis.bottlenecks)
        self.analysis.find_bottlenecks()
        self.changes.put_difference("bottlenecks", before, _by_identity(self.analysis.bottlenecks))

    def _take_memory(self, rank: int, message: Memory) -> None:
        self.state.memory[rank] = {"process": message.process, **message.kinds}
        self.state.peak_memory[rank] = max(self.state.memory[rank]["process"], self.state.peak_memory.get(rank, 0))

    def _take_queue(self, rank: int, message: DataQueue) -> None:
        self.state.add_queue(rank, message.mean, message.capacity)

    def _take_lag(self, rank: int, message: LoopLag) -> None:
        self.state.lag[rank] = message.histogram
        self.state.recent_lag.take(rank, message.histogram, self._clock())

    def _take_collectives(self, rank: int, message: Collectives) -> None:
        self.state.traffic.take_totals(rank, message.mesh, message.totals)

    def _take_clock(self, rank: int, message: ClockOffset) -> None:
        self.state.offsets[rank] = message.seconds

    def _take_log_line(self, _: int, message: LogLine) -> None:
        self._log(message.record)

    def _log(self, record: dict[str, Any]) -> None:
        self.state.logs.append(record)
        self.changes.put("log", record)

    def _take_nonfinite(self, _: int, message: NonFinite) -> None:
        """Counts a step once, however many ranks report it."""
        self.state.nonfinite += message.step != self.state.last_nonfinite
        self.state.last_nonfinite = message.step

    def _take_endpoint(self, rank: int, message: RankEndpoint) -> None:
        self.state.endpoints[rank] = message

    def _take_malformed(self, _: int, __: Malformed) -> None:
        self.state.malformed += 1


def _by_rank(stragglers: Sequence[Straggler]) -> dict[int, Straggler]:
    return {each.rank: each for each in stragglers}


def _by_identity(bottlenecks: Sequence[Bottleneck]) -> dict[tuple[Any, ...], Bottleneck]:
    """Keyed by the fields that stay the same; the numbers change with each evaluation."""
    return {(each.kind, each.rank, each.host, each.axis): each for each in bottlenecks}
