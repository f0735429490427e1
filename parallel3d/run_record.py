"""What is known of a run: its ranks' messages in, its steps, totals and metrics out. No I/O, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from monitoring.device_peaks import peak_flops
from monitoring.time_parts import NO_TIME, TimeParts
from parallel3d.config import RunConfig
from runtime.errors import Coords, name_rank

WARM_UP_STEPS = 2
"""They load what torch loads late, and the second still grows its buffers; so they say nothing of speed."""


class Status(StrEnum):
    """How a run is, or ended."""

    RUNNING = "running"
    COMPLETED = "completed"
    """All steps were made."""
    STOPPED = "stopped"
    """By whoever started it, after a whole step."""
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    HUNG = "hung"
    """Nobody failed, but a rank did not come in time."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step of the whole mesh."""

    step: int
    """From 0."""
    loss: float
    """The mean over the whole batch."""
    grad_norm: float
    """Of all gradients together, before they were clipped."""
    learning_rate: float
    tokens: int
    """Of the whole batch."""
    seconds: float
    """From the end of the step before, so waiting for data is part of it."""

    @property
    def tokens_per_second(self) -> float:
        """The whole mesh's."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RunError:
    """What ended a run that did not end well."""

    message: str
    rank: int | None = None
    coords: Coords | None = None
    step: int | None = None
    """Steps that were whole by then."""
    traceback: str = ""

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
        }


@dataclass(slots=True)
class RankTotals:
    """What one rank told, added up."""

    coords: Coords | None = None
    num_steps: int = 0
    counted: TimeParts = NO_TIME
    """Of all steps but the first ones."""
    last: TimeParts = NO_TIME
    """Of the latest step."""
    bubble: float = 0.0
    """Of the latest step."""
    bubbles: float = 0.0
    """Of all steps but the first ones, added up."""
    memory: int | None = None
    """Bytes, the most that was seen."""
    device: str = "cpu"
    parameters: int = 0
    """Numbers that it trains."""

    def to_wire(self) -> dict[str, Any]:
        """Plain values, so that JSON can carry it."""
        return asdict(self) | {"counted": list(self.counted.seconds), "last": list(self.last.seconds)}

    @staticmethod
    def from_wire(fields: Mapping[str, Any]) -> RankTotals:
        """What `to_wire` wrote, of a rank that is one of ours."""
        times = {name: TimeParts.from_wire(fields[name]) for name in ("counted", "last")}
        coords = Coords(*fields["coords"]) if fields["coords"] is not None else None
        return RankTotals(**{**fields, **times, "coords": coords})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the model before ranks start."""

    parameters: int = 0
    flops_per_token: float = 0.0
    """Forward and backward."""


@dataclass(slots=True)
class RunRecord:
    """Fed with ranks' messages; what they send is checked, for a rank may send anything."""

    config: RunConfig
    facts: ModelFacts = field(default_factory=ModelFacts)
    status: Status = Status.RUNNING
    error: RunError | None = None
    steps: list[RunStep] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)
    """Of the gradients' all-reduce, in 10^9 bytes a second, one for each step that had one."""
    ranks: dict[int, RankTotals] = field(default_factory=dict)
    malformed: int = 0
    observed: dict[str, Any] = field(default_factory=dict)
    """What its observer has found, once all ranks have ended; empty where nobody looked."""

    def take(self, rank: int, message: Mapping[str, Any]) -> RunStep | None:
        """One message; a step once rank 0 has told of it."""
        try:
            return self._take(rank, message)
        except (KeyError, TypeError, ValueError):
            self.malformed += 1
            return None

    def _take(self, rank: int, message: Mapping[str, Any]) -> RunStep | None:
        match message["kind"]:
            case "mesh":
                self._rank(rank).coords = Coords(*map(_int, message["coords"]))
            case "ready":
                self._rank(rank).device = _text(message["device"])
                self._rank(rank).parameters = _int(message["parameters"])
            case "memory":
                self._rank(rank).memory = max(_int(message["bytes"]), self._rank(rank).memory or 0)
            case "step":
                return self._take_step(rank, message)
        return None

    def _take_step(self, rank: int, message: Mapping[str, Any]) -> RunStep | None:
        parts, bubble = TimeParts.from_wire(message["parts"]), _float(message["bubble"])
        step = None
        if rank == 0:
            step = RunStep(
                step=_int(message["step"]),
                loss=_float(message["loss"]),
                grad_norm=_float(message["grad_norm"]),
                learning_rate=_float(message["learning_rate"]),
                tokens=_int(message["tokens"]),
                seconds=_float(message["seconds"]),
            )
            bandwidth = message["bandwidth"]
            self.bandwidths += [] if bandwidth is None else [_float(bandwidth)]
            self.steps.append(step)
        totals = self._rank(rank)
        totals.num_steps += 1
        if totals.num_steps > WARM_UP_STEPS:
            totals.counted += parts
            totals.bubbles += bubble
        totals.last, totals.bubble = parts, bubble
        return step

    def _rank(self, rank: int) -> RankTotals:
        return self.ranks.setdefault(rank, RankTotals())

    # What follows from it.

    @property
    def num_warm_up(self) -> int:
        """Steps that don't count for speed; one always counts."""
        return max(0, min(WARM_UP_STEPS, len(self.steps) - 1))

    @property
    def counted(self) -> Sequence[RunStep]:
        """Steps that say how fast the run is."""
        return self.steps[self.num_warm_up :]

    @property
    def tokens_per_second(self) -> float:
        """The whole mesh's, over the counted steps; 0 before the first."""
        seconds = sum(step.seconds for step in self.counted)
        return sum(step.tokens for step in self.counted) / seconds if seconds > 0 else 0.0

    def parts(self, rank: int) -> TimeParts:
        """Where a rank's time went in the counted steps."""
        totals = self.ranks[rank]
        return totals.counted if totals.num_steps > WARM_UP_STEPS else totals.last

    def mean_bubble(self) -> float | None:
        """Of the latest step, over all ranks that have told; None before."""
        told = [totals.bubble for totals in self.ranks.values() if totals.num_steps]
        return sum(told) / len(told) if told else None

    def memory(self) -> int | None:
        """All ranks' most, added up; None before any has told."""
        told = [totals.memory for totals in self.ranks.values() if totals.memory is not None]
        return sum(told) if told else None

    def mfu(self, tokens_per_second: float) -> float | None:
        """The share of what the devices could compute at most; None where that is not known."""
        precision = self.config.train.precision
        peaks = [peak_flops(totals.device, precision) for totals in self.ranks.values()]
        known = [peak for peak in peaks if peak is not None]
        if len(known) < self.config.world_size or not self.facts.flops_per_token:
            return None
        return tokens_per_second * self.facts.flops_per_token / sum(known)

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
            "final_loss": _finite(self.steps[-1].loss) if self.steps else None,
            "losses": [_finite(step.loss) for step in self.steps],
            "grad_norms": [_finite(step.grad_norm) for step in self.steps],
            "learning_rates": [step.learning_rate for step in self.steps],
            "step_seconds": [step.seconds for step in self.steps],
            "ddp_metrics": {"allreduce_bandwidth_gbps": self.bandwidths},
            "ranks": [self.metrics_of(rank) for rank in sorted(self.ranks)],
        }

    def metrics_of(self, rank: int) -> dict[str, Any]:
        """One entry of `ranks`."""
        totals = self.ranks[rank]
        counted = totals.num_steps - WARM_UP_STEPS
        return {
            "rank": rank,
            "coords": totals.coords._asdict() if totals.coords is not None else None,
            "device": totals.device,
            "parameters": totals.parameters,
            "memory_bytes": totals.memory,
            "bubble": totals.bubbles / counted if counted > 0 else totals.bubble,
            "seconds": self.parts(rank).to_json(),
        }


def step_event(step: RunStep) -> dict[str, Any]:
    """The fields of a step in `events.jsonl`."""
    return {
        "step": step.step,
        "loss": _finite(step.loss),
        "grad_norm": _finite(step.grad_norm),
        "learning_rate": step.learning_rate,
        "tokens": step.tokens,
        "seconds": step.seconds,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value[:200]
