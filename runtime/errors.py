"""All errors that parallel3d raises on purpose, and how they travel between processes.

Parallel3DError
├── ConfigError            the YAML file, --set, an option or the environment is wrong
│   └── ConfigProblems     all problems of a configuration, with their places; in parallel3d.config.errors
├── LaunchError            ranks could not be started, or this process is not one of them
│   └── RunFailed          a rank of a run failed; says which one, how, and where the run's files are
├── InvalidCall            a call that is wrong on this rank, whatever other ranks do; nothing was sent
│   ├── PeerRefused        a call that is right here and wrong on another rank
│   ├── CannotBeCut        a model does not say which its layers are; in parallel3d.models.layer_sequence
│   ├── OtherSize          a schedule file has another size than asked for; in parallel3d.pipeline.schedules.build
│   └── ScheduleDeadlock   a schedule whose ranks wait for each other; in parallel3d.pipeline.simulation.deadlock
├── DataError              a sample could not be read, or does not fit the others or the model
├── BenchmarkError         a contestant of a benchmark failed, or computed a wrong result
├── NonFiniteGradient      gradients are NaN or infinite; carries the ranks that have them
├── WireError              what a peer of the gradient server sent is refused; in runtime.gradient_server.wire.refusals
│   └── GradientRefused    it cannot be part of the step's sum; in runtime.gradient_server.step_sum
├── LinkLost               a connection of the gradient server is gone; in runtime.gradient_server.wire.link
├── ServerRefused          the gradient server refuses a worker, or halted; in runtime.gradient_server.client.protocol
├── ShareChanged           a share's average will not come; in runtime.gradient_server.client.protocol
└── CommunicationError     something went wrong between ranks; carries rank, coords, step and action
    ├── Mismatch           ranks made different calls
    ├── PeerLost           a peer died, or left
    ├── GroupClosed        this end closed it
    └── DeadlineExceeded   a rank did not come in time
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple


class Coords(NamedTuple):
    """The coordinates of a rank in the mesh."""

    dp: int
    tp: int
    pp: int

    def __str__(self) -> str:
        return f"dp={self.dp} tp={self.tp} pp={self.pp}"


def name_rank(rank: int | None, coords: Coords | None) -> str:
    """How messages name a rank: `rank 5 (dp=1 tp=0 pp=1)`."""
    if rank is None:
        return "an unknown rank"
    return f"rank {rank}" if coords is None else f"rank {rank} ({coords})"


def notes_of(error: BaseException) -> tuple[str, ...]:
    """The notes added to an error, such as the layer that it came from; values of other types are left out."""
    notes = getattr(error, "__notes__", ())
    return tuple(note for note in notes if isinstance(note, str)) if isinstance(notes, list) else ()


class Parallel3DError(Exception):
    """The base of all errors raised on purpose."""


class ConfigError(Parallel3DError):
    """The configuration is wrong; the message lists every problem with its place and remedy."""


class LaunchError(Parallel3DError):
    """Ranks could not be started, or this process does not know which rank it is."""


class RunFailed(LaunchError):
    """Ranks of a run were started and failed. `rank` and `coords` name the one that failed first."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        coords: Coords | None = None,
        step: int | None = None,
        traceback: str = "",
        exit_code: int = 4,
    ) -> None:
        super().__init__(message)
        self.message, self.rank, self.coords, self.step = message, rank, coords, step
        self.traceback, self.exit_code = traceback, exit_code


class InvalidCall(Parallel3DError, ValueError):
    """A call that is wrong whatever the other ranks do."""


class PeerRefused(InvalidCall):
    """Another rank, `rank`, refuses its part of a collective call; the message has its reason."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.message, self.rank = message, rank

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PeerRefused, rank=self.rank), (self.message,)


class DataError(Parallel3DError):
    """A sample could not be read, or does not fit the others or the model; names the sample and the key."""


class BenchmarkError(Parallel3DError):
    """A contestant of a benchmark failed, or computed a wrong result, so there are no figures."""


class NonFiniteGradient(Parallel3DError, ArithmeticError):
    """A step's gradients are not all finite; the weights are unchanged. Raised on every rank; `ranks` are those with
    such gradients."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), step: int | None = None) -> None:
        super().__init__(message)
        self.message, self.ranks, self.step = message, tuple(ranks), step

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(NonFiniteGradient, ranks=self.ranks, step=self.step), (self.message,)


def culprit_of(error: BaseException) -> int | None:
    """The rank at fault, if an error is raised on other ranks too; looks into task groups and `from`. None if the error
    does not name one."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := culprit_of(each)) is not None), None)
    if isinstance(error, NonFiniteGradient):
        return error.ranks[0] if error.ranks else None
    if isinstance(error, PeerRefused):
        return error.rank
    return None if error.__cause__ is None else culprit_of(error.__cause__)


class CommunicationError(Parallel3DError):
    """Something went wrong between ranks. `rank` and `coords` name the rank at fault, not the one that raises."""

    kinds: ClassVar[dict[str, type[CommunicationError]]] = {}

    def __init_subclass__(cls) -> None:
        CommunicationError.kinds[cls.__name__] = cls

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        coords: Coords | None = None,
        step: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.rank, self.coords, self.step, self.action = message, rank, coords, step, action

    def to_wire(self) -> dict[str, Any]:
        """The error as values that JSON has."""
        coords = list(self.coords) if self.coords is not None else None
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "rank": self.rank,
            "coords": coords,
            "step": self.step,
            "action": self.action,
        }

    @staticmethod
    def from_wire(fields: Mapping[str, Any]) -> CommunicationError:
        """The error that `to_wire` wrote; an unknown kind becomes the base class."""
        kind = CommunicationError.kinds.get(fields["kind"], CommunicationError)
        coords = Coords(*fields["coords"]) if fields["coords"] is not None else None
        return kind(
            fields["message"],
            rank=fields["rank"],
            coords=coords,
            step=fields["step"],
            action=fields["action"],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CommunicationError.from_wire, (self.to_wire(),)


class Mismatch(CommunicationError):
    """Ranks of a group made different calls at the same position of their call sequence."""


class PeerLost(CommunicationError):
    """A peer died, or left the mesh, while it was still needed."""


class GroupClosed(CommunicationError):
    """This group is closed, because its mesh was left or a call on it was cancelled."""


class DeadlineExceeded(CommunicationError, TimeoutError):
    """The time given to a call ran out; says which rank did not come and what it did last."""
