"""Decides what a launch does next: events in, instruction values out. No I/O, no clock, no loop.

running ──rank failed──────────────▶ stopping ──grace over──▶ killing ──all ended──▶ done
   │  └──only a consequence so far──▶ settling ─┘                ▲
   └──Ctrl-C, SIGTERM, SIGHUP──────▶ interrupted ──again, grace over──┘
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from runtime.errors import Coords
from runtime.launch.failures import Failure, Report, describe_exit, find_root, shell_code

STOP_GRACE_SECONDS = 5.0
# A rank's PeerLost may arrive before the exception that made its peer leave; stopping that peer at once would
# lose the root failure's report.
SETTLE_SECONDS = 2.0
KILL_SECONDS = 10.0  # only a process stuck in the kernel outlives SIGKILL; don't wait for it forever


@dataclass(frozen=True, slots=True)
class ServerReady:
    """The fork server has imported everything."""


@dataclass(frozen=True, slots=True)
class RankStarted:
    rank: int


@dataclass(frozen=True, slots=True)
class RankPlaced:
    """A rank reported its coordinates in the mesh."""

    rank: int
    coords: Coords


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank reported an uncaught exception; its end will follow."""

    rank: int
    report: Report


@dataclass(frozen=True, slots=True)
class RankEnded:
    rank: int
    code: int
    """Minus the signal's number if one killed it."""
    time: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: int


Event = ServerReady | RankStarted | RankPlaced | RankFailed | RankEnded | Interrupted | TimerFired


@dataclass(frozen=True, slots=True)
class Fork:
    rank: int


@dataclass(frozen=True, slots=True)
class Signal:
    ranks: tuple[int, ...]
    signal: signal.Signals
    whole_group: bool
    """Also processes that the rank started."""


@dataclass(frozen=True, slots=True)
class SetTimer:
    timer: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Every rank has ended and no other will start."""


Instruction = Fork | Signal | SetTimer | Finish


class Phase(Enum):
    RUNNING = "running"
    SETTLING = "settling"
    STOPPING = "stopping"
    INTERRUPTED = "interrupted"
    KILLING = "killing"
    DONE = "done"


@dataclass(slots=True)
class _Rank:
    is_forked: bool = False
    coords: Coords | None = None
    report: Report | None = None
    end: RankEnded | None = None
    signals: set[signal.Signals] = field(default_factory=set)
    asked_to_stop_at: float | None = None

    @property
    def reported_consequence(self) -> bool:
        return self.report is not None and self.report.is_consequence

    @property
    def is_alive(self) -> bool:
        return self.is_forked and self.end is None


class Supervisor:
    """The state machine of one launch."""

    def __init__(self, num_ranks: int, interrupt_grace: float = 10.0) -> None:
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._interrupt_grace = interrupt_grace
        self._timer = 0
        self._now = 0.0
        self.phase = Phase.RUNNING
        self.interrupted_by: signal.Signals | None = None

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event at CLOCK_MONOTONIC `now`. The instructions must be carried out in order."""
        if self.phase is Phase.DONE:
            return []
        self._now = now
        instructions = list(self._react(event))
        if self._is_over():
            self.phase = Phase.DONE
            instructions.append(Finish())
        return instructions

    def failures(self) -> list[Failure]:
        """All failed ranks, in order."""
        found = (self._failure(number, rank) for number, rank in enumerate(self._ranks))
        return [failure for failure in found if failure is not None]

    def exit_code(self) -> int:
        """The launch's exit code: the interrupting signal's, else the root failure's, else 0."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        root = find_root(self.failures())
        return root.exit_code if root else 0

    def _react(self, event: Event) -> Iterator[Instruction]:
        match event:
            case ServerReady():
                yield from self._fork_next()
            case RankStarted():
                yield from self._fork_next()
            case RankPlaced(rank, coords):
                self._ranks[rank].coords = coords
            case RankFailed(rank, report):
                self._ranks[rank].report = self._ranks[rank].report or report
                yield from self._after_failure(report.is_consequence)
            case RankEnded(rank):
                self._ranks[rank].end = event
                if event.code != 0:
                    yield from self._after_failure(self._ranks[rank].reported_consequence)
            case Interrupted(number):
                yield from self._interrupt(number)
            case TimerFired(timer) if timer == self._timer:
                yield from self._time_is_up()

    def _fork_next(self) -> Iterator[Instruction]:
        waiting = [number for number, rank in enumerate(self._ranks) if not rank.is_forked]
        if self._may_fork() and waiting:
            self._ranks[waiting[0]].is_forked = True
            yield Fork(waiting[0])

    def _may_fork(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.SETTLING)

    def _after_failure(self, is_consequence: bool) -> Iterator[Instruction]:
        if self.phase is Phase.RUNNING and is_consequence:
            self.phase = Phase.SETTLING
            yield self._set_timer(SETTLE_SECONDS)
        elif self._may_fork() and not is_consequence:
            yield from self._stop()

    def _stop(self) -> Iterator[Instruction]:
        self.phase = Phase.STOPPING
        # A rank that has reported an error is ending already, and may be running its atexit hooks.
        yield from self._signal(signal.SIGTERM, [n for n in self._alive() if self._ranks[n].report is None])
        yield self._set_timer(STOP_GRACE_SECONDS)

    def _interrupt(self, number: signal.Signals) -> Iterator[Instruction]:
        if self.phase is Phase.RUNNING:
            self.phase, self.interrupted_by = Phase.INTERRUPTED, number
            yield from self._signal(signal.SIGINT, self._alive(), whole_group=False)
            yield self._set_timer(self._interrupt_grace)
        elif number == signal.SIGINT:  # SIGHUP often arrives twice, from the kernel and from the shell
            yield from self._kill()

    def _time_is_up(self) -> Iterator[Instruction]:
        if self.phase is Phase.SETTLING:
            yield from self._stop()
        elif self.phase is Phase.KILLING:
            for rank in self._alive():
                self._ranks[rank].end = RankEnded(rank, -signal.SIGKILL, self._now)
        else:
            yield from self._kill()

    def _kill(self) -> Iterator[Instruction]:
        self.phase = Phase.KILLING
        yield from self._signal(signal.SIGKILL, self._alive())
        yield self._set_timer(KILL_SECONDS)

    def _alive(self) -> list[int]:
        return [number for number, rank in enumerate(self._ranks) if rank.is_alive]

    def _signal(self, number: signal.Signals, ranks: list[int], whole_group: bool = True) -> Iterator[Instruction]:
        for rank in (self._ranks[each] for each in ranks):
            rank.signals.add(number)
            rank.asked_to_stop_at = self._now if rank.asked_to_stop_at is None else rank.asked_to_stop_at
        if ranks:
            yield Signal(tuple(ranks), number, whole_group)

    def _set_timer(self, seconds: float) -> SetTimer:
        self._timer += 1
        return SetTimer(self._timer, seconds)

    def _is_over(self) -> bool:
        more_to_come = self._may_fork() and not all(rank.is_forked for rank in self._ranks)
        return not more_to_come and not self._alive()

    def _failure(self, number: int, rank: _Rank) -> Failure | None:
        report, end = rank.report, rank.end
        if end is None or (end.code == 0 and report is None):
            return None
        came_after_stop = self._came_after_stop(rank, end)
        killed_by_us = -end.code in rank.signals
        return Failure(
            rank=number,
            coords=rank.coords,
            time=report.time if report else end.time,
            exit_code=1 if report and (killed_by_us or end.code == 0) else shell_code(end.code),
            how=report.summary if report else describe_exit(end.code),
            report=report,
            is_consequence=came_after_stop or rank.reported_consequence,
            was_stopped=came_after_stop and report is None and shell_code(end.code) - 128 in rank.signals,
        )

    def _came_after_stop(self, rank: _Rank, end: RankEnded) -> bool:
        """Whether it failed after the launcher signalled it; death by any other signal is its own failure."""
        if rank.asked_to_stop_at is None or (end.code < 0 and -end.code not in rank.signals):
            return False
        return rank.report is None or rank.report.time >= rank.asked_to_stop_at
