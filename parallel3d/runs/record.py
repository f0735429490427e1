"""What is known of a run: its ranks' messages in, its steps, totals and metrics out. No I/O, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monitoring.analysis.device_peaks import utilization
from monitoring.analysis.facts import Status
from monitoring.analysis.totals import WARM_UP
from monitoring.checks import or_null
from monitoring.events.time_parts import NO_TIME, TimeParts
from monitoring.messages import Joined, Memory, Message, Ready, RunStep
from parallel3d.config import RunConfig
from parallel3d.planning.preflight import ModelFacts
from runtime.errors import Coords, name_rank


@dataclass(frozen=True, slots=True)
class RunError:
    """What ended a run that did not end well."""

    message: str
    rank: int | None = None
    coords: Coords | None = None
    step: int | None = None
    """Steps that were whole by then."""
    traceback: str = ""
    notes: tuple[str, ...] = ()
    """What was added to the exception on its way, such as the layer that it came from."""

    @property
    def name(self) -> str:
        return name_rank(self.rank, self.coords)

    def to_json(self) -> dict[str, Any]:
        coords = self.coords._asdict() if self.coords is not None else None
        return {
            "message": self.message,
            "rank": self.rank,
            "coords": coords,
            "step": self.step,
            "traceback": self.traceback,
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class RankTotals:
    """What one rank told of itself."""

    coords: Coords | None = None
    memory: int | None = None
    """Bytes, the most that was seen."""
    device: str = "cpu"
    parameters: int = 0
    """Numbers that it trains."""


@dataclass(slots=True)
class RunRecord:
    """Fed with ranks' messages; what they send is checked, for a rank may send anything."""

    config: RunConfig
    facts: ModelFacts = field(default_factory=ModelFacts)
    status: Status = Status.RUNNING
    error: RunError | None = None
    steps: list[RunStep] = field(default_factory=list)
    ranks: dict[int, RankTotals] = field(default_factory=dict)
    observed: Mapping[str, Any] = field(default_factory=dict)
    """What the run's observer made of its ranks' events, as `Observer.summary` gives it; empty before the end, and
    where nobody looked."""

    def take(self, rank: int, message: Message | None) -> None:
        """One message; those that are not about a rank or a step change nothing."""
        match message:
            case RunStep():
                self.steps.append(message)
            case Joined():
                self._rank(rank).coords = Coords(message.dp, message.tp, message.pp)
            case Ready():
                self._rank(rank).device, self._rank(rank).parameters = message.device, message.parameters
            case Memory():
                self._rank(rank).memory = max(message.process, self._rank(rank).memory or 0)

    def _rank(self, rank: int) -> RankTotals:
        return self.ranks.setdefault(rank, RankTotals())

    # What follows from it.

    @property
    def bandwidths(self) -> list[float]:
        """Of the gradients' all-reduce, in 10^9 bytes a second, one for each step that had one."""
        found = (step.all_reduce_bandwidth for step in self.steps)
        return [bandwidth for bandwidth in found if bandwidth is not None]

    @property
    def num_warm_up(self) -> int:
        """Steps that don't count for speed; one always counts."""
        return max(0, min(WARM_UP, len(self.steps) - 1))

    @property
    def counted(self) -> Sequence[RunStep]:
        """Steps that say how fast the run is."""
        return self.steps[self.num_warm_up :]

    @property
    def tokens_per_second(self) -> float:
        """The whole mesh's, over the counted steps; 0 before the first."""
        seconds = sum(step.seconds for step in self.counted)
        return sum(step.tokens for step in self.counted) / seconds if seconds > 0 else 0.0

    def observed_of(self, rank: int) -> Mapping[str, Any]:
        """What was found of a rank; empty where nothing was."""
        found: Mapping[str, Any] = self.observed.get("ranks", {}).get(rank, {})
        return found

    @property
    def told(self) -> list[int]:
        """The ranks of which a step's parts are known."""
        return [rank for rank in sorted(self.ranks) if self.observed_of(rank).get("steps")]

    def parts(self, rank: int) -> TimeParts:
        """Where a rank's time went in the counted steps."""
        return TimeParts.of(self.observed_of(rank).get("seconds", {}))

    def memory(self) -> int | None:
        """All ranks' most, added up; None before any has told."""
        told = [totals.memory for totals in self.ranks.values() if totals.memory is not None]
        return sum(told) if told else None

    def mfu(self, tokens_per_second: float) -> float | None:
        """The share of what the devices could compute at most; None where that is not known."""
        devices = (totals.device for totals in self.ranks.values())
        flops = tokens_per_second * self.facts.flops_per_token
        return utilization(devices, self.config.world_size, self.config.train.precision, flops)

    def name(self, rank: int) -> str:
        totals = self.ranks.get(rank)
        return name_rank(rank, totals.coords if totals is not None else None)

    def metrics(self) -> dict[str, Any]:
        """The content of `metrics.json`."""
        config = self.config
        return {
            "status": self.status,
            "error": self.error.to_json() if self.error is not None else None,
            "world_size": config.world_size,
            "mesh": {"dp": config.parallel.dp, "tp": config.parallel.tp, "pp": config.parallel.pp},
            "parameters": self.facts.parameters,
            "steps": len(self.steps),
            "warm_up_steps": self.num_warm_up,
            "tokens_per_sec": self.tokens_per_second,
            "mfu": self.mfu(self.tokens_per_second),
            "final_loss": or_null(self.steps[-1].loss) if self.steps else None,
            "losses": [or_null(step.loss) for step in self.steps],
            "grad_norms": [or_null(step.grad_norm) for step in self.steps],
            "learning_rates": [step.learning_rate for step in self.steps],
            "step_seconds": [step.seconds for step in self.steps],
            "ddp_metrics": {"allreduce_bandwidth_gbps": self.bandwidths},
            **_RUN_UNOBSERVED,
            **{name: value for name, value in self.observed.items() if name != "ranks"},
            "ranks": [self.metrics_of(rank) for rank in sorted(self.ranks)],
        }

    def metrics_of(self, rank: int) -> dict[str, Any]:
        """One entry of `ranks`."""
        totals = self.ranks[rank]
        return {
            "rank": rank,
            "coords": totals.coords._asdict() if totals.coords is not None else None,
            "device": totals.device,
            "parameters": totals.parameters,
            **_RANK_UNOBSERVED,
            **self.observed_of(rank),
            "memory_bytes": totals.memory,
        }


_RUN_UNOBSERVED = {"parts": NO_TIME.to_json(), "bottlenecks": [], "stragglers": []}
_RANK_UNOBSERVED = {
    "steps": 0,
    "bubble": 0.0,
    "straggler_score": None,
    "seconds": NO_TIME.to_json(),
    "remainder_seconds": 0.0,
    "compute_cpu_seconds": 0.0,
    "core_wait_seconds": 0.0,
}
"""What `metrics.json` has where nobody watched, or no step was made."""
