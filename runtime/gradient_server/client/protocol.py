"""A worker's side of protocol version 2: its share, its gradient's attempt, averages and states. Sans-io.

share taken ── gradient sent ── average received ── share taken …
     │               │
     └─ obsolete ────┘    the server assigned other shares, or sent a state to continue from
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

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
    Message,
    Reason,
    Refused,
    StateDone,
    StateWanted,
    Table,
    WireError,
)


class ShareChanged(Parallel3DError):
    """This share's average will not come: the server assigned new shares, sent a state to continue from, or ended.
    Nothing was applied; ask for the next share."""


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
    """Samples [start, end) of the step's `total`."""

    step: int
    attempt: int
    start: int
    end: int
    total: int

    def __len__(self) -> int:
        return self.end - self.start

    def is_same_work(self, other: Share) -> bool:
        """Whether both have the same gradient; attempts may differ."""
        return (self.step, self.start, self.end, self.total) == (other.step, other.start, other.end, other.total)


@dataclass(frozen=True, slots=True)
class Average:
    """The result of a step over all workers."""

    step: int
    loss: float
    """Mean of the workers' losses, weighted by their samples."""
    correct: int
    total: int
    seconds: float
    """From the first byte of the step's gradients to the last average, measured by the server."""


class WorkerProtocol:
    """The state of one worker, across its connections.

    step: what it computes or waits for next. has_state: whether its weights are more than initial values.
    """

    def __init__(self, step: int = 0, has_state: bool = False) -> None:
        self.step, self.has_state = step, has_state
        self.share: Share | None = None
        """The share that the caller works on, with the latest attempt; None if it is obsolete."""
        self.is_requested = False
        """Whether the server has asked for the share's gradient on this connection."""
        self.average: Average | None = None
        """The share's average, once it is complete."""
        self.wanted_state: StateWanted | None = None
        self.state: Incoming | None = None
        """A state to continue from, once it is complete."""
        self.left: str | None = None
        """The server's reason for its normal end; None before that."""
        self._assigned: Share | None = None
        self._homes: Sequence[RawPart] | None = None
        self._incoming: Incoming | None = None
        self._is_receiving = False

    @property
    def next_step(self) -> int:
        """The step to join with: a complete state counts as loaded."""
        return self.step if self.state is None else self.state.table.step

    # Called by the worker.

    def take_share(self) -> Share | None:
        """The share that is assigned and not taken yet."""
        if self._assigned is None or self.state is not None:
            return None
        self.share, self._assigned, self.is_requested = self._assigned, None, True
        self.has_state = True
        return self.share

    def expect(self, homes: Sequence[RawPart]) -> None:
        """The share's gradient is being sent; write its average to `homes`."""
        self._homes, self.average = homes, None

    def take_average(self) -> Average:
        """End the step."""
        assert self.average is not None
        average, self.average = self.average, None
        self._forget_share()
        return average

    def take_state(self) -> Incoming:
        """The complete state, which the caller loads now."""
        assert self.state is not None
        state, self.state = self.state, None
        self.step, self.has_state = state.table.step, True
        return state

    # Called by the connection.

    def lost(self) -> None:
        """The connection is lost: unfinished messages start again on the next one."""
        self._assigned = self._incoming = self.wanted_state = None
        self.is_requested = self._is_receiving = False

    def receive_chunk(self, item: VectorBegins | VectorPiece | VectorEnds) -> memoryview | None:
        """Handle a chunk's item; for one that begins, where to receive its bytes. Raises WireError."""
        match item:
            case VectorPiece():
                pass  # only chunks that are ignored come in pieces
            case VectorBegins(head=Chunk() as chunk):
                self._is_receiving = self._incoming is not None and self._incoming.fits(chunk)
                if self._is_receiving and self._incoming is not None:
                    return self._incoming.begin(item)
            case VectorEnds(message=Chunk() as chunk):
                if self._is_receiving and self._incoming is not None:
                    self._incoming.end(chunk)
                self._is_receiving = False
            case _:
                _refuse(item)
        return None

    def receive(self, message: Message) -> None:
        """Handle a message. Raises WireError, Mismatch and ServerRefused."""
        match message:
            case Table() | AverageDone() | StateDone():
                self._receive_vectors(message)
            case Assignment():
                self._assign(Share(message.step, message.attempt, message.start, message.end, message.total))
            case Again():
                self._again(message)
            case StateWanted():
                self.wanted_state = message
            case Leave():
                self.left, self._assigned = message.reason, None
                self._forget_share()
            case Refused():
                raise ServerRefused(message.reason, message.detail)
            case Beat():
                pass
            case _:
                _refuse(message)

    def _receive_vectors(self, message: Table | AverageDone | StateDone) -> None:
        match message:
            case Table():
                self._begin(message)
            case AverageDone():
                self._end_average(message)
            case StateDone():
                self._end_state(message)

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
        self.share, self.is_requested = replace(self.share, attempt=attempt), True
        self._incoming = self.average = None

    def _begin(self, table: Table) -> None:
        """Tables of another attempt, or of an obsolete share, are ignored."""
        self._incoming = None
        if table.kind is Kind.STATE:
            self._forget_share()
            self._incoming, self.state = Incoming(table, room_for(table)), None
        elif table.kind is Kind.GRADIENT:
            raise WireError(Reason.UNEXPECTED, "a table of gradients, to a worker.")
        elif self._is_current(table) and self._homes is not None:
            self._incoming = Incoming(table, self._homes)

    def _is_current(self, message: Table | AverageDone) -> bool:
        share = self.share if self.is_requested else None
        return share is not None and (message.step, message.attempt) == (share.step, share.attempt)

    def _end_average(self, done: AverageDone) -> None:
        if not self._is_current(done):
            return
        if self._incoming is None or not self._incoming.is_complete:
            raise WireError(Reason.TRUNCATED, f"the average of step {done.step} ends before all of it has come.")
        self.average = Average(done.step, done.loss, done.correct, done.total, done.seconds)
        self.step, self.has_state = done.step + 1, True  # counts as applied from here on
        self._incoming = self._homes = None

    def _end_state(self, done: StateDone) -> None:
        incoming = self._incoming
        if incoming is None or (incoming.table.step, incoming.table.attempt) != (done.step, done.request):
            return
        if not incoming.is_complete:
            raise WireError(Reason.TRUNCATED, f"the state of step {done.step} ends before all of it has come.")
        self.state, self._incoming = incoming, None

    def _forget_share(self) -> None:
        """Make the share obsolete, unless its average is complete: that is final."""
        if self.average is None:
            self.share = self._homes = None
            self.is_requested = False


def _refuse(item: Item) -> NoReturn:
    raise WireError(Reason.UNEXPECTED, f"{type(item).__name__}, to a worker.")
