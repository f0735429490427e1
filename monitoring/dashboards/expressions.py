"""What is asked of Prometheus, written once: rules record it, panels show it."""

from __future__ import annotations

from dataclasses import dataclass

RUN = "job, instance"
"""What tells one run's series from another's."""
PLACE = "dp, tp, pp, host"
SLOW = 0.67
"""The score under which the run itself names a rank a straggler."""
_COMPUTE = 'phase="compute"'
_SEVERITIES = ("low", "medium", "high", "critical")


@dataclass(frozen=True, slots=True)
class Expressions:
    """For series that match `where`, with rates over `window`."""

    where: str = ""
    window: str = "$__rate_interval"

    def series(self, name: str, matchers: str = "") -> str:
        """`parallel3d_name{…}`."""
        inside = ", ".join(text for text in (self.where, matchers) if text)
        return f"parallel3d_{name}{{{inside}}}" if inside else f"parallel3d_{name}"

    def rate(self, counter: str, by: str = "", matchers: str = "") -> str:
        """A counter's growth a second, added up over all labels but the run's and `by`."""
        labels = f"{RUN}, {by}" if by else RUN
        return f"sum by ({labels}) (rate({self.series(counter, matchers)}[{self.window}]))"

    def quantile(self, q: float, histogram: str, by: str = "") -> str:
        """Of what was observed within the window."""
        return f"histogram_quantile({q}, {self.rate(f'{histogram}_bucket', f'{by}, le' if by else 'le')})"

    def located(self, expr: str) -> str:
        """The ranks' series with their place in the mesh."""
        return f"{expr} * on ({RUN}, rank) group_left ({PLACE}) {self.series('rank_info')}"

    @property
    def tokens(self) -> str:
        return self.rate("tokens_total")

    @property
    def goodput(self) -> str:
        """Of the ranks' wall time, the share in which they compute: 0 while nothing moves, where a share of the
        accounted time would stand still. A step is counted when it ends, so a long one may overshoot."""
        compute = self.rate("phase_seconds_total", matchers=_COMPUTE)
        return f"clamp_max({compute} / count by ({RUN}) ({self.series('rank_info')}), 1)"

    @property
    def phase_share(self) -> str:
        """Of the accounted time, by phase: they add up to 1. Nothing while no step ends."""
        each, whole = self.rate("phase_seconds_total", "phase"), self.rate("phase_seconds_total")
        return f"{each} / on ({RUN}) group_left () ({whole} > 0)"

    @property
    def step_seconds(self) -> str:
        """The mean of those that ended; nothing while none ends."""
        return f"{self.rate('step_duration_seconds_sum')} / ({self.rate('step_duration_seconds_count')} > 0)"

    @property
    def core_share(self) -> str:
        """Of the computing time by the clock, what the ranks had a core for."""
        wall = f"{self.rate('phase_seconds_total', matchers=_COMPUTE)} + {self.rate('core_wait_seconds_total')}"
        return f"{self.rate('phase_seconds_total', matchers=_COMPUTE)} / (({wall}) > 0)"

    @property
    def unattributed_share(self) -> str:
        """Of the accounted time, what no phase explains."""
        return f"{self.rate('unattributed_seconds_total')} / ({self.rate('phase_seconds_total')} > 0)"

    @property
    def axis_bytes(self) -> str:
        return self.rate("collective_bytes_total", "axis")

    @property
    def lag(self) -> str:
        """The 99th percentile over all ranks."""
        return self.quantile(0.99, "event_loop_lag_seconds")

    @property
    def score(self) -> str:
        """Each rank's speed over the best, with its place."""
        return self.located(self.series("straggler_score_ratio"))

    @property
    def bottlenecks(self) -> str:
        """By kind: 0 none, 1 low, 2 medium, 3 high, 4 critical. A kind changes its severity, not its row."""
        states = (self.series("bottleneck_state", f'severity="{name}"') for name in _SEVERITIES)
        levels = (f"{level} * {state}" for level, state in enumerate(states, start=1))
        return f"max by ({RUN}, kind) ({' or '.join(levels)})"
