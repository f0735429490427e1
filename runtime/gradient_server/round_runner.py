"""Carries out what `Rounds` decides, and tells it what workers do: who is there, and what they are sent."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from monitoring.prometheus.gradient_server_metrics import GradientServerTotals
from runtime.errors import Parallel3DError
from runtime.gradient_server.average_frames import AverageFrames
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
from runtime.gradient_server.intake_v2 import IntakeV2
from runtime.gradient_server.rounds import Phase, Rounds
from runtime.gradient_server.sample_shares import Share
from runtime.gradient_server.settings import GradientServerSettings
from runtime.gradient_server.state_relay import StateRelay
from runtime.gradient_server.step_sum import GradientRefused, StepSum
from runtime.gradient_server.wire.frame_reader import Item
from runtime.gradient_server.wire.messages import Codec, Reason, StateWanted
from runtime.logs import logger


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was completed."""

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
    """A `Desk`: intakes tell it what has come."""

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
        """Those that are there."""
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
        """That averages are packed with, and gradients should be."""
        return Codec.ZLIB if self._settings.compression else Codec.NONE

    # Events.

    def handle(self, event: Event) -> None:
        """One after the other, also where carrying out makes new ones."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                for instruction in self.rounds.handle(self._events.popleft(), time.monotonic()):
                    self._carry_out(instruction)
                self._look_at_sum()
        except Exception as error:  # a bug: better a run that ends and says why than one that hangs
            self._log.exception("failed")
            self.rounds.phase = Phase.DONE
            self._on_finish(Finish(repr(error), Parallel3DError(f"The gradient server has a bug: {error!r}.")))
        finally:
            self._is_handling = False

    def _look_at_sum(self) -> None:
        total = self.rounds.sum
        if total is not None and total.is_complete:
            self._complete(total)
            self._events.append(Summed())

    def _complete(self, total: StepSum) -> None:
        seconds = 0.0 if self._began is None else time.monotonic() - self._began
        assert self._frames is not None
        for connection in self._participants(total):
            assert connection.voice is not None
            connection.voice.done(self._frames, total, seconds)
        self._totals.note_step(seconds)
        self.last_loss = total.loss
        record = StepRecord(total.step, total.attempt, total.shares, total.loss, total.correct, total.total, seconds)
        self._log.debug("step", step=total.step, attempt=total.attempt, loss=total.loss, seconds=round(seconds, 6))
        self._on_step(record)

    def _participants(self, total: StepSum) -> list[Connection]:
        return [connection for worker, connection in self.workers.items() if worker in total.shares]

    # What intakes tell.

    @property
    def sum(self) -> StepSum | None:
        return self.rounds.sum

    @property
    def step(self) -> int:
        return self.rounds.step

    def begun(self) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def averaged(self, total: StepSum, key: Key) -> None:
        assert self._frames is not None
        for connection in self._participants(total):
            assert connection.voice is not None
            connection.voice.average(self._frames, total, key)

    def told_loss(self, total: StepSum) -> None:
        if total.has_all_reports:
            for connection in self._participants(total):
                assert connection.voice is not None
                connection.voice.losses(total)

    def reported(self, worker: int) -> None:
        self.handle(Reported(worker))

    def left(self, worker: int, reason: str) -> None:
        connection = self.workers.pop(worker)
        self._forget_sink(worker)
        self._log.info("left", worker=worker, why=reason)
        self.handle(Left(worker, reason))
        connection.end()

    def state(self, worker: int, item: Item) -> None:
        connection = self.workers[worker]
        if not connection.asked:
            raise GradientRefused(Reason.UNEXPECTED, "a state that nobody asked for.", worker)
        if self.relay is not None and connection is self.relay_source:
            self.relay.take(item, lambda request: self.handle(StateSent(request)))

    # What is carried out.

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Open():
                self._open(instruction)
            case Average(keys, has_losses):
                if self.rounds.sum is not None:  # what followed from the same event may have ended the run
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
            if connection is not None and connection.voice is not None:
                if isinstance(connection.intake, IntakeV2):
                    connection.intake.told = total.step, total.attempt
                if worker in opened.again:
                    connection.voice.again(total, opened.why)
                else:
                    connection.voice.assign(total, share, self._settings.samples)

    def _start_relay(self, relay: Relay) -> None:
        self._end_relay()
        source = self.workers.get(relay.source)
        if source is None:
            return  # that it is lost is the next event
        sinks = {worker: self.workers[worker].outbox for worker in relay.sinks if worker in self.workers}
        self.relay = StateRelay(relay.step, relay.request, source.link, sinks)
        self.relay_source, source.asked = source, relay.request
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
        """Its link is gone. Whether it was a worker's who is needed."""
        worker = connection.worker
        if worker is None or self.workers.get(worker) is not connection:
            return False
        del self.workers[worker]
        self._forget_sink(worker)
        return True

    def _send_averages(self, total: StepSum, keys: Sequence[Key], has_losses: bool) -> None:
        for key in keys:
            self.averaged(total, key)
        if has_losses:
            self.told_loss(total)

    def _dismiss(self, worker: int, reason: Reason, detail: str) -> None:
        connection = self.workers.pop(worker, None)
        self._forget_sink(worker)
        if connection is not None and connection.voice is not None:  # else it was refused and counted already
            self._totals.rejected[str(reason)] += 1
            self._log.warning("refused", peer=connection.link.peer, worker=worker, why=detail)
            connection.voice.refuse(reason, detail)
            connection.end()

    def _set_timer(self, timer: int, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ring, timer)

    def _ring(self, timer: int) -> None:
        self.handle(TimerFired(timer, self.relay.held_up_by if self.relay is not None else ()))

    def close(self) -> None:
        """No timer shall keep it alive."""
        self._end_relay()
        if self._timer is not None:
            self._timer.cancel()
