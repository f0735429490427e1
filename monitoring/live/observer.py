"""Everything that is known of a run while it goes on: the ranks' messages in, what others show and write out.

One thread owns it, feeds it with `take` and reads it. Messages, by kind: `mesh`, `ready`, `step` (of rank 0), `events`,
`memory`, `queue`, `loop_lag`, `collectives`, `clock`, `log`, `nonfinite`. What does not fit is counted and left out.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from monitoring.analysis.attribution import attribute
from monitoring.analysis.bottlenecks import Planner, find_bottlenecks
from monitoring.analysis.facts import Place, RankFacts, RunFacts
from monitoring.analysis.observations import Bottleneck, StepTimes, Straggler, ToldStep, Window
from monitoring.analysis.recent_lag import RecentLag
from monitoring.analysis.stragglers import StragglerDetector
from monitoring.analysis.summary import summarize
from monitoring.analysis.timeline import Timeline
from monitoring.analysis.totals import WARM_UP, RankTotals
from monitoring.analysis.traffic import CallTotals, Traffic, Where
from monitoring.analysis.window import LatestSteps
from monitoring.checks import count, finite, number, text, whole_number
from monitoring.events.collectives import CollectiveRecorder
from monitoring.events.events import ACTIONS, Event, unpack
from monitoring.events.loop_lag import LagHistogram
from monitoring.events.time_parts import TimeParts
from monitoring.live.cpu_budget import Ration

MOST_STEPS, MOST_LOGS = 10_000, 1000
RULES_SECONDS = 1.0
RULES_SHARE = 0.00025
"""Of a core that rules may take: they simulate pipelines, and ranks want the cores."""
_MOST_AHEAD = 256  # steps whose parts are known before rank 0 has told of them
_QUEUE_REPORTS = 20

Find = Callable[[Window, RunFacts, Mapping[int, RankFacts], Planner | None], list[Bottleneck]]
OnChange = Callable[[str, Any], None]
"""Called with "step": a `ToldStep.to_json()`, its parts null; "parts": {step, seconds, parts, stragglers}, some moments
later; "bottlenecks" and "stragglers": a list of those that changed, each with its `state`, `found` or `gone`; "log":
the record."""


class Observer:
    """Of one run. `planner` is handed to the rules, which are asked at most once a second, and by `finish`."""

    def __init__(
        self,
        facts: RunFacts,
        planner: Planner | None = None,
        *,
        find: Find = find_bottlenecks,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self.ranks: dict[int, RankFacts] = {}
        """Of those that are in their mesh."""
        self.steps: deque[ToldStep] = deque(maxlen=MOST_STEPS)
        self.num_steps = self.num_tokens = 0
        """Of all that rank 0 has told of."""
        self.step_seconds = 0.0
        self.latest: StepTimes | None = None
        self.totals: dict[int, RankTotals] = {}
        self.bottlenecks: list[Bottleneck] = []
        self.memory: dict[int, dict[str, int]] = {}
        """Bytes by kind, as told last; `process` is all of a rank's, in which the other kinds are contained."""
        self.peak_memory: dict[int, int] = {}
        """The most that was told of `process`."""
        self.queue: dict[int, float] = {}
        """Batches that were ready when a rank asked for one: the mean of its latest report."""
        self.queue_capacity: int | None = None
        self.lag: dict[int, LagHistogram] = {}
        self.dropped: dict[int, int] = {}
        self.malformed = self.nonfinite = 0
        self.last_seen: dict[int, float] = {}
        """Seconds of time.time."""
        self.logs: deque[dict[str, Any]] = deque(maxlen=MOST_LOGS)
        self.on_change: list[OnChange] = []
        self._planner, self._find, self._now, self._clock = planner, find, now, clock
        self._ready: dict[int, dict[str, Any]] = {}
        self._offsets: dict[int, float] = {}
        self._timeline = Timeline(facts.world_size)
        self._unknown = 0
        self._latest_steps = LatestSteps(WARM_UP)
        self._detector = StragglerDetector(WARM_UP)
        sizes = {"world": facts.world_size, "dp": facts.dp, "tp": facts.tp, "pp": facts.pp}
        self._traffic = Traffic(sizes)
        self._recent_lag = RecentLag()
        self._queues: dict[int, deque[float]] = {}
        self._ahead: dict[int, TimeParts] = {}
        self._nonfinite_step: int | None = None
        self._window: Window | None = None
        self._latest_events: Mapping[int, Sequence[Event]] | None = None
        self._rules = Ration(RULES_SHARE, RULES_SECONDS, clock=clock)
        self._news: list[tuple[str, Any]] = []
        self._takers: dict[str, Callable[[int, Mapping[str, Any]], None]] = {
            "mesh": self._take_mesh,
            "ready": self._take_ready,
            "step": self._take_step,
            "events": self._take_events,
            "memory": self._take_memory,
            "queue": self._take_queue,
            "loop_lag": self._take_lag,
            "collectives": self._take_collectives,
            "clock": self._take_clock,
            "log": self._take_log,
            "nonfinite": self._take_nonfinite,
        }

    def take(self, rank: int, message: Mapping[str, Any]) -> None:
        """A rank's message; of a kind that is not ours, it shows that the rank lives."""
        self.last_seen[rank] = self._now()
        taker = self._takers.get(str(message.get("kind")))
        if taker is None:
            return
        try:
            taker(rank, message)
        except (KeyError, TypeError, ValueError, OverflowError):
            self.malformed += 1
        self._tell()

    def finish(self) -> None:
        """No message comes any more: rules look once again."""
        self._timeline.flush()
        self._look()
        self._tell()

    def _tell(self) -> None:
        """Once a message is wholly taken: whoever is told finds all of it."""
        news, self._news = self._news, []
        for kind, payload in news:
            for callback in self.on_change:
                callback(kind, payload)

    def note(self, record: Mapping[str, Any]) -> None:
        """A log line of the run's own, not of a rank."""
        self.logs.append(dict(record))
        self._news.append(("log", dict(record)))
        self._tell()

    # What follows from it.

    @property
    def incomplete(self) -> int:
        """Steps that nothing can be said of, because events were lost or a rank is not known."""
        return self._timeline.incomplete + self._unknown

    @property
    def scores(self) -> dict[int, float]:
        return self._detector.scores

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        return self._detector.stragglers

    @property
    def traffic(self) -> dict[Where, CallTotals]:
        """By op and axis."""
        return self._traffic.totals()

    @property
    def bandwidth(self) -> dict[tuple[str, str, str], float]:
        """Bytes a second by op, axis and strategy."""
        return self._traffic.bandwidths()

    @property
    def last_pipeline(self) -> dict[int, list[Event]] | None:
        """The actions of the latest complete step by rank, all in one clock; None before."""
        if self._latest_events is None:
            return None
        return {rank: [each for each in found if each.what in ACTIONS] for rank, found in self._latest_events.items()}

    @property
    def bubble(self) -> float | None:
        """Of the latest step, the ranks' mean; None before one is known."""
        latest = self.latest
        return None if latest is None else sum(each.bubble_ratio for each in latest.ranks) / len(latest.ranks)

    @property
    def bubble_by_stage(self) -> dict[int, float]:
        """By a rank's place along pp: the mean of the window. Empty before it has a step."""
        found: dict[int, list[float]] = {}
        for rank, means in self.window().ranks.items():
            found.setdefault(self.ranks[rank].place.pp, []).append(means.bubble_ratio)
        return {stage: sum(ratios) / len(ratios) for stage, ratios in sorted(found.items())}

    def window(self) -> Window:
        """The latest 20 steps."""
        if self._window is None:
            self._window = self._latest_steps.window(
                self.scores,
                self.stragglers,
                self.peak_memory,
                self._recent_lag.histograms(self._clock()),
                {rank: sum(means) / len(means) for rank, means in self._queues.items()},
            )
        return self._window

    def summary(self) -> dict[str, Any]:
        """For `metrics.json`: what the ranks' steps took, and what came of it."""
        return summarize(self)

    # Messages.

    def _take_mesh(self, rank: int, message: Mapping[str, Any]) -> None:
        dp, tp, pp = map(count, message["coords"])
        self.ranks[rank] = RankFacts(rank, Place(dp, tp, pp), **self._ready.get(rank, {}))

    def _take_ready(self, rank: int, message: Mapping[str, Any]) -> None:
        self._ready[rank] = {
            "host": text(message.get("host", "")),
            "device": text(message["device"]),
            "parameters": count(message["parameters"]),
            "num_cores": count(message.get("num_cores", 0)),
        }
        if rank in self.ranks:
            self.ranks[rank] = replace(self.ranks[rank], **self._ready[rank])

    def _take_step(self, rank: int, message: Mapping[str, Any]) -> None:
        if rank != 0:
            return
        step = ToldStep(
            step=count(message["step"]),
            loss=number(message["loss"]),
            grad_norm=number(message["grad_norm"]),
            learning_rate=number(message["learning_rate"]),
            tokens=count(message["tokens"]),
            seconds=finite(message["seconds"]),
        )
        step.parts = self._ahead.pop(step.step, None)
        self.steps.append(step)
        self.num_steps += 1
        self.num_tokens += step.tokens
        self.step_seconds += step.seconds
        self._news.append(("step", step.to_json()))

    def _take_events(self, rank: int, message: Mapping[str, Any]) -> None:
        dropped = count(message["dropped"])
        if dropped > self.dropped.get(rank, 0):
            self._timeline.lose(rank)
        self.dropped[rank] = dropped
        events = unpack(base64.b64decode(message["data"], validate=True), self._offsets.get(rank, 0.0))
        self._traffic.take_events(rank, events)
        for step in self._timeline.take(rank, events):
            self._take_whole_step(step)

    def _take_memory(self, rank: int, message: Mapping[str, Any]) -> None:
        found = {text(kind): count(size) for kind, size in dict(message.get("kinds", {})).items()}
        self.memory[rank] = {"process": count(message["bytes"]), **found}
        self.peak_memory[rank] = max(self.memory[rank]["process"], self.peak_memory.get(rank, 0))

    def _take_queue(self, rank: int, message: Mapping[str, Any]) -> None:
        self.queue_capacity = count(message["capacity"])
        self.queue[rank] = finite(message["mean"])
        self._queues.setdefault(rank, deque(maxlen=_QUEUE_REPORTS)).append(self.queue[rank])

    def _take_lag(self, rank: int, message: Mapping[str, Any]) -> None:
        self.lag[rank] = LagHistogram.from_wire(message)
        self._recent_lag.take(rank, self.lag[rank], self._clock())

    def _take_collectives(self, rank: int, message: Mapping[str, Any]) -> None:
        self._traffic.take_totals(rank, whole_number(message["mesh"]), CollectiveRecorder.from_wire(message))

    def _take_clock(self, rank: int, message: Mapping[str, Any]) -> None:
        self._offsets[rank] = finite(message["offset"])

    def _take_log(self, rank: int, message: Mapping[str, Any]) -> None:
        record = {key: value for key, value in message.items() if key != "kind"} | {"rank": rank}
        self.logs.append(record)
        self._news.append(("log", record))

    def _take_nonfinite(self, rank: int, message: Mapping[str, Any]) -> None:
        """Once a step, whoever tells of it."""
        step = count(message["step"])
        self.nonfinite += step != self._nonfinite_step
        self._nonfinite_step = step

    # Steps.

    def _take_whole_step(self, events: Mapping[int, Sequence[Event]]) -> None:
        if not events.keys() <= self.ranks.keys():
            self._unknown += 1
            return
        times = attribute(events, self.ranks)
        self.latest, self._window = times, None
        for each in times.ranks:
            self.totals.setdefault(each.rank, RankTotals()).add(each, WARM_UP)
        named = self.stragglers
        self._detector.take(times, self.ranks)
        self._latest_steps.add(times)
        self._latest_events = events
        self._tell_parts(times)
        self._tell_changes("stragglers", _by_rank(named), _by_rank(self.stragglers))
        if self._rules.is_due:
            self._look()

    def _tell_parts(self, times: StepTimes) -> None:
        for told in reversed(self.steps):
            if told.step <= times.step:
                break
        else:
            told = None
        if told is not None and told.step == times.step:
            told.parts = times.parts
        elif len(self._ahead) < _MOST_AHEAD:
            self._ahead[times.step] = times.parts
        late = [each.rank for each in self.stragglers]
        fields = {"step": times.step, "seconds": times.seconds, "parts": times.parts.to_json(), "stragglers": late}
        self._news.append(("parts", fields))

    def _look(self) -> None:
        before = {_identity(each): each for each in self.bottlenecks}
        with self._rules.spent():
            self.bottlenecks = self._find(self.window(), self.facts, self.ranks, self._planner)
        self._tell_changes("bottlenecks", before, {_identity(each): each for each in self.bottlenecks})

    def _tell_changes(self, kind: str, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
        found = [{"state": "found", **after[key].to_json()} for key in after if key not in before]
        gone = [{"state": "gone", **before[key].to_json()} for key in before if key not in after]
        if found or gone:
            self._news.append((kind, found + gone))


def _by_rank(stragglers: Sequence[Straggler]) -> dict[int, Straggler]:
    return {each.rank: each for each in stragglers}


def _identity(bottleneck: Bottleneck) -> tuple[Any, ...]:
    """Its numbers change from look to look."""
    return bottleneck.kind, bottleneck.rank, bottleneck.host, bottleneck.axis
