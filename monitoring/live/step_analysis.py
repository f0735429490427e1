"""Analyses steps as they become complete: time attribution, stragglers and bottlenecks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from monitoring.analysis.attribution import attribute
from monitoring.analysis.facts import RankFacts, RunFacts
from monitoring.analysis.observations import Bottleneck, StepTimes, Straggler, Window
from monitoring.analysis.rules.bottlenecks import Planner, find_bottlenecks
from monitoring.analysis.stragglers import StragglerDetector
from monitoring.analysis.timeline import Timeline
from monitoring.analysis.totals import WARM_UP, RankTotals
from monitoring.analysis.window import LatestSteps
from monitoring.events.events import ACTIONS, Event
from monitoring.live.cpu_budget import CpuBudget
from monitoring.live.run_state import RunState

RULES_SECONDS = 1.0
RULES_SHARE = 0.00025
"""Share of a core that rules may use. They simulate pipelines, and the ranks need the cores."""

Find = Callable[[Window, RunFacts, Mapping[int, RankFacts], Planner | None], list[Bottleneck]]


class StepAnalysis:
    """The analysis of one run; `state` holds everything except the events. `is_due` is true at most once a second."""

    def __init__(
        self, state: RunState, planner: Planner | None, find: Find = find_bottlenecks, *, clock: Callable[[], float]
    ) -> None:
        self.latest: StepTimes | None = None
        self.totals: dict[int, RankTotals] = {}
        self.bottlenecks: list[Bottleneck] = []
        self._state, self._planner, self._find, self._clock = state, planner, find, clock
        self._timeline = Timeline(state.facts.world_size)
        self._num_unknown = 0
        self._latest_steps = LatestSteps(WARM_UP)
        self._detector = StragglerDetector(WARM_UP)
        self._window: Window | None = None
        self._latest_events: Mapping[int, Sequence[Event]] | None = None
        self._rules = CpuBudget(RULES_SHARE, RULES_SECONDS, clock=clock)

    def lose(self, rank: int) -> None:
        """Some events of this rank are lost."""
        self._timeline.lose(rank)

    def take(self, rank: int, events: Sequence[Event]) -> Iterator[StepTimes]:
        """Yields each step that these events complete, after the totals, scores and window are updated with it."""
        for step in self._timeline.take(rank, events):
            if step.keys() <= self._state.ranks.keys():
                yield self._analyse(step)
            else:
                self._num_unknown += 1

    def _analyse(self, events: Mapping[int, Sequence[Event]]) -> StepTimes:
        ranks = self._state.ranks
        times = attribute(events, ranks)
        self.latest, self._latest_events, self._window = times, events, None
        for each in times.ranks:
            self.totals.setdefault(each.rank, RankTotals()).add(each, WARM_UP)
        self._detector.take(times, ranks)
        self._latest_steps.add(times)
        self._state.add_parts(times.step, times.parts)
        return times

    @property
    def is_due(self) -> bool:
        """Whether the rules' time budget allows `find_bottlenecks` again."""
        return self._rules.is_due

    def find_bottlenecks(self) -> None:
        with self._rules.spent():
            self.bottlenecks = self._find(self.window(), self._state.facts, self._state.ranks, self._planner)

    def flush(self) -> None:
        """Call after the last events: steps still open count as incomplete."""
        self._timeline.flush()

    # Results.

    @property
    def incomplete(self) -> int:
        """Number of steps whose time is not attributed, because events were lost or a rank is unknown."""
        return self._timeline.incomplete + self._num_unknown

    @property
    def scores(self) -> dict[int, float]:
        return self._detector.scores

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        return self._detector.stragglers

    @property
    def last_pipeline(self) -> dict[int, list[Event]] | None:
        """Actions of the latest complete step by rank, on one clock; None before the first."""
        if self._latest_events is None:
            return None
        return {rank: [each for each in found if each.what in ACTIONS] for rank, found in self._latest_events.items()}

    @property
    def bubble(self) -> float | None:
        """The ranks' mean bubble ratio in the latest step; None before the first."""
        latest = self.latest
        return None if latest is None else sum(each.bubble_ratio for each in latest.ranks) / len(latest.ranks)

    @property
    def bubble_by_stage(self) -> dict[int, float]:
        """Mean bubble ratio over the window, by coordinate along pp. Empty while the window is."""
        found: dict[int, list[float]] = {}
        for rank, means in self.window().ranks.items():
            found.setdefault(self._state.ranks[rank].place.pp, []).append(means.bubble_ratio)
        return {stage: sum(ratios) / len(ratios) for stage, ratios in sorted(found.items())}

    def window(self) -> Window:
        """Means over the latest 20 steps, without the warm-up."""
        if self._window is None:
            state = self._state
            self._window = self._latest_steps.window(
                self.scores,
                self.stragglers,
                state.peak_memory,
                state.recent_lag.histograms(self._clock()),
                {rank: sum(means) / len(means) for rank, means in state.queue.items()},
            )
        return self._window
