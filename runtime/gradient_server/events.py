"""What happens to a gradient server, and what it is to do: values that `Rounds` takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from runtime.errors import Parallel3DError
from runtime.gradient_server.buffers import Key
from runtime.gradient_server.step_sum import StepSum
from runtime.gradient_server.wire.messages import Reason, WireError


@dataclass(frozen=True, slots=True)
class Started:
    """The server listens."""


@dataclass(frozen=True, slots=True)
class Joined:
    worker: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Its connection broke, or it was not heard."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class Left:
    """It said so."""

    worker: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Misbehaved:
    """What it sent cannot be part of the sum."""

    worker: int
    error: WireError


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker's gradient has come, and its loss."""

    worker: int


@dataclass(frozen=True, slots=True)
class Summed:
    """All gradients of the step have come."""


@dataclass(frozen=True, slots=True)
class StateSent:
    request: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: int
    held_up_by: tuple[int, ...] = ()
    """Workers that have not taken what there is of the state that is handed on."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    reason: str


Event: TypeAlias = Started | Joined | Lost | Left | Misbehaved | Reported | Summed | StateSent | TimerFired | StopAsked


@dataclass(frozen=True, slots=True)
class Open:
    """The round that `Rounds.sum` is of: tell each worker its share; those in `again` have computed it already."""

    sum: StepSum
    again: frozenset[int] = frozenset()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Average:
    """These keys are complete, for want of a worker that was left out."""

    keys: tuple[Key, ...]
    has_losses: bool = False
    """Whether all losses are there now, too."""


@dataclass(frozen=True, slots=True)
class Relay:
    """Hand one worker's state on to others."""

    source: int
    sinks: tuple[int, ...]
    step: int
    request: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell a worker why it is refused, and hang up."""

    worker: int
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    timer: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Finish:
    """It is over. error: what `finished` raises."""

    reason: str
    error: Parallel3DError | None = None
    code: Reason = Reason.UNEXPECTED
    """What workers are told where there is an error."""


Instruction: TypeAlias = Open | Average | Relay | Dismiss | SetTimer | Finish
