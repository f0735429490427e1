"""Gates that compare a parallel run with the same run on one rank: scaling, final loss, all-reduce bandwidth.

Pure functions on the contents of two `metrics.json`. Numbers are compared as exact decimals, so a loss of 1.01 against
1.00 is within a tolerance of 0.01; in floating point it is not.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any

SCALING_FLOOR, LOSS_TOLERANCE = 0.85, 0.01
LEAST_SHARE_OF_PEAK = 0.5
_BANDWIDTHS = ("ddp_metrics", "allreduce_bandwidth_gbps")

Evidence = Mapping[str, float | int | str | None]


class Outcome(StrEnum):
    """A gate's outcome. All but `ok` are failures."""

    OK = "ok"
    MISSING_FIELD = "missing_field"
    NOT_A_NUMBER = "not_a_number"
    """Null, a string, a boolean, NaN or infinite; for the bandwidths also anything that is not an array."""
    NON_POSITIVE = "non_positive"
    EMPTY_ARRAY = "empty_array"
    WORLD_SIZE_TOO_SMALL = "world_size_too_small"
    BELOW_THRESHOLD = "below_threshold"
    ABOVE_THRESHOLD = "above_threshold"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One gate's outcome, with the numbers it was computed from."""

    gate: str
    outcome: Outcome
    message: str
    evidence: Evidence = field(default_factory=dict)

    @property
    def accepts(self) -> bool:
        return self.outcome is Outcome.OK

    def to_json(self) -> dict[str, Any]:
        return {
            "gate": self.gate,
            "outcome": self.outcome.value,
            "accepted": self.accepts,
            "message": self.message,
            "evidence": dict(self.evidence),
        }


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits of the gates. Raises ValueError, naming the option, for a value outside its range."""

    scaling_floor: float = SCALING_FLOOR
    loss_tolerance: float = LOSS_TOLERANCE
    peak_gbps: float | None = None
    """Peak bandwidth of the links in 10^9 bytes a second; None: any bandwidth above 0 passes."""

    def __post_init__(self) -> None:
        if not 0 < self.scaling_floor <= 1:
            raise ValueError(f"--scaling-floor {self.scaling_floor:g} is not above 0 and at most 1.")
        if not 0 <= self.loss_tolerance <= 1:
            raise ValueError(f"--loss-tolerance {self.loss_tolerance:g} is not from 0 to 1.")
        if self.peak_gbps is not None and not 0 < self.peak_gbps < math.inf:
            raise ValueError(f"--peak-gbps {self.peak_gbps:g} is not a bandwidth above 0.")


@dataclass(frozen=True, slots=True)
class Metrics:
    """The content of a `metrics.json`, and the file's name for messages."""

    file: str
    content: Mapping[str, Any]


_Result = tuple[Outcome, str, Evidence]


class _Rejected(Exception):
    """A value makes the gate fail before it can compare anything."""

    def __init__(self, outcome: Outcome, message: str, evidence: Evidence) -> None:
        super().__init__(message)
        self.result: _Result = outcome, message, evidence


def verify(
    baseline: Metrics, candidate: Metrics, world_size: int, thresholds: Thresholds | None = None
) -> tuple[Judgement, ...]:
    """The result of every gate, in display order. `baseline` is the run on one rank."""
    asked = thresholds or Thresholds()
    gates = {
        "scaling_efficiency": lambda: _scaling(baseline, candidate, world_size, asked.scaling_floor),
        "loss": lambda: _loss(baseline, candidate, asked.loss_tolerance),
        "allreduce_bandwidth": lambda: _bandwidth(candidate, asked.peak_gbps),
    }
    return tuple(_judge(gate, judge) for gate, judge in gates.items())


def notes(baseline: Metrics, candidate: Metrics, world_size: int) -> list[str]:
    """Warnings that fail no gate: a file's world size differs from the expected one."""
    said = (
        (baseline, 1, "the baseline is the run on one rank"),
        (candidate, world_size, "--world-size says otherwise"),
    )
    return [
        f"{metrics.file}: world_size is {found}, not {wanted}: {why}."
        for metrics, wanted, why in said
        if type(found := metrics.content.get("world_size")) is int and found != wanted
    ]


def _judge(gate: str, judge: Callable[[], _Result]) -> Judgement:
    try:
        return Judgement(gate, *judge())
    except _Rejected as rejected:
        return Judgement(gate, *rejected.result)


def _scaling(baseline: Metrics, candidate: Metrics, world_size: int, floor: float) -> _Result:
    if world_size <= 1:
        message = f"--world-size {world_size}: only a run on more than one rank scales."
        raise _Rejected(Outcome.WORLD_SIZE_TOO_SMALL, message, {"world_size": world_size})
    one, many = _positive(baseline, "tokens_per_sec"), _positive(candidate, "tokens_per_sec")
    efficiency = _exact(many) / (world_size * _exact(one))
    short = efficiency < _exact(floor)
    compared = _compared(efficiency, "<" if short else ">=", floor)
    message = f"{compared}: {many:,.6g} tokens/s on {world_size} ranks, {one:,.6g} on one"
    evidence: Evidence = {
        "efficiency": _as_float(efficiency),
        "scaling_floor": floor,
        "world_size": world_size,
        "baseline_tokens_per_sec": one,
        "candidate_tokens_per_sec": many,
    }
    return (Outcome.BELOW_THRESHOLD if short else Outcome.OK), message, evidence


def _loss(baseline: Metrics, candidate: Metrics, tolerance: float) -> _Result:
    one, many = _positive(baseline, "final_loss"), _positive(candidate, "final_loss")
    difference = abs(_exact(many) - _exact(one)) / _exact(one)
    differs = difference > _exact(tolerance)
    compared = _compared(difference, ">" if differs else "<=", tolerance)
    message = f"{compared}: final loss {many:.6g}, {one:.6g} on one rank"
    evidence: Evidence = {
        "relative_difference": _as_float(difference),
        "loss_tolerance": tolerance,
        "baseline_final_loss": one,
        "candidate_final_loss": many,
    }
    return (Outcome.ABOVE_THRESHOLD if differs else Outcome.OK), message, evidence


def _bandwidth(candidate: Metrics, peak: float | None) -> _Result:
    numbers = _bandwidths(candidate)
    least = 0.0 if peak is None else LEAST_SHARE_OF_PEAK * peak
    low = [index for index, value in enumerate(numbers) if value < least]
    at = low[0] if low else numbers.index(min(numbers))
    evidence: Evidence = {
        "index": at,
        "gbps": numbers[at],
        "least_gbps": least,
        "peak_gbps": peak,
        "num_below": len(low),
        "num_values": len(numbers),
    }
    if low:
        wanted = f"{least:.4g} GB/s, half of the peak of {peak:g},"
        message = f"{numbers[at]:.4g} < {wanted} at index {at}; {len(low)} of {len(numbers)} are below"
        return Outcome.BELOW_THRESHOLD, message, evidence
    beyond = "> 0" if peak is None else f">= {least:.4g}"
    return Outcome.OK, f"all {len(numbers)} {beyond} GB/s; the least is {numbers[at]:.4g} at index {at}", evidence


def _bandwidths(candidate: Metrics) -> list[float]:
    name, values = ".".join(_BANDWIDTHS), _field(candidate, *_BANDWIDTHS)
    if not isinstance(values, list):
        raise _not_a_number(candidate, name, values, "an array of numbers")
    if not values:
        message = f"{candidate.file}: {name} is empty: the run made no all-reduce of gradients."
        raise _Rejected(Outcome.EMPTY_ARRAY, message, {"file": candidate.file, "field": name})
    return [_as_positive(candidate, f"{name}[{index}]", value, index) for index, value in enumerate(values)]


# Values.


def _field(metrics: Metrics, *names: str) -> Any:
    value: Any = metrics.content
    for name in names:
        if not isinstance(value, Mapping) or name not in value:
            path = ".".join(names)
            message = f"{metrics.file}: there is no {path}."
            raise _Rejected(Outcome.MISSING_FIELD, message, {"file": metrics.file, "field": path})
        value = value[name]
    return value


def _positive(metrics: Metrics, name: str) -> float:
    return _as_positive(metrics, name, _field(metrics, name))


def _as_positive(metrics: Metrics, name: str, value: Any, index: int | None = None) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:  # rejects booleans and NaN too
        raise _not_a_number(metrics, name, value, "a number", index)
    if value <= 0:
        message = f"{metrics.file}: {name} is {_shown(value)}, which is not above 0."
        raise _Rejected(Outcome.NON_POSITIVE, message, _place(metrics, name, value, index))
    return float(value)


def _not_a_number(metrics: Metrics, name: str, value: Any, wanted: str, index: int | None = None) -> _Rejected:
    message = f"{metrics.file}: {name} is {_shown(value)}, not {wanted}."
    return _Rejected(Outcome.NOT_A_NUMBER, message, _place(metrics, name, value, index))


def _place(metrics: Metrics, name: str, value: Any, index: int | None) -> Evidence:
    at = {} if index is None else {"index": index}
    return {"file": metrics.file, "field": name, **at, "found": _shown(value)}


def _shown(value: Any) -> str:
    """The value as JSON, at most 40 characters of it."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _compared(value: Fraction, sign: str, threshold: float) -> str:
    """Value and threshold, with enough digits to show that they differ."""
    for digits in (4, 7, 17):
        texts = f"{_as_float(value):.{digits}g}", f"{threshold:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return f"{texts[0]} {sign} {texts[1]}" if value != _exact(threshold) else f"{threshold:g} {sign} {threshold:g}"


def _exact(value: float) -> Fraction:
    """The value of the shortest decimal form, which is the number written in the file."""
    return Fraction(repr(value))


def _as_float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return sys.float_info.max  # JSON has no infinity
