"""The values that go into `Rounds`, events, and that come out, instructions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from runtime.errors import Parallel3DError
from runtime.gradient_server.buffers import Key
from runtime.gradient_server.step_sum import StepSum
from runtime.gradient_server.wire.messages import Reason, WireError


@dataclass(frozen=True, slots=True)
class Started:
    """The server has started to listen."""


@dataclass(frozen=True, slots=True)
class Joined:
    worker: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker's connection broke, or it was silent for too long."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class Left:
    """The worker leaves normally."""

    worker: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Misbehaved:
    """The worker sent something that cannot be part of the sum."""

    worker: int
    error: WireError


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker's gradient and loss have arrived."""

    worker: int


@dataclass(frozen=True, slots=True)
class Summed:
    """All gradients of the step have arrived."""


@dataclass(frozen=True, slots=True)
class StateSent:
    request: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: int
    held_up_by: tuple[int, ...] = ()
    """Sinks of a state relay that have not received everything forwarded so far."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    reason: str


WorkerEvent: TypeAlias = Joined | Lost | Left | Misbehaved | Reported
Event: TypeAlias = WorkerEvent | Started | Summed | StateSent | TimerFired | StopAsked


@dataclass(frozen=True, slots=True)
class Open:
    """Open a round with this sum: send each worker its share; those in `again` have computed theirs already."""

    sum: StepSum
    again: frozenset[int] = frozenset()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Average:
    """Send the averages of these keys: they are complete since a worker was left out."""

    keys: tuple[Key, ...]
    has_losses: bool = False
    """Whether all losses are reported now, too."""


@dataclass(frozen=True, slots=True)
class Relay:
    """Forward one worker's state to others."""

    source: int
    sinks: tuple[int, ...]
    step: int
    request: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Send a worker the reason of its refusal, and close its connection."""

    worker: int
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    timer: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run. error: what `GradientServer.finished` raises."""

    reason: str
    error: Parallel3DError | None = None
    code: Reason = Reason.UNEXPECTED
    """The reason that workers get if there is an error."""


Instruction: TypeAlias = Open | Average | Relay | Dismiss | SetTimer | Finish
