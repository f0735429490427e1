"""A rank's part of a run: makes the steps, reports them, and applies commands between them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from monitoring.events.event_spans import spans_of
from monitoring.events.events import unpack
from monitoring.events.recorder import Recorder
from monitoring.events.trace import Span
from parallel3d.config import RunConfig, load_config
from parallel3d.rank_mesh import Mesh
from parallel3d.runs.commands import Command
from parallel3d.runs.endpoint import serving_rank
from parallel3d.runs.event_sender import EventSender
from parallel3d.runs.folder import write_span_file
from parallel3d.runs.rank_exchange import CommandBroadcast, ReportGathering, clock_offset
from runtime.control import RankControl, rank_control
from runtime.cores import num_cores
from runtime.errors import InvalidCall, NonFiniteGradient
from runtime.loop import run

if TYPE_CHECKING:
    from parallel3d.training.coordinator import Coordinator
    from parallel3d.training.performance import TrainStep

MakeCoordinator = Callable[[RunConfig], AbstractAsyncContextManager["Coordinator"]]
_MEMORY_SECONDS = 5.0  # between measurements: the kernel walks all pages for one
_FLUSH_SECONDS = 5.0
_MAX_UNSENT = 100_000  # messages
TRACE_STEPS = 3  # without a configuration


class Reporter(Protocol):
    """Where a rank sends its messages, and has its commands from."""

    @property
    def command(self) -> Command:
        """The newest command; only rank 0's counts."""

    @property
    def is_behind(self) -> bool:
        """Whether earlier messages still wait to be sent."""

    def send(self, kind: str, **fields: object) -> None:
        """Queue a message; never waits."""


class SupervisorReporter:
    """Reports to the process that started the ranks, over the control channel."""

    def __init__(self, control: RankControl) -> None:
        self.command = Command()
        self._control = control
        self._unsent: deque[tuple[str, dict[str, object]]] = deque(maxlen=_MAX_UNSENT)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control.fd, self._receive)

    def _receive(self) -> None:
        for message in self._control.messages():
            match message:
                case {"kind": "command", "number": int(number), "stops": bool(stops), "learning_rate": rate}:
                    self.command = Command(number, stops, None if rate is None else float(rate))
        if not self._control.is_open:
            self._loop.remove_reader(self._control.fd)

    @property
    def is_behind(self) -> bool:
        self._push()
        return bool(self._unsent)

    def send(self, kind: str, **fields: object) -> None:
        """What a busy supervisor does not take now is sent with the next message."""
        self._unsent.append((kind, fields))
        self._push()

    def _push(self) -> None:
        while self._unsent and self._control.send(self._unsent[0][0], **self._unsent[0][1]):
            self._unsent.popleft()

    async def close(self) -> None:
        """Send what is left, for at most 5 seconds."""
        self._loop.remove_reader(self._control.fd)
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self._unsent and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            self._push()


class LastSteps:
    """The last steps of a rank as spans of a trace, from the events that its recorder still has."""

    def __init__(self, mesh: Mesh, recorder: Recorder | None) -> None:
        """recorder: None gives no spans."""
        self._mesh, self._recorder = mesh, recorder
        num_steps = TRACE_STEPS if mesh.config is None else mesh.config.monitoring.trace_steps
        self._facts: deque[tuple[int, dict[str, Any]]] = deque(maxlen=num_steps)

    def add(self, step: TrainStep) -> None:
        """A step that has just ended."""
        facts = {"loss": step.loss, "tokens": step.tokens, "learning_rate": step.learning_rate}
        self._facts.append((step.step, facts))

    def spans(self, offset: float = 0.0) -> Iterator[Span]:
        """Of the last steps, with `offset` added to this rank's times."""
        if self._recorder is None or not self._facts:
            return
        facts = dict(self._facts)
        dp, tp, _ = self._mesh.coords
        events = (event for event in unpack(self._recorder.latest()) if event.step >= min(facts))
        yield from spans_of(events, f"{dp}.{tp}", facts, offset)


async def train(
    coordinator: Coordinator, reporter: Reporter, last: LastSteps, gathering: ReportGathering | None = None
) -> None:
    """Make all steps, or until a command stops them. gathering: for ranks without a supervisor."""
    mesh = coordinator.mesh
    steps = Steps(coordinator, reporter, last, gathering)
    reporter.send("clock", offset=await clock_offset(mesh))
    reporter.send("ready", **facts_of(coordinator))
    with sending_events(coordinator, reporter):
        # aclosing: after an early end, loading stops now and not at the next garbage collection.
        async with serving_rank(coordinator, reporter), aclosing(coordinator.batches()) as batches:
            async for batch in batches:
                await steps.make(batch)
                if steps.command.stops:
                    break
    await steps.finish()


@contextmanager
def sending_events(coordinator: Coordinator, reporter: Reporter) -> Iterator[None]:
    """Send the recorder's events meanwhile, and what is left of them at the end."""
    mesh, recorder = coordinator.mesh, coordinator.recorder
    if recorder is None:
        yield
        return
    sender = EventSender(recorder, reporter, lambda: mesh.is_computing, coordinator.queue)
    sender.start()
    try:
        yield
    finally:
        sender.stop()


def facts_of(coordinator: Coordinator) -> dict[str, object]:
    """The fields of a rank's `ready` message."""
    mesh = coordinator.mesh
    return {
        "device": _device_name(mesh),
        "parameters": coordinator.performance().parameters,
        "host": mesh.hosts[mesh.rank],
        "num_cores": num_cores(),
    }


class Steps:
    """Makes the steps of one rank, and reports each."""

    def __init__(
        self, coordinator: Coordinator, reporter: Reporter, last: LastSteps, gathering: ReportGathering | None = None
    ) -> None:
        self._coordinator, self._mesh, self._reporter, self._last = coordinator, coordinator.mesh, reporter, last
        self._gathering, self._broadcast = gathering, CommandBroadcast(coordinator.mesh)
        self._num_made = 0
        self._memory_at = float("-inf")
        self._measuring: asyncio.Task[None] | None = None
        self.command = Command()
        """The one that all ranks apply now."""

    async def make(self, batch: Any) -> None:
        """Make the next step, and exchange commands and reports beside it."""
        command, gathering = self._reporter.command, self._gathering
        if gathering is not None:
            gathering.begin(self.command.report_bytes)  # before due_bytes, which is 0 while a gathering is under way
            command = command._replace(report_bytes=gathering.due_bytes)
        self._broadcast.begin(command)
        step = await self._train(batch)
        received = await self._broadcast.end()
        if gathering is not None:
            await gathering.end()
        self._report(step)
        self._apply(received, step.step + 1)

    async def _train(self, batch: Any) -> TrainStep:
        try:
            return await self._coordinator.train_step(batch)
        except NonFiniteGradient:
            if self._mesh.rank == 0:  # all ranks raise the same
                self._reporter.send("nonfinite", step=self._num_made)
            raise

    def _report(self, step: TrainStep) -> None:
        self._num_made += 1
        self._last.add(step)
        if self._mesh.rank == 0:  # the same on all ranks; what a rank's time went into is in its events
            self._reporter.send(
                "step",
                step=step.step,
                loss=step.loss,
                grad_norm=step.grad_norm,
                learning_rate=step.learning_rate,
                tokens=step.tokens,
                seconds=step.ended - step.began,
                bandwidth=step.all_reduce_bandwidth,
            )
        if step.ended - self._memory_at > _MEMORY_SECONDS:
            self._memory_at = step.ended
            self._measuring = asyncio.create_task(self._report_memory())

    def _apply(self, command: Command, first: int) -> None:
        """From step `first` on, which is the same on all ranks."""
        if command.learning_rate != self.command.learning_rate:
            self._coordinator.learning_rate = command.learning_rate
        is_new, self.command = command.number != self.command.number, command
        if is_new and self._mesh.rank == 0:
            self._reporter.send("applied", number=command.number, step=first, learning_rate=command.learning_rate)

    async def _report_memory(self) -> None:
        """Measures in a thread, while the next step is under way: it takes some milliseconds."""
        found = await asyncio.to_thread(used_memory, self._mesh.world.device)
        if found is not None:
            self._reporter.send("memory", bytes=found, kinds=self._coordinator.memory())

    async def finish(self) -> None:
        """After the last step: report what is left."""
        if self._gathering is not None:
            await self._gathering.close()
        if self._measuring is not None:
            await self._measuring
        await self._report_memory()


def used_memory(device: torch.device) -> int | None:
    """Bytes of this process, with its part of what ranks share; on a GPU the peak that was allocated there."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def _device_name(mesh: Mesh) -> str:
    device = mesh.world.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


async def train_for_supervisor(folder: Path, make: MakeCoordinator) -> None:
    """Run one rank of a run that another process supervises. folder: the run's, which has its configuration."""
    control = rank_control()
    if control is None:
        raise InvalidCall("a rank of a run is started by `parallel3d run`.")
    config = load_config(folder / "config.yaml", environ={})  # it has the environment's overrides already
    reporter = SupervisorReporter(control)
    try:
        async with make(config) as coordinator:
            last = LastSteps(coordinator.mesh, coordinator.recorder)
            try:
                await train(coordinator, reporter, last)
            finally:
                write_span_file(folder, coordinator.mesh.rank, last.spans())
    finally:
        await reporter.close()


def main(make: MakeCoordinator | None = None) -> None:
    """The program of a rank that a supervisor starts; its argument is the run's folder."""
    if make is None:
        from parallel3d.training.coordinator import Coordinator

        make = Coordinator.from_config
    maker, folder = make, Path(sys.argv[1])
    run(lambda: train_for_supervisor(folder, maker))


if __name__ == "__main__":
    main()
