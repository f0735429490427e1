"""Where a worker stands: its share, what it has sent of it, and what came back. Sans-io: messages in, answers out.

share taken ── gradient given ── average there ── share taken …
     │               │
     └─ obsolete ────┘    other workers' shares, or a state to go on from, have come meanwhile
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.errors import Mismatch, Parallel3DError
from runtime.gradient_server.client.raw_parts import Incoming, RawPart, room_for
from runtime.gradient_server.wire.frames import Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.messages import (
    REASONS,
    Again,
    Assignment,
    AverageDone,
    Beat,
    Chunk,
    Kind,
    Leave,
    Reason,
    Refused,
    StateDone,
    StateWanted,
    Table,
    WireError,
)


class ShareChanged(Parallel3DError):
    """This share's average will not come: the server has shared the step's samples anew, sends a state to go on from,
    or has ended. Nothing was applied; ask for the next share."""


class ServerRefused(Parallel3DError):
    """The gradient server refuses this worker, or has halted. `reason` is one of the protocol's."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        meaning = f": {REASONS[self.reason]}" if self.reason in REASONS else ""
        return f"the gradient server refuses: {self.reason}{meaning}{': ' if self.detail else ''}{self.detail}"


@dataclass(frozen=True, slots=True)
class Share:
    """Samples `start` to `end` of the `total` that step has."""

    step: int
    attempt: int
    start: int
    end: int
    total: int

    def __len__(self) -> int:
        return self.end - self.start

    def is_same_work(self, other: Share) -> bool:
        """Whether a gradient of this one is the other's too."""
        return (self.step, self.start, self.end, self.total) == (other.step, other.start, other.end, other.total)


@dataclass(frozen=True, slots=True)
class Average:
    """What a step gave, over all workers."""

    step: int
    loss: float
    """The workers' losses, weighted by their samples."""
    correct: int
    total: int
    seconds: float
    """From the first byte of the step's gradients to the last average, as the server saw it."""


class WorkerProtocol:
    """One worker's, over all its connections.

    step: the one it computes or waits for next. has_state: whether its weights are more than first values.
    """

    def __init__(self, step: int = 0, has_state: bool = False) -> None:
        self.step, self.has_state = step, has_state
        self.share: Share | None = None
        """Which the caller works on, as long as that is wanted; its attempt is the latest."""
        self.is_told = False
        """Whether the server, on this connection, has said that it wants the share's gradient."""
        self.average: Average | None = None
        """Of the share, once all of it is there."""
        self.wanted_state: StateWanted | None = None
        self.state: Incoming | None = None
        """One to go on from, once all of it is there."""
        self.left: str | None = None
        """Why the server has ended, once it has."""
        self._assigned: Share | None = None
        self._homes: Sequence[RawPart] | None = None
        self._incoming: Incoming | None = None
        self._is_receiving = False

    @property
    def next_step(self) -> int:
        """The one that the server is told of: a state that has come counts as loaded."""
        return self.step if self.state is None else self.state.table.step

    # What the caller does.

    def take_share(self) -> Share | None:
        """The one that was assigned and not taken yet."""
        if self._assigned is None or self.state is not None:
            return None
        self.share, self._assigned, self.is_told = self._assigned, None, True
        self.has_state = True
        return self.share

    def expect(self, homes: Sequence[RawPart]) -> None:
        """The share's gradient is on its way; its average shall be written there."""
        self._homes, self.average = homes, None

    def take_average(self) -> Average:
        """The step is over."""
        assert self.average is not None
        average, self.average = self.average, None
        self._forget_share()
        return average

    def take_state(self) -> Incoming:
        """It is about to be loaded."""
        assert self.state is not None
        state, self.state = self.state, None
        self.step, self.has_state = state.table.step, True
        return state

    # What happens to the connection.

    def lost(self) -> None:
        """What was not finished has to be said anew on the next one."""
        self._assigned = self._incoming = self.wanted_state = None
        self.is_told = self._is_receiving = False

    def hear(self, item: Item) -> memoryview | None:
        """An item from the server; of a chunk that begins, where it is to be received. Raises WireError, Mismatch and
        ServerRefused."""
        match item:
            case VectorPiece():
                pass  # nobody waits for it any more
            case VectorBegins(head=Chunk() as chunk):
                self._is_receiving = self._incoming is not None and self._incoming.fits(chunk)
                if self._is_receiving and self._incoming is not None:
                    return self._incoming.begin(item)
            case VectorEnds(message=Chunk() as chunk):
                if self._is_receiving and self._incoming is not None:
                    self._incoming.end(chunk)
                self._is_receiving = False
            case Assignment():
                self._assign(Share(item.step, item.attempt, item.start, item.end, item.total))
            case Again():
                self._again(item)
            case Table():
                self._begin(item)
            case AverageDone():
                self._end_average(item)
            case StateWanted():
                self.wanted_state = item
            case StateDone():
                self._end_state(item)
            case Leave():
                self.left, self._assigned = item.reason, None
                self._forget_share()
            case Refused():
                raise ServerRefused(item.reason, item.detail)
            case Beat():
                pass
            case _:
                raise WireError(Reason.UNEXPECTED, f"{type(item).__name__}, to a worker.")
        return None

    def _assign(self, share: Share) -> None:
        if share.step != self.next_step:
            raise Mismatch(
                f"the gradient server assigns samples of step {share.step}, but this worker is at step "
                f"{self.next_step}."
            )
        if self.share is not None and self.share.is_same_work(share):
            self._use_attempt(share.attempt)
        else:
            self._forget_share()
            self._assigned = share

    def _again(self, again: Again) -> None:
        if self.share is not None and self.share.step == again.step:
            self._use_attempt(again.attempt)
        elif self._assigned is not None and self._assigned.step == again.step:
            self._assigned = replace(self._assigned, attempt=again.attempt)

    def _use_attempt(self, attempt: int) -> None:
        assert self.share is not None
        self.share, self.is_told = replace(self.share, attempt=attempt), True
        self._incoming = self.average = None

    def _begin(self, table: Table) -> None:
        """What is of another attempt, or of a share that is not wanted any more, is passed over."""
        self._incoming = None
        if table.kind is Kind.STATE:
            self._forget_share()
            self._incoming, self.state = Incoming(table, room_for(table)), None
        elif table.kind is Kind.GRADIENT:
            raise WireError(Reason.UNEXPECTED, "a table of gradients, to a worker.")
        elif self._is_current(table) and self._homes is not None:
            self._incoming = Incoming(table, self._homes)

    def _is_current(self, message: Table | AverageDone) -> bool:
        share = self.share
        return share is not None and self.is_told and (message.step, message.attempt) == (share.step, share.attempt)

    def _end_average(self, done: AverageDone) -> None:
        if not self._is_current(done):
            return
        if self._incoming is None or not self._incoming.is_complete:
            raise WireError(Reason.TRUNCATED, f"the average of step {done.step} ends before all of it has come.")
        self.average = Average(done.step, done.loss, done.correct, done.total, done.seconds)
        self.step, self.has_state = done.step + 1, True  # from here on it counts as applied
        self._incoming = self._homes = None

    def _end_state(self, done: StateDone) -> None:
        incoming = self._incoming
        if incoming is None or (incoming.table.step, incoming.table.attempt) != (done.step, done.request):
            return
        if not incoming.is_complete:
            raise WireError(Reason.TRUNCATED, f"the state of step {done.step} ends before all of it has come.")
        self.state, self._incoming = incoming, None

    def _forget_share(self) -> None:
        """A share whose average is there stays: nobody can take that back."""
        if self.average is None:
            self.share = self._homes = None
            self.is_told = False
