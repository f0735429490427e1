"""One step under way on one rank: carries out the rank's program in the engine thread, action by action.

Sends never wait. A receive takes what has already arrived; while nothing has, deferred weight gradients are computed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from monitoring.events.recorder import Recorder
from parallel3d.pipeline.program import RankProgram, microbatch_of
from parallel3d.pipeline.schedules.actions import RECEIVES, Action, Kind, send_of
from parallel3d.pipeline.stage import Loss, Stage
from parallel3d.rank_mesh import Mesh
from process_groups.pipes import Message, Pipe
from runtime.errors import DeadlineExceeded, name_rank

_RECORD_BATCH = 1024  # actions; far fewer than a recorder holds, so that it can be emptied during a long pass
_RETRY_SECONDS = 0.001  # between attempts to send messages that found no room


class GradientHandler(Protocol):
    """What is done with gradients. All but `finish` and `cancel` are called in the engine thread."""

    def begin(self) -> None:
        """A step begins."""

    def last_backward(self, stage: int, *, split: bool = False) -> AbstractContextManager[None]:
        """Around a stage's last backward; `split`: around its weight part, unless some of that was done before."""

    def stage_done(self, stage: int) -> None:
        """All gradients of a stage are complete."""

    async def finish(self) -> None:
        """Returns when gradients are ready for the optimizer."""

    def cancel(self) -> None:
        """The step failed."""


class TimedAction(NamedTuple):
    """When an action ran, in seconds of time.monotonic. A receive begins when the rank starts waiting for it."""

    action: Action
    start: float
    end: float
    waited: float = 0.0
    """Seconds of it that were spent waiting for a collective."""
    cpu: float = 0.0
    """Of a computing action: seconds of the processor. Of a receive: seconds in which weight gradients were computed
    meanwhile."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """What all passes of an executor share."""

    mesh: Mesh
    program: RankProgram
    stages: Mapping[int, Stage]
    pipes: Mapping[int, Pipe]
    """By peer."""
    loss: Loss
    gradients: GradientHandler | None
    autocast: torch.dtype | None
    """The dtype of activations if it is not that of weights."""
    collective_seconds: Callable[[], float]
    """Seconds so far that the engine thread has waited for collectives inside of actions."""
    recorder: Recorder | None
    """Gets an event for each action; it knows the step."""
    calls_per_event: int
    """0 if the group records the messages itself, else 1."""


class PipelinePass:
    """One step under way. `run_forward` and `run` are for the engine thread."""

    def __init__(
        self, context: PassContext, inputs: Sequence[Any], targets: Sequence[Any], weights: Sequence[float]
    ) -> None:
        self._context, self._program, self._stages = context, context.program, context.stages
        self._pipes, self._group = context.pipes, context.mesh.pp
        self._is_forward_only = self._program.is_forward_only
        self._inputs, self._targets, self._weights = inputs, targets, weights
        self._incoming = {rank: deque(receives) for rank, receives in self._program.incoming.items()}
        self._arrived: dict[Action, list[torch.Tensor | None]] = {}
        """Messages by their receive, until an action uses them."""
        self._deferred: deque[tuple[Stage, int]] = deque()
        """Stages and microbatches whose weight part is still to come, oldest first."""
        self._losses: list[tuple[torch.Tensor, float]] = []
        """With their weights."""
        self._received_loss: torch.Tensor | None = None
        self._message_bytes = 0
        """Of the message that the current action sent or received."""
        self._worked_off = 0.0
        """Seconds of weight gradients so far that were computed inside of receives."""
        self.timed: list[TimedAction] = []
        """Actions that have ended."""
        self._moved: list[int] = []
        """Bytes that each of them sent or received."""
        self._num_recorded = 0
        self._do = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_backward,
            Kind.W: self._weight_backward,
            Kind.SEND_F: self._send_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.REDUCE_GRAD: self._reduce,
        }

    def run_forward(self) -> None:
        """All actions before the first backward."""
        self._run_until(self._program.num_forward)

    def run(self) -> None:
        """All actions that are left."""
        self._run_until(len(self._program.actions))

    @property
    def loss(self) -> float:
        """The whole pipeline's once a backward has ended; before that 0 on ranks without the last stage."""
        return float(self._loss())

    # The loop over actions.

    def _begin(self) -> None:
        for index, stage in self._stages.items():
            stage.begin(self._program.mergeable[index])
        if self._context.gradients is not None:
            self._context.gradients.begin()
        for rank, pipe in self._pipes.items():
            pipe.expect(len(self._incoming[rank]))

    def _run_until(self, end: int) -> None:
        """Up to this index, or to an action that fails."""
        if not self.timed:
            self._begin()
        try:
            with torch.no_grad():  # autograd records forwards only, so that messages can be copied as they are
                self._act(end)
            self._push_all()
        finally:
            self._record()

    def _act(self, end: int) -> None:
        """An action begins where the one before has ended, so that clocks are read once for each."""
        program, collective_seconds = self._program, self._context.collective_seconds
        cpu_clock = _stopped_clock if self._context.recorder is None else time.thread_time
        start, waited, cpu = time.monotonic(), collective_seconds(), cpu_clock()
        for at in range(len(self.timed), end):
            action, worked_off = program.actions[at], self._worked_off
            self._message_bytes = 0
            self._do[action.kind](action)
            now, waits = time.monotonic(), collective_seconds()
            used = cpu_clock() if program.reads_cpu_clock[at] else cpu
            own = self._worked_off - worked_off if action.kind in RECEIVES else used - cpu
            own = own if program.has_cpu_time[at] else 0.0
            self.timed.append(TimedAction(action, start, now, waits - waited, own))
            self._moved.append(self._message_bytes)
            start, waited, cpu = now, waits, used
            if at - self._num_recorded >= _RECORD_BATCH:
                self._record()

    def _record(self) -> None:
        """Many at once: a single record between two actions takes five times as long, because everything it needs has
        left the processor's cache."""
        recorder, calls = self._context.recorder, self._context.calls_per_event
        first, self._num_recorded = self._num_recorded, len(self.timed)
        if recorder is None:
            return
        for at in range(first, self._num_recorded):
            what, stage, microbatch = self._program.events[at]
            _, start, end, waited, cpu = self.timed[at]
            num_bytes = self._moved[at]
            recorder.record(what, recorder.step, start, end, stage, microbatch, cpu, waited, num_bytes, 0, 0, 0, calls)

    def _push_all(self) -> None:
        """Until every message is on its way."""
        pipes, deadline = self._pipes.values(), self._deadline()
        while not min([pipe.push() for pipe in pipes], default=True):  # each has its turn
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the last messages of the step were not taken in time", action="step")
            time.sleep(_RETRY_SECONDS)

    def _deadline(self) -> float:
        """Of a wait that begins now."""
        return time.monotonic() + self._group.timeout

    def _loss(self) -> torch.Tensor:
        if self._received_loss is not None:
            return self._received_loss
        device = self._group.device
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=device)
        losses, weights = zip(*self._losses, strict=True)
        return torch.stack(losses).double().view(-1).dot(torch.tensor(weights, dtype=torch.float64, device=device))

    # Computing.

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        if stage.is_first:
            given = self._inputs[microbatch]
            inputs = list(given) if isinstance(given, tuple | list) else [given]
        else:
            inputs = [each for each in self._take(Kind.RECV_F, stage.index, microbatch) if each is not None]
        with torch.set_grad_enabled(not self._is_forward_only), self._autocast():
            output = stage.forward(microbatch, inputs)
            if stage.is_last:
                loss = self._context.loss(output, self._targets[microbatch])
        if stage.is_last:
            stage.set_loss(microbatch, loss)
            self._losses.append((loss.detach(), self._weights[microbatch]))
        elif self._program.table.crosses_ranks(stage.index):
            return  # kept until it is sent
        else:
            self._arrived[Action(stage.index + 1, Kind.RECV_F, microbatch)] = [*stage.outputs(microbatch)]
        self._release_without_backward(stage, microbatch)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Around a forward; a backward uses the dtypes of its forward."""
        if self._context.autocast is None:
            return nullcontext()
        return torch.autocast(self._group.device.type, self._context.autocast)

    def _release_without_backward(self, stage: Stage, microbatch: int) -> None:
        if self._is_forward_only:
            stage.release(microbatch)

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        gradients = self._output_gradients(stage, microbatch)
        with self._around_backward(action):
            stage.backward(microbatch, gradients)
        if not self._pass_gradients_on(stage, microbatch):
            stage.release(microbatch)

    def _input_backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        stage.input_backward(microbatch, self._output_gradients(stage, microbatch))
        self._pass_gradients_on(stage, microbatch)
        self._deferred.append((stage, microbatch))

    def _weight_backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        # The handler expects every gradient of the weight part inside of this context, or none.
        with nullcontext() if stage.has_worked_off(microbatch) else self._around_backward(action):
            stage.weight_backward(microbatch)
        self._deferred.remove((stage, microbatch))

    def _around_backward(self, backward: Action) -> AbstractContextManager[None]:
        """The gradient handler's context of a stage's last B or W."""
        if self._context.gradients is None or backward not in self._program.last_backwards:
            return nullcontext()
        return self._context.gradients.last_backward(backward.stage, split=backward.kind is Kind.W)

    def _reduce(self, action: Action) -> None:
        if self._context.gradients is not None:
            self._context.gradients.stage_done(action.stage)

    def _output_gradients(self, stage: Stage, microbatch: int) -> list[torch.Tensor | None]:
        """Of the stage's outputs; on the last stage the loss's weight."""
        if stage.is_last:
            return stage.loss_gradients(microbatch, self._weights[microbatch])
        return self._take(Kind.RECV_B, stage.index, microbatch)

    def _pass_gradients_on(self, stage: Stage, microbatch: int) -> bool:
        """To the stage before, if it is on this rank; True if they have to be sent."""
        if stage.is_first:
            return False
        if self._program.table.crosses_ranks(stage.index - 1):
            return True
        self._arrived[Action(stage.index - 1, Kind.RECV_B, microbatch)] = stage.input_gradients(microbatch)
        return False

    def _take(self, kind: Kind, stage: int, microbatch: int) -> list[torch.Tensor | None]:
        return self._arrived.pop(Action(stage, kind, microbatch))

    # Sending and receiving.

    def _send_forward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        self._send(action, stage.outputs_to_copy(microbatch))
        self._release_without_backward(stage, microbatch)

    def _send_backward(self, action: Action) -> None:
        """The send comes before the release, which takes time: another stage waits for the message."""
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        loss = [self._loss()] if action in self._program.loss_sends else []
        self._send(action, stage.input_gradients(microbatch), loss)
        if (stage, microbatch) not in self._deferred:
            stage.release(microbatch)

    def _send(self, send: Action, message: Message, loss: Message = ()) -> None:
        self._pipes[self._program.other_ends[send][0]].send([*message, *loss])
        self._message_bytes = _bytes_of(message)

    def _receive(self, action: Action) -> None:
        """A peer's messages arrive in the order of its sends; those of later receives are kept."""
        rank, send = self._program.other_ends[action]
        pipe, incoming = self._pipes[rank], self._incoming[rank]
        while action not in self._arrived:
            try:
                message = pipe.receive(self._deadline(), self._meanwhile)
            except DeadlineExceeded as late:
                raise self._too_late(action, send, rank) from late
            receive = incoming.popleft()
            if send_of(receive) in self._program.loss_sends:
                self._received_loss = message.pop()
            self._arrived[receive] = message
        self._message_bytes = _bytes_of(self._arrived[action])

    def _meanwhile(self) -> float:
        """One thing to do while nothing has arrived: retry sends that found no room, then one weight gradient. Returns
        the seconds until it should be called again."""
        is_all_sent = min([pipe.push() for pipe in self._pipes.values()])
        start = time.monotonic()
        if any(stage.work_off_one(microbatch) for stage, microbatch in self._deferred):
            self._worked_off += time.monotonic() - start
            return 0.0
        return math.inf if is_all_sent else _RETRY_SECONDS

    def _too_late(self, action: Action, send: Action, rank: int) -> DeadlineExceeded:
        world_rank = self._group.ranks[rank]
        coords = self._context.mesh.topology.coords(world_rank)
        return DeadlineExceeded(
            f"{action} did not end within {self._group.timeout:g} s: {name_rank(world_rank, coords)} has not come to "
            f"{send}.",
            rank=world_rank,
            coords=coords,
            action=str(action),
        )


def _stopped_clock() -> float:
    """Instead of the processor's clock, which takes nearly a microsecond to read, when nothing is recorded."""
    return 0.0


def _bytes_of(message: Message) -> int:
    return sum(each.nbytes for each in message if each is not None)
