"""Decides what a gradient server does next: events in, instruction values out. No I/O, no clock, no loop.

gathering ──all have joined──▶ syncing ──all have the weights──▶ round ──summed──▶ syncing, or the next round
    ▲                                                             │ ▲
    └──too few are left── waiting ◀──a worker of version 2 is lost─┘ └── it is back, or others got its samples
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import Enum

from runtime.errors import DeadlineExceeded, Mismatch, NonFiniteGradient, Parallel3DError, PeerLost
from runtime.gradient_server.buffers import Buffers
from runtime.gradient_server.events import (
    Average,
    Dismiss,
    Event,
    Finish,
    Instruction,
    Joined,
    Left,
    Lost,
    Misbehaved,
    Open,
    Relay,
    Reported,
    SetTimer,
    Started,
    StateSent,
    StopAsked,
    Summed,
    TimerFired,
    WorkerEvent,
)
from runtime.gradient_server.members import Member, Roster
from runtime.gradient_server.sample_shares import Shares, Speeds, even
from runtime.gradient_server.settings import GradientServerSettings
from runtime.gradient_server.step_sum import StepSum
from runtime.gradient_server.wire.messages import Reason, WireError

MOST_RETURNS = 3
"""How often a worker may be lost and return within one step: one that is lost more often would delay the others."""


class Phase(Enum):
    GATHERING = "gathering"
    SYNCING = "syncing"
    ROUND = "round"
    WAITING = "waiting"
    DONE = "done"


class Rounds:
    """The state machine of one run of a gradient server."""

    def __init__(self, settings: GradientServerSettings, buffers: Buffers | None = None) -> None:
        self.settings = settings
        self.buffers = buffers or Buffers(settings.memory_bytes)
        self.roster = Roster()
        self.phase = Phase.GATHERING
        self.step = 0
        self.num_steps = 0
        """Steps completed by this server process."""
        self.sum: StepSum | None = None
        """The sum that gradients are added to; None outside of a round."""
        self._needed = settings.workers
        self._shares: Shares = {}
        self._speeds = Speeds()
        self._attempts: dict[int, int] = {}
        """The latest attempt at this step and at the one before."""
        self._awaited: set[int] = set()
        self._were_lost: set[int] = set()
        """Workers lost since the round was opened, whether they are back or not."""
        self._syncing: Relay | None = None
        self._request = self._timer = 0
        self._now = self._opened = 0.0

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event at CLOCK_MONOTONIC `now`. The instructions must be carried out in order."""
        if self.phase is Phase.DONE:
            return []
        self._now = now
        return list(self._react(event))

    def refusal(self, node_id: str, version: int) -> WireError | None:
        """Why this worker cannot join; None if it can."""
        run = self.roster.version
        if run is not None and run != version:
            detail = f"this run's workers speak version {run}."
        elif version == 1 and self._attempts:
            detail = "the run has begun, and version 1 has no message for its weights."
        elif version == 2 and (why := self.roster.why_barred(node_id)) is not None:
            return WireError(Reason.UNEXPECTED, f"{node_id} was dropped: {why}")
        else:
            return None
        return WireError(Reason.VERSION_REFUSED, detail)

    # Events.

    def _react(self, event: Event) -> Iterator[Instruction]:
        match event:
            case Joined() | Lost() | Left() | Misbehaved() | Reported():
                yield from self._react_to_worker(event, self.roster.members[event.worker])
            case Started():
                yield self._set_timer(self.settings.join_seconds)
            case Summed():
                yield from self._summed()
            case StateSent(request):
                yield from self._synced(request)
            case TimerFired(timer, held_up_by) if timer == self._timer:
                yield from self._time_is_up(held_up_by)
            case StopAsked(reason):
                yield self._finish(reason)

    def _react_to_worker(self, event: WorkerEvent, member: Member) -> Iterator[Instruction]:
        match event:
            case Joined():
                yield from self._joined(member)
            case Lost(why=why):
                yield from self._lost(member, why)
            case Left():
                yield from self._left(member)
            case Misbehaved(error=error):
                yield from self._misbehaved(member, error)
            case Reported(worker):
                if self.sum is not None and self.settings.shares == "by speed":
                    self._speeds.note(worker, self.sum.shares[worker].length, self._now - self._opened)

    def _joined(self, member: Member) -> Iterator[Instruction]:
        if self.phase is Phase.GATHERING:
            if len(self.roster.here) >= self._needed:
                yield from self._go_on()
        elif self.phase is Phase.WAITING and member.worker in self._awaited:
            # If it is behind, or has restarted, it cannot compute its share: others get that.
            self._awaited.discard(member.worker)
            yield from self._reopen(f"{member} is back")

    def _lost(self, member: Member, why: str) -> Iterator[Instruction]:
        if member.version == 1 and self.phase is not Phase.GATHERING:
            yield self._fail(
                PeerLost(f"{member} was lost at step {self.step}: {why}", rank=member.worker, step=self.step)
            )
            return
        member.is_here = False
        is_needed = self.phase in (Phase.ROUND, Phase.WAITING) and member.worker in self._shares
        member.num_losses += 1
        if not is_needed or member.num_losses > MOST_RETURNS:
            yield from self._gone(member, why)
            if not self.roster.members and self.phase is not Phase.GATHERING:
                yield from self._gather()
            return
        self._drop()
        self._awaited.add(member.worker)
        self._were_lost.add(member.worker)
        self.phase = Phase.WAITING
        yield self._set_timer(self.settings.rejoin_seconds)

    def _left(self, member: Member) -> Iterator[Instruction]:
        if self.phase is Phase.ROUND and self.sum is not None and self.sum.has_all_of(member.worker):
            self.roster.remove(member)  # its gradient counts, and it gets no average
        elif member.version == 1 and self.phase is Phase.ROUND and self._is_in_sum(member):
            error = f"{member} left at step {self.step}, while sending its gradient"
            yield self._fail(PeerLost(error, rank=member.worker, step=self.step))
        else:
            yield from self._gone(member, "it left")
            if not self.roster.members and self._attempts:
                yield self._finish("all workers have left")

    def _misbehaved(self, member: Member, error: WireError) -> Iterator[Instruction]:
        message = f"{member} at step {self.step}: {error}"
        yield Dismiss(member.worker, error.reason, error.detail)
        if self.phase is Phase.GATHERING or member.worker not in self._shares:
            yield from self._gone(member, "it was dropped")
            return
        if self.settings.policy == "halt" or (member.version == 1 and self._is_in_sum(member)):
            yield self._fail(_as_error(member.worker, self.step, error, message), error.reason)
            return
        self.roster.bar(member, str(error))
        if len(self.roster.members) == 1:
            yield self._fail(_as_error(member.worker, self.step, error, message), error.reason)
        else:
            yield from self._gone(member, "it was dropped")

    def _is_in_sum(self, member: Member) -> bool:
        return self.sum is not None and self.sum.has_from(member.worker)

    def _gone(self, member: Member, why: str) -> Iterator[Instruction]:
        """Remove a worker for good: others get its samples, if it had any."""
        self.roster.remove(member)
        self._speeds.forget(member.worker)
        self._awaited.discard(member.worker)
        if not self.roster.members:
            return
        if self.phase is Phase.SYNCING:
            yield from self._sync_without(member.worker)
        elif self.phase in (Phase.ROUND, Phase.WAITING) and member.worker in self._shares:
            yield from self._round_without(member, why)

    def _round_without(self, member: Member, why: str) -> Iterator[Instruction]:
        if member.version == 1:
            assert self.sum is not None
            had_losses = self.sum.has_all_reports
            keys = self.sum.leave_out(member.worker)
            yield Average(tuple(keys), has_losses=self.sum.has_all_reports and not had_losses)
            return
        self._drop()
        self._were_lost.add(member.worker)
        self.phase = Phase.WAITING
        yield from self._reopen(f"{member}: {why}")

    def _time_is_up(self, held_up_by: Iterable[int]) -> Iterator[Instruction]:
        if self.phase is Phase.GATHERING:
            yield self._fail(self._join_timeout(), Reason.TOO_SLOW)
        elif self.phase is Phase.WAITING:
            names = ", ".join(str(self.roster.members[worker]) for worker in sorted(self._awaited))
            for worker in sorted(self._awaited):
                self.roster.remove(self.roster.members[worker])
            self._awaited.clear()
            yield from self._reopen(f"{names} did not come back")
        elif self.phase is Phase.SYNCING and self._syncing is not None:
            yield from self._sync_is_late([self.roster.members[worker] for worker in held_up_by])
        else:
            yield from self._too_slow([member for member in self.roster.here if self._is_late(member)], "no gradient")

    def _sync_is_late(self, slow_sinks: list[Member]) -> Iterator[Instruction]:
        """Refuse the sinks that are slow to take the state; if there are none, the source."""
        assert self._syncing is not None
        if not slow_sinks:
            yield from self._too_slow([self.roster.members[self._syncing.source]], "no state")
            return
        yield from self._too_slow(slow_sinks, "it did not take the state")
        if self.phase is Phase.SYNCING:
            yield from self._limit_step()  # for the remaining sinks

    def _too_slow(self, late: Iterable[Member], what: str) -> Iterator[Instruction]:
        for member in late:
            detail = f"{what} of step {self.step} within {self.settings.step_seconds:g} s."
            if self.phase is not Phase.DONE:
                yield from self._misbehaved(member, WireError(Reason.TOO_SLOW, detail))

    def _is_late(self, member: Member) -> bool:
        return self.sum is not None and member.worker in self._shares and not self.sum.has_all_of(member.worker)

    def _join_timeout(self) -> DeadlineExceeded:
        here, seconds = len(self.roster.here), self.settings.join_seconds
        if here >= self._needed:
            return DeadlineExceeded(
                f"No worker that joined within {seconds:g} s has the weights of step {self.step}.", step=self.step
            )
        return DeadlineExceeded(
            f"{here} of {self._needed} workers joined within {seconds:g} s. "
            "Start the others, or set --workers to the number that there is.",
            step=self.step,
        )

    # Between rounds.

    def _go_on(self) -> Iterator[Instruction]:
        """Begin the step of the most advanced workers; the others get their weights first."""
        here = self.roster.here
        ready = self._ready()
        if self.roster.version == 1 and len(here) < self.settings.min_workers:
            yield self._fail(
                PeerLost(
                    f"{len(here)} of at least {self.settings.min_workers} workers are left at step {self.step}.",
                    step=self.step,
                )
            )
            return
        if not ready or len(here) < self.settings.min_workers:
            yield from self._gather()
            return
        if self.settings.steps is not None and self.step >= self.settings.steps:
            yield self._finish(f"{self.settings.steps} steps were made")
            return
        behind = [member for member in here if member not in ready]
        if behind:
            yield from self._sync(ready[0], behind)
        else:
            yield from self._open(self._fresh_shares(ready))

    def _ready(self) -> list[Member]:
        """Workers that can compute the next step, which is set here: the largest step of any worker."""
        here = self.roster.here
        if self.roster.version == 1:
            return here
        with_state = [member for member in here if member.has_state]
        if not with_state and self.step == 0:
            self.roster.outdate()  # a returning worker may have another worker's initial weights
            # Nothing is trained yet: all take the first worker's initial weights.
            return [member for member in here if member.step == 0][:1]
        if not self._attempts:
            self.step = max((member.step for member in with_state), default=0)
        elif not any(member.step == self.step for member in with_state):
            return self._one_step_back(with_state)
        return [member for member in with_state if member.step == self.step]

    def _one_step_back(self, with_state: Iterable[Member]) -> list[Member]:
        """No connected worker has the latest average, so the latest step is repeated. Earlier steps are never repeated:
        a worker that has their average may come back."""
        ready = [member for member in with_state if member.step == self.step - 1]
        if ready:
            self.step, self.num_steps = self.step - 1, self.num_steps - 1
            self.roster.outdate()
        return ready

    def _gather(self) -> Iterator[Instruction]:
        if self.phase is Phase.GATHERING:
            return
        self._drop()
        self.phase, self._needed, self._shares = Phase.GATHERING, self.settings.min_workers, {}
        self.roster.reserved = frozenset()
        yield self._set_timer(self.settings.join_seconds)

    def _sync(self, source: Member, behind: Iterable[Member]) -> Iterator[Instruction]:
        self.phase = Phase.SYNCING
        self._request += 1
        self._syncing = Relay(source.worker, tuple(member.worker for member in behind), self.step, self._request)
        yield self._syncing
        yield from self._limit_step()

    def _limit_step(self) -> Iterator[Instruction]:
        """Set the timer to `step_seconds`, if there is such a limit; the previous timer is void."""
        self._timer += 1
        if self.settings.step_seconds is not None:
            yield self._set_timer(self.settings.step_seconds)

    def _sync_without(self, worker: int) -> Iterator[Instruction]:
        assert self._syncing is not None
        # If it returns with the same id, it has nothing of what its old connection received.
        sinks = tuple(sink for sink in self._syncing.sinks if sink != worker)
        self._syncing = replace(self._syncing, sinks=sinks)
        if worker == self._syncing.source or not sinks:
            yield from self._go_on()

    def _is_here(self, worker: int) -> bool:
        return worker in self.roster.members and self.roster.members[worker].is_here

    def _synced(self, request: int) -> Iterator[Instruction]:
        syncing = self._syncing
        if self.phase is not Phase.SYNCING or syncing is None or request != syncing.request:
            return
        for worker in (syncing.source, *syncing.sinks):
            self.roster.members[worker].has_weights_of(syncing.step)
        ready = self._ready_now()
        if len(ready) < self.settings.min_workers:
            yield from self._go_on()
        else:
            yield from self._open(self._fresh_shares(ready))

    # Rounds.

    def _fresh_shares(self, members: Iterable[Member]) -> Shares:
        workers = [member.worker for member in members]
        if self.settings.shares == "even":
            return even(self.settings.samples, workers)
        return self._speeds.shares(self.settings.samples, workers, self._shares)

    def _open(self, shares: Shares, again: frozenset[int] = frozenset(), why: str = "") -> Iterator[Instruction]:
        attempt = self._attempts.get(self.step, -1) + 1
        self._attempts = {step: each for step, each in self._attempts.items() if step >= self.step - 1}
        self._attempts[self.step] = attempt
        for worker in shares:
            self.roster.members[worker].has_weights_of(self.step)
        self.buffers.forget_unsettled()
        self._shares, self._opened, self.roster.reserved = shares, self._now, frozenset(shares)
        self.sum = StepSum(self.step, attempt, shares, self.buffers)
        self._were_lost.clear()
        self.phase = Phase.ROUND
        yield Open(self.sum, again, why)
        yield from self._limit_step()

    def _drop(self) -> None:
        if self.sum is not None:
            self.sum.is_dropped = True
            self.sum = None

    def _reopen(self, why: str) -> Iterator[Instruction]:
        """Repeat the step, unless a worker is waited for: with the same shares if all are ready, else with new ones."""
        if self._awaited:
            return
        if all(self._is_ready(worker) for worker in self._shares):
            again = frozenset(self._shares.keys() - self._were_lost)
            yield from self._open(self._shares, again, why)
            return
        ready = self._ready_now()
        if len(ready) < self.settings.min_workers:
            yield from self._go_on()
        else:
            yield from self._open(self._fresh_shares(ready), why=why)

    def _ready_now(self) -> list[Member]:
        return [member for member in self.roster.here if member.is_ready(self.step)]

    def _is_ready(self, worker: int) -> bool:
        return worker in self.roster.members and self.roster.members[worker].is_ready(self.step)

    def _summed(self) -> Iterator[Instruction]:
        assert self.sum is not None
        assert self.sum.is_complete
        self.buffers.settle(self.sum.keys)
        self.num_steps += 1
        for worker in self.sum.shares:
            if self._is_here(worker):
                member = self.roster.members[worker]
                member.step, member.num_losses = self.step + 1, 0
        self.sum = None
        self.step += 1
        if not self.roster.members:
            yield self._finish("all workers have left")
        else:
            yield from self._go_on()

    # The end.

    def _set_timer(self, seconds: float) -> SetTimer:
        """Replaces the previous timer."""
        self._timer += 1
        return SetTimer(self._timer, seconds)

    def _fail(self, error: Parallel3DError, code: Reason = Reason.UNEXPECTED) -> Finish:
        return self._finish(str(error), error, code)

    def _finish(self, reason: str, error: Parallel3DError | None = None, code: Reason = Reason.UNEXPECTED) -> Finish:
        self.phase = Phase.DONE
        self._drop()
        return Finish(reason, error, code)


def _as_error(worker: int, step: int, error: WireError, message: str) -> Parallel3DError:
    if error.reason is Reason.NOT_FINITE:
        return NonFiniteGradient(message, ranks=(worker,), step=step)
    return Mismatch(message, rank=worker, step=step)
