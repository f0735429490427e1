"""Runs this rank's column of a schedule's table: receive, compute, send, in the table's order.

The engine thread does it, from the first action to the last: one hand-over a step. Sends never wait, receives take
what has come already, and while nothing has, weight gradients that wait for their turn are worked off.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from monitoring.events.events import NO_MICROBATCH, What
from monitoring.events.recorder import Recorder
from parallel3d.gradients.reducer import farewell
from parallel3d.pipeline.schedules.actions import Action, Kind, receive_of, send_of
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation import ScheduleDeadlock, find_deadlock
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.pipeline.stage import Loss, Stage
from parallel3d.rank_mesh import Mesh
from process_groups.pipes import Message, Pipe
from runtime.errors import CommunicationError, DeadlineExceeded, GroupClosed, InvalidCall, name_rank

_OF_BACKWARDS = frozenset((Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD))
_COMPUTES = frozenset((Kind.F, Kind.B, Kind.I, Kind.W))
_RECEIVES = frozenset((Kind.RECV_F, Kind.RECV_B))
_RECORDS_AT_ONCE = 1024  # of a long pass: far less than a recorder holds, so that they can be taken meanwhile
_PAUSE = 0.001  # seconds between looks whether there is room for messages that found none


class Gradients(Protocol):
    """What becomes of gradients. All but `finish` are called in the engine thread."""

    def begin(self) -> None:
        """Of a step."""

    def last_backward(self, stage: int, *, split: bool = False) -> AbstractContextManager[None]:
        """Around a stage's last backward; `split`: around its weight part, unless some of that was done before."""

    def stage_done(self, stage: int) -> None:
        """All gradients of a stage are there."""

    async def finish(self) -> None:
        """All is done with them that has to be done before they are used."""

    def cancel(self) -> None:
        """The step failed. On the event loop."""


class Timed(NamedTuple):
    """An action as it was, in seconds of time.monotonic. A receive begins when the rank starts waiting for it."""

    action: Action
    start: float
    end: float
    waited: float = 0.0
    """Seconds of it that were spent waiting for a collective."""
    cpu: float = 0.0
    """Of a computing action: seconds of the processor. Of a receive: seconds in which weight gradients were computed
    meanwhile."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step gave on this rank."""

    loss: float
    """The whole pipeline's, on every rank."""
    timed: tuple[Timed, ...]
    """This rank's actions, in order."""
    peak_activations: dict[int, int]
    """Of each stage of this rank: the most microbatches that were kept at a time."""


class Executor:
    """One rank's part of a pipeline. Make it on the event loop, once a mesh."""

    def __init__(
        self,
        mesh: Mesh,
        table: Table,
        stages: Mapping[int, Stage],
        loss: Loss,
        *,
        gradients: Gradients | None = None,
        autocast: torch.dtype | None = None,
        waited: Callable[[], float] = lambda: 0.0,
        recorder: Recorder | None = None,
    ) -> None:
        self._mesh, self._group, self._loss, self._gradients = mesh, mesh.pp, loss, gradients
        self._recorder = recorder
        """Where each action leaves an event; it knows the step."""
        self._processor = time.thread_time if recorder is not None else _stopped_clock
        self._waited = waited
        """Seconds so far that the engine thread has waited for collectives inside of actions."""
        self._autocast = autocast
        """The type of activations where it is not that of weights."""
        self.table = table.with_communication()
        if self.table.num_ranks != mesh.pp.size:
            raise InvalidCall(f"the table is for {self.table.num_ranks} ranks, but the mesh has pp = {mesh.pp.size}.")
        if (deadlock := find_deadlock(self.table)) is not None:
            raise ScheduleDeadlock(deadlock)
        me = mesh.pp.rank
        if set(stages) != set(self.table.stages_of_rank(me)):
            raise InvalidCall(
                f"pipeline rank {me} has the stages {list(self.table.stages_of_rank(me))}, but modules for "
                f"{sorted(stages)} are given."
            )
        self.stages, self._column = dict(stages), self.table.columns[me]
        self._incoming = {
            rank: self._received_from(column, me) for rank, column in enumerate(self.table.columns) if rank != me
        }
        """From each peer, what its messages are, in order."""
        peers = [rank for rank in self._incoming if self._incoming[rank] or self._received_from(self._column, rank)]
        self._pipes: dict[int, Pipe] = {rank: mesh.pp.pipe(rank) for rank in peers}
        self._ends = {action: end for action in self._column if (end := self._other_end(action)) is not None}
        """Of each send and receive: the peer, and the receive or send there."""
        self._events = [_what_and_where(action) for action in self._column]
        is_compute = [action.kind in _COMPUTES for action in self._column]
        self._has_cpu = [action.kind in _COMPUTES | _RECEIVES for action in self._column]
        self._is_near_compute = [any(near) for near in zip(is_compute, [*is_compute[1:], True], strict=True)]
        """By action: whether the processor's clock is read after it, for its own sake or for that of the next."""
        self._calls = 0 if any(pipe.is_recorded_by_group for pipe in self._pipes.values()) else 1
        """Of each action's event."""
        kinds = [action.kind for action in self._column]
        self._num_forward = next((at for at, kind in enumerate(kinds) if kind in _OF_BACKWARDS), len(kinds))
        """Actions up to the first backward."""
        self._is_forward_only = self._num_forward == len(kinds)
        last = {action.stage: action for action in self._column if action.kind in (Kind.B, Kind.W)}
        self._last_backwards = frozenset(last.values())
        self._gathered = {stage: self._all_but_last_two(stage) for stage in self.stages}
        last_sends = {each.stage: each for column in self.table.columns for each in column if each.kind is Kind.SEND_B}
        self._loss_sends = frozenset(last_sends.values())
        """What the loss goes along with, from the last stage to the first: when a stage sends its last gradients, the
        last stage has all losses, and the others have the gradients that they came with."""

    def _all_but_last_two(self, stage: int) -> frozenset[int]:
        """A stage's microbatches whose weight gradients may wait for later ones'. The last one finds nothing left to do
        but its own part, for the step's end waits for it."""
        order = [_microbatch(each) for each in self._column if each.stage == stage and each.kind in (Kind.B, Kind.W)]
        return frozenset(order[:-2])

    def _received_from(self, column: Sequence[Action], rank: int) -> list[Action]:
        """The receives in which a column's sends to a rank end, in order."""
        receives = (receive for action in column if (receive := receive_of(action)) is not None)
        return [receive for receive in receives if self.table.rank_of_stage[receive.stage] == rank]

    def _other_end(self, action: Action) -> tuple[int, Action] | None:
        other = receive_of(action) or send_of(action)
        return None if other is None else (self.table.rank_of_stage[other.stage], other)

    async def step(self, inputs: Sequence[Any], targets: Sequence[Any], weights: Sequence[float] | None = None) -> Step:
        """Forward and backward of all microbatches; gradients are added to the parameters' `.grad`.

        The step's loss is the microbatches' losses, each times its weight: one over their number, if not given.
        """
        begun = self.begin(inputs, targets, weights)
        await begun.finish()
        loss = await self._share_loss(begun.loss) if self._is_forward_only else begun.loss
        return Step(loss, tuple(begun.timed), self._peaks())

    def begin(self, inputs: Sequence[Any], targets: Sequence[Any], weights: Sequence[float] | None = None) -> Begun:
        """A step that is carried out piece by piece."""
        num = self.table.microbatches
        weights = [1.0 / num] * num if weights is None else weights
        for name, given in (("inputs", inputs), ("targets", targets), ("weights", weights)):
            if len(given) != num:
                raise InvalidCall(f"step: {len(given)} {name} for {num} microbatches.")
        if self._group.has_failed:
            raise GroupClosed("step: an earlier step failed, so messages of it may be on their way. Enter a new mesh.")
        return Begun(self, inputs, targets, weights)

    async def carry_out(self, function: Callable[[], None], *, finish: bool) -> None:
        """In the engine thread. Whatever goes wrong closes the mesh: messages of this step would be taken for the next
        one's."""
        computing = asyncio.ensure_future(self._mesh.compute(function))
        try:
            await asyncio.shield(computing)
            if finish and self._gradients is not None:
                await self._gradients.finish()
        except BaseException as error:
            self._mesh.abort(error if isinstance(error, CommunicationError) else farewell(self._mesh, error))
            seconds = self._group.timeout
            computing.add_done_callback(_seen)
            try:
                await asyncio.wait([computing], timeout=seconds)  # it ends soon, for its groups are closed
            finally:
                if self._gradients is not None:
                    self._gradients.cancel()
            if not computing.done():
                error.add_note(
                    f"The engine thread still computes, {seconds:g} s after the step was given up: it ends when the "
                    "forward or backward that it is in does."
                )
            raise

    async def measured(self, timed: Sequence[Timed]) -> Measured:
        """A step's times on all ranks, which have to be on one host: clocks differ from host to host. Every rank of the
        pipeline has to ask."""
        hosts = {self._mesh.hosts[rank] for rank in self._group.ranks}
        if len(hosts) > 1:
            raise InvalidCall(f"measured: the pipeline's ranks are on {len(hosts)} hosts, whose clocks differ.")
        most = max(map(len, self.table.columns))
        mine = torch.zeros(1, most, 4, dtype=torch.float64, device=self._group.device)
        mine[0, : len(timed)] = torch.tensor([each[1:] for each in timed], dtype=torch.float64)
        rows = (await self._group.all_gather(mine)).tolist()
        times = [row[: len(column)] for row, column in zip(rows, self.table.columns, strict=True)]
        return Measured.of(self.table, times)

    async def _share_loss(self, loss: float) -> float:
        if self._group.size == 1:
            return loss
        shared = torch.tensor([loss], dtype=torch.float64, device=self._group.device)
        await self._group.broadcast(shared, root=self.table.rank_of_stage[-1])
        return float(shared)

    def around(self, backward: Action) -> AbstractContextManager[None]:
        """What has to be around a backward, or around its weight part."""
        if self._gradients is None or backward not in self._last_backwards:
            return nullcontext()
        return self._gradients.last_backward(backward.stage, split=backward.kind is Kind.W)

    def autocasting(self) -> AbstractContextManager[Any]:
        """Around a forward; a backward takes the types that its forward had."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._group.device.type, self._autocast)

    def _peaks(self) -> dict[int, int]:
        return {index: stage.peak_activations for index, stage in self.stages.items()}


class Begun:
    """One step under way."""

    def __init__(
        self,
        executor: Executor,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        weights: Sequence[float],
    ) -> None:
        self._executor, self._stages, self._table = executor, executor.stages, executor.table
        self._inputs, self._targets, self._weights = inputs, targets, weights
        self._incoming = {rank: deque(receives) for rank, receives in executor._incoming.items()}
        self._here: dict[Action, list[torch.Tensor | None]] = {}
        """What has come, by the receive that waits for it."""
        self._unfinished: deque[tuple[Stage, int]] = deque()
        """Whose weight part is still to come, oldest first."""
        self._losses: list[tuple[torch.Tensor, float]] = []
        """With their weights."""
        self._told_loss: torch.Tensor | None = None
        self._num_bytes = 0
        """Of the message that was sent or received last."""
        self._worked_off = 0.0
        """Seconds of weight gradients so far, while nothing had come."""
        self.timed: list[Timed] = []
        self._num_recorded = 0
        self._moved: list[int] = []
        """Bytes of each of them that were sent or received."""
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

    async def forward(self) -> None:
        """Up to the first backward."""
        await self._executor.carry_out(self._first_part, finish=False)

    async def finish(self) -> None:
        """Whatever is left."""
        await self._executor.carry_out(self._rest, finish=True)

    # In the engine thread.

    def _first_part(self) -> None:
        self._begin()
        self._carry_out(self._executor._num_forward)

    def _rest(self) -> None:
        if not self.timed:
            self._begin()
        self._carry_out(len(self._executor._column))

    def _begin(self) -> None:
        for index, stage in self._stages.items():
            stage.begin(self._executor._gathered[index])
        if self._executor._gradients is not None:
            self._executor._gradients.begin()
        for rank, pipe in self._executor._pipes.items():
            pipe.expect(len(self._incoming[rank]))

    def _carry_out(self, end: int) -> None:
        """Up to this place of the column, or to an action that fails."""
        try:
            with torch.no_grad():  # only forwards are followed by autograd, so that messages can be copied as they are
                self._act(end)
            self._push_all()
        finally:
            self._record()

    def _act(self, end: int) -> None:
        """An action begins where the one before has ended, so that clocks are read once for each."""
        executor, waited_for_peers, processor = self._executor, self._executor._waited, self._executor._processor
        start, waited, cpu = time.monotonic(), waited_for_peers(), processor()
        for at in range(len(self.timed), end):
            action, worked_off = executor._column[at], self._worked_off
            self._num_bytes = 0
            self._do[action.kind](action)
            now, waits = time.monotonic(), waited_for_peers()
            used = processor() if executor._is_near_compute[at] else cpu
            own = self._worked_off - worked_off if action.kind in _RECEIVES else used - cpu
            self.timed.append(Timed(action, start, now, waits - waited, own if executor._has_cpu[at] else 0.0))
            self._moved.append(self._num_bytes)
            start, waited, cpu = now, waits, used
            if at - self._num_recorded >= _RECORDS_AT_ONCE:
                self._record()

    def _record(self) -> None:
        """Many at once: a single record between two actions takes five times as long, with all that it needs out of the
        processor's cache."""
        recorder, calls = self._executor._recorder, self._executor._calls
        first, self._num_recorded = self._num_recorded, len(self.timed)
        if recorder is None:
            return
        for at in range(first, self._num_recorded):
            what, stage, microbatch = self._executor._events[at]
            _, start, end, waited, cpu = self.timed[at]
            num_bytes = self._moved[at]
            recorder.record(what, recorder.step, start, end, stage, microbatch, cpu, waited, num_bytes, 0, 0, 0, calls)

    def _push_all(self) -> None:
        """Until everything is on its way."""
        pipes, deadline = self._executor._pipes.values(), self._deadline()
        while not min([pipe.push() for pipe in pipes], default=True):  # each has its turn
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the last messages of the step were not taken in time", action="step")
            time.sleep(_PAUSE)

    def _deadline(self) -> float:
        """Of a wait that begins now."""
        return time.monotonic() + self._executor._group.timeout

    @property
    def loss(self) -> float:
        """Of the whole pipeline once a backward has ended; before that 0 on ranks that don't have the last stage."""
        return float(self._loss())

    def _loss(self) -> torch.Tensor:
        if self._told_loss is not None:
            return self._told_loss
        device = self._executor._group.device
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=device)
        losses, weights = zip(*self._losses, strict=True)
        return torch.stack(losses).double().view(-1).dot(torch.tensor(weights, dtype=torch.float64, device=device))

    # Computing.

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], _microbatch(action)
        if stage.is_first:
            given = self._inputs[microbatch]
            inputs = list(given) if isinstance(given, tuple | list) else [given]
        else:
            inputs = [each for each in self._taken(Kind.RECV_F, stage.index, microbatch) if each is not None]
        with torch.set_grad_enabled(not self._executor._is_forward_only), self._executor.autocasting():
            output = stage.forward(microbatch, inputs)
            if stage.is_last:
                loss = self._executor._loss(output, self._targets[microbatch])
        if stage.is_last:
            stage.set_loss(microbatch, loss)
            self._losses.append((loss.detach(), self._weights[microbatch]))
        elif self._table.crosses_ranks(stage.index):
            return  # kept until it is sent
        else:
            self._here[Action(stage.index + 1, Kind.RECV_F, microbatch)] = [*stage.outputs(microbatch)]
        self._let_go_if_no_backward_comes(stage, microbatch)

    def _let_go_if_no_backward_comes(self, stage: Stage, microbatch: int) -> None:
        if self._executor._is_forward_only:
            stage.let_go(microbatch)

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], _microbatch(action)
        gradients = self._gradients(stage, microbatch)
        with self._executor.around(action):
            stage.backward(microbatch, gradients)
        if not self._pass_gradients_on(stage, microbatch):
            stage.let_go(microbatch)

    def _input_backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], _microbatch(action)
        stage.input_backward(microbatch, self._gradients(stage, microbatch))
        self._pass_gradients_on(stage, microbatch)
        self._unfinished.append((stage, microbatch))

    def _weight_backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], _microbatch(action)
        # Who counts what is added in here counts on all of it.
        with nullcontext() if stage.has_worked_off(microbatch) else self._executor.around(action):
            stage.weight_backward(microbatch)
        self._unfinished.remove((stage, microbatch))

    def _reduce(self, action: Action) -> None:
        if self._executor._gradients is not None:
            self._executor._gradients.stage_done(action.stage)

    def _gradients(self, stage: Stage, microbatch: int) -> list[torch.Tensor | None]:
        """Of the stage's outputs, or of its loss: that is the loss's weight."""
        if stage.is_last:
            return stage.loss_gradients(microbatch, self._weights[microbatch])
        return self._taken(Kind.RECV_B, stage.index, microbatch)

    def _pass_gradients_on(self, stage: Stage, microbatch: int) -> bool:
        """To the stage before, if that is here; True where they are to be sent."""
        if stage.is_first:
            return False
        if self._table.crosses_ranks(stage.index - 1):
            return True
        self._here[Action(stage.index - 1, Kind.RECV_B, microbatch)] = stage.input_gradients(microbatch)
        return False

    def _taken(self, kind: Kind, stage: int, microbatch: int) -> list[torch.Tensor | None]:
        return self._here.pop(Action(stage, kind, microbatch))

    # Sending and receiving.

    def _send_forward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], _microbatch(action)
        self._send(action, stage.outputs_to_copy(microbatch))
        self._let_go_if_no_backward_comes(stage, microbatch)

    def _send_backward(self, action: Action) -> None:
        """First the send, for which another stage waits; then what takes time here."""
        stage, microbatch = self._stages[action.stage], _microbatch(action)
        loss = [self._loss()] if action in self._executor._loss_sends else []
        self._send(action, stage.input_gradients(microbatch), loss)
        if (stage, microbatch) not in self._unfinished:
            stage.let_go(microbatch)

    def _send(self, send: Action, message: Message, loss: Message = ()) -> None:
        self._executor._pipes[self._executor._ends[send][0]].send([*message, *loss])
        self._num_bytes = _bytes_of(message)

    def _receive(self, action: Action) -> None:
        """Messages of a peer come in its order; those that are for later are put aside."""
        rank, send = self._executor._ends[action]
        pipe, incoming = self._executor._pipes[rank], self._incoming[rank]
        while action not in self._here:
            try:
                message = pipe.receive(self._deadline(), self._meanwhile)
            except DeadlineExceeded as late:
                raise self._too_late(action, send, rank) from late
            receive = incoming.popleft()
            if send_of(receive) in self._executor._loss_sends:
                self._told_loss = message.pop()
            self._here[receive] = message
        self._num_bytes = _bytes_of(self._here[action])

    def _meanwhile(self) -> float:
        """While nothing has come: send on what found no room, and a bit of what waits for its turn. Seconds until there
        is more to do."""
        is_on_its_way = min([pipe.push() for pipe in self._executor._pipes.values()])
        start = time.monotonic()
        if any(stage.work_off_one(microbatch) for stage, microbatch in self._unfinished):
            self._worked_off += time.monotonic() - start
            return 0.0
        return math.inf if is_on_its_way else _PAUSE

    def _too_late(self, action: Action, send: Action, rank: int) -> DeadlineExceeded:
        group = self._executor._group
        world_rank = group.ranks[rank]
        coords = self._executor._mesh.topology.coords(world_rank)
        return DeadlineExceeded(
            f"{action} did not end within {group.timeout:g} s: {name_rank(world_rank, coords)} has not come to {send}.",
            rank=world_rank,
            coords=coords,
            action=str(action),
        )


def _stopped_clock() -> float:
    """A look at the processor's own clock takes nearly a microsecond, which nobody pays who does not record."""
    return 0.0


def _seen(computing: asyncio.Future[None]) -> None:
    """Asyncio complains about errors that nobody looked at; what became of a step that was given up is no news."""
    if not computing.cancelled():
        computing.exception()


def _what_and_where(action: Action) -> tuple[int, int, int]:
    """As an event has it."""
    microbatch = NO_MICROBATCH if action.microbatch is None else action.microbatch
    return What[action.kind].value, action.stage, microbatch


def _bytes_of(message: Message) -> int:
    return sum(each.nbytes for each in message if each is not None)


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
