"""Carries out the instructions of `Rounds` and feeds it events: the connected workers, and what they are sent."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from monitoring.prometheus.gradient_server_metrics import GradientServerTotals
from runtime.errors import Parallel3DError
from runtime.gradient_server.buffers import Key
from runtime.gradient_server.connection import Connection
from runtime.gradient_server.events import (
    Average,
    Dismiss,
    Event,
    Finish,
    Instruction,
    Left,
    Open,
    Relay,
    Reported,
    SetTimer,
    StateSent,
    Summed,
    TimerFired,
)
from runtime.gradient_server.receivers import ReceiverV2
from runtime.gradient_server.rounds import Phase, Rounds
from runtime.gradient_server.sample_shares import Share
from runtime.gradient_server.senders import AverageFrames
from runtime.gradient_server.settings import GradientServerSettings
from runtime.gradient_server.state_relay import StateRelay
from runtime.gradient_server.step_sum import GradientRefused, StepSum
from runtime.gradient_server.wire.frames import Item
from runtime.gradient_server.wire.messages import Codec, Reason, StateWanted
from runtime.logs import logger


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A completed step."""

    step: int
    attempt: int
    shares: dict[int, Share]
    """By worker."""
    loss: float
    correct: int
    total: int
    seconds: float
    """From the first byte of its gradients to its last average."""


OnStep = Callable[[StepRecord], object]


class RoundRunner:
    """A `GradientSink`: receivers report to it."""

    def __init__(
        self,
        settings: GradientServerSettings,
        totals: GradientServerTotals,
        on_step: OnStep,
        on_finish: Callable[[Finish], None],
    ) -> None:
        self._settings, self._totals, self._on_step, self._on_finish = settings, totals, on_step, on_finish
        self.rounds = Rounds(settings)
        self.workers: dict[int, Connection] = {}
        """The connected workers, by id."""
        self.relay: StateRelay | None = None
        self.relay_source: Connection | None = None
        self.last_loss: float | None = None
        self._log = logger("gradient_server")
        self._frames: AverageFrames | None = None
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._events: deque[Event] = deque()
        self._is_handling = False

    @property
    def codec(self) -> Codec:
        """Packs averages, and gradients if the worker follows it."""
        return Codec.ZLIB if self._settings.compression else Codec.NONE

    # Events.

    def handle(self, event: Event) -> None:
        """Handle an event, then those that carrying it out creates, in order."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                for instruction in self.rounds.handle(self._events.popleft(), time.monotonic()):
                    self._carry_out(instruction)
                self._check_sum()
        except Exception as error:  # a bug: end the run with its reason instead of hanging
            self._log.exception("failed")
            self.rounds.phase = Phase.DONE
            self._on_finish(Finish(repr(error), Parallel3DError(f"The gradient server has a bug: {error!r}.")))
        finally:
            self._is_handling = False

    def _check_sum(self) -> None:
        total = self.rounds.sum
        if total is not None and total.is_complete:
            self._complete(total)
            self._events.append(Summed())

    def _complete(self, total: StepSum) -> None:
        seconds = 0.0 if self._began is None else time.monotonic() - self._began
        assert self._frames is not None
        for connection in self._participants(total):
            assert connection.sender is not None
            connection.sender.done(self._frames, total, seconds)
        self._totals.note_step(seconds)
        self.last_loss = total.loss
        record = StepRecord(total.step, total.attempt, total.shares, total.loss, total.correct, total.total, seconds)
        self._log.debug("step", step=total.step, attempt=total.attempt, loss=total.loss, seconds=round(seconds, 6))
        self._on_step(record)

    def _participants(self, total: StepSum) -> list[Connection]:
        return [connection for worker, connection in self.workers.items() if worker in total.shares]

    # What receivers report.

    @property
    def sum(self) -> StepSum | None:
        return self.rounds.sum

    @property
    def step(self) -> int:
        return self.rounds.step

    def on_gradient_started(self) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def on_key_complete(self, total: StepSum, key: Key) -> None:
        assert self._frames is not None
        for connection in self._participants(total):
            assert connection.sender is not None
            connection.sender.average(self._frames, total, key)

    def on_loss(self, total: StepSum) -> None:
        if total.has_all_reports:
            for connection in self._participants(total):
                assert connection.sender is not None
                connection.sender.losses(total)

    def on_gradient_done(self, worker: int) -> None:
        self.handle(Reported(worker))

    def on_leave(self, worker: int, reason: str) -> None:
        connection = self.workers.pop(worker)
        self._forget_sink(worker)
        self._log.info("left", worker=worker, why=reason)
        self.handle(Left(worker, reason))
        connection.end()

    def on_state(self, worker: int, item: Item) -> None:
        connection = self.workers[worker]
        if not connection.state_request:
            raise GradientRefused(Reason.UNEXPECTED, "a state that was not requested.", worker)
        if self.relay is not None and connection is self.relay_source:
            self.relay.take(item, lambda request: self.handle(StateSent(request)))

    # Instructions.

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Open():
                self._open(instruction)
            case Average(keys, has_losses):
                if self.rounds.sum is not None:  # an earlier instruction of the same event may have ended the run
                    self._send_averages(self.rounds.sum, keys, has_losses)
            case Relay():
                self._start_relay(instruction)
            case Dismiss(worker, reason, detail):
                self._dismiss(worker, reason, detail)
            case SetTimer(timer, seconds):
                self._set_timer(timer, seconds)
            case Finish():
                self._end_relay()
                self._on_finish(instruction)

    def _open(self, opened: Open) -> None:
        total = opened.sum
        self._end_relay()
        self._began = None
        self._frames = AverageFrames(total, self.codec, self._settings.chunk_bytes)
        if opened.why:
            self._log.info(
                "step again", step=total.step, attempt=total.attempt, why=opened.why, workers=[*total.shares]
            )
        for worker, share in total.shares.items():
            connection = self.workers.get(worker)
            if connection is not None and connection.sender is not None:
                if isinstance(connection.receiver, ReceiverV2):
                    connection.receiver.requested = total.step, total.attempt
                if worker in opened.again:
                    connection.sender.again(total, opened.why)
                else:
                    connection.sender.assign(total, share, self._settings.samples)

    def _start_relay(self, relay: Relay) -> None:
        self._end_relay()
        source = self.workers.get(relay.source)
        if source is None:
            return  # its loss is the next event
        sinks = {worker: self.workers[worker].outbox for worker in relay.sinks if worker in self.workers}
        self.relay = StateRelay(relay.step, relay.request, source.link, sinks)
        self.relay_source, source.state_request = source, relay.request
        self._log.info("state", step=relay.step, source=relay.source, sinks=[*sinks])
        source.outbox.put(StateWanted(relay.step, relay.request))

    def _end_relay(self) -> None:
        if self.relay is not None:
            self.relay.end()
        self.relay = self.relay_source = None

    def _forget_sink(self, worker: int) -> None:
        if self.relay is not None:
            self.relay.without(worker)

    def forget(self, connection: Connection) -> bool:
        """Its link is gone. True if it was the current connection of a worker."""
        worker = connection.worker
        if worker is None or self.workers.get(worker) is not connection:
            return False
        del self.workers[worker]
        self._forget_sink(worker)
        return True

    def _send_averages(self, total: StepSum, keys: Sequence[Key], has_losses: bool) -> None:
        for key in keys:
            self.on_key_complete(total, key)
        if has_losses:
            self.on_loss(total)

    def _dismiss(self, worker: int, reason: Reason, detail: str) -> None:
        connection = self.workers.pop(worker, None)
        self._forget_sink(worker)
        if connection is not None and connection.sender is not None:  # otherwise it was refused and counted already
            self._totals.rejected[str(reason)] += 1
            self._log.warning("refused", peer=connection.link.peer, worker=worker, why=detail)
            connection.sender.refuse(reason, detail)
            connection.end()

    def _set_timer(self, timer: int, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer, timer)

    def _on_timer(self, timer: int) -> None:
        self.handle(TimerFired(timer, self.relay.held_up_by if self.relay is not None else ()))

    def close(self) -> None:
        """Cancel the timer and the relay."""
        self._end_relay()
        if self._timer is not None:
            self._timer.cancel()
