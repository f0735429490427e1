"""Every error that parallel3d raises on purpose, and how it travels between processes.

Parallel3DError
├── ConfigError            the YAML file, --set or the environment: all problems at once
├── LaunchError            ranks could not be started, or this process is not one of them
│   └── RunFailed          a rank of a run failed; names it, says how, and where the run's files are
├── InvalidCall            a call that is wrong on this rank alone; nothing was sent
│   ├── PeerRefused        a call that is right here, and wrong on another rank
│   ├── OtherSize          a file's table has another size than was asked for; lives in parallel3d.pipeline.schedules
│   └── ScheduleDeadlock   a table whose ranks would wait for each other; lives in parallel3d.pipeline.simulation
├── DataError              a sample could not be had, or does not fit the others or the model
├── BenchmarkError         a contestant of a benchmark failed, or computed something wrong
├── NonFiniteGradient      gradients have become NaN or infinite; carries the ranks that have them
├── WireError              what a peer of the gradient server sent is refused; lives in gradient_server.wire.refusals
├── LinkLost               its connection is gone; lives in gradient_server.wire.link
├── ServerRefused          the gradient server refuses a worker, or has halted; lives in gradient_server.client.protocol
├── ShareChanged           a share's average will not come; lives in gradient_server.client.protocol
└── CommunicationError     something between ranks; carries rank, coords, step and action
    ├── Mismatch           ranks called different things
    ├── PeerLost           they died, or left
    ├── GroupClosed        we closed it
    └── DeadlineExceeded   nobody came
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple


class Coords(NamedTuple):
    """Where a rank sits in the mesh."""

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
    """What was added to it on its way, such as the layer that it came from; anybody may put anything there."""
    notes = getattr(error, "__notes__", ())
    return tuple(note for note in notes if isinstance(note, str)) if isinstance(notes, list) else ()


class Parallel3DError(Exception):
    """The root of everything raised on purpose."""


class ConfigError(Parallel3DError):
    """The configuration is wrong; the message lists every problem with its place and remedy."""


class LaunchError(Parallel3DError):
    """Ranks could not be started, or this process does not know which rank it is."""


class RunFailed(LaunchError):
    """A run's ranks were started and did not end well. `rank` and `coords` name the one that failed first."""

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
    """A call that cannot be right whatever the other ranks do."""


class PeerRefused(InvalidCall):
    """Another rank refuses its part of a call that all make, and says why; `rank` is that one."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.message, self.rank = message, rank

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PeerRefused, rank=self.rank), (self.message,)


class DataError(Parallel3DError):
    """A sample could not be had, or does not fit the others or the model; names the sample and the key."""


class BenchmarkError(Parallel3DError):
    """A contestant of a benchmark failed, or computed something wrong: there are no figures."""


class NonFiniteGradient(Parallel3DError, ArithmeticError):
    """A step's gradients are not all finite, and the weights are unchanged. Raised on every rank alike; `ranks` are
    those that have such gradients."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), step: int | None = None) -> None:
        super().__init__(message)
        self.message, self.ranks, self.step = message, tuple(ranks), step

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(NonFiniteGradient, ranks=self.ranks, step=self.step), (self.message,)


def culprit_of(error: BaseException) -> int | None:
    """The rank at fault where others raise an error as well; also inside task groups, and behind `from`. None where
    only the one that raises it can be."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := culprit_of(each)) is not None), None)
    if isinstance(error, NonFiniteGradient):
        return error.ranks[0] if error.ranks else None
    if isinstance(error, PeerRefused):
        return error.rank
    return None if error.__cause__ is None else culprit_of(error.__cause__)


class CommunicationError(Parallel3DError):
    """Something went wrong between ranks. `rank` and `coords` name the rank at fault, not the reporter."""

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
        """Plain values, so that JSON can carry it."""
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
        """The error that `to_wire` wrote; a kind we don't know becomes the base class."""
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
    """Ranks of one group called different things at the same place in their order of calls."""


class PeerLost(CommunicationError):
    """A peer died, or left the mesh, while it was still needed."""


class GroupClosed(CommunicationError):
    """This group was closed: by leaving the mesh, or because a call on it was cancelled."""


class DeadlineExceeded(CommunicationError, TimeoutError):
    """The time given to a call ran out; says which rank did not come and what it did last."""
