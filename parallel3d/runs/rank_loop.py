"""A rank's part of a run: makes the steps, tells what they were, and does what the run's owner wishes between them."""

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

from parallel3d.config import RunConfig, load_config
from parallel3d.rank_mesh import Mesh
from parallel3d.runs.clock_offsets import clock_offset
from parallel3d.runs.commands import Wish, Wishes
from parallel3d.runs.event_sender import EventSender
from parallel3d.runs.folder import write_span_file
from parallel3d.runs.gathering import Gathering
from parallel3d.runs.last_steps import LastSteps
from parallel3d.runs.rank_endpoint import serving_rank
from runtime.control import RankControl, rank_control
from runtime.cores import num_cores
from runtime.errors import InvalidCall, NonFiniteGradient
from runtime.loop import run

if TYPE_CHECKING:
    from parallel3d.training.coordinator import Coordinator
    from parallel3d.training.performance import TrainStep

MakeCoordinator = Callable[[RunConfig], AbstractAsyncContextManager["Coordinator"]]
_MEMORY_SECONDS = 5.0  # between looks: the kernel walks all pages for one
_FLUSH_SECONDS = 5.0
_MOST_UNSENT = 100_000  # messages


class Owner(Protocol):
    """Whoever the rank works for."""

    @property
    def wish(self) -> Wish:
        """What is wished now; only rank 0's counts."""

    @property
    def is_behind(self) -> bool:
        """Whether what it was told before still waits to be sent."""

    def send(self, kind: str, **fields: object) -> None:
        """Tell it something; never waits."""


class SupervisorOwner:
    """The process that started the ranks, at the other end of the control channel."""

    def __init__(self, control: RankControl) -> None:
        self.wish = Wish()
        self._control = control
        self._unsent: deque[tuple[str, dict[str, object]]] = deque(maxlen=_MOST_UNSENT)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control.fd, self._hear)

    def _hear(self) -> None:
        for message in self._control.messages():
            match message:
                case {"kind": "wish", "number": int(number), "stops": bool(stops), "learning_rate": rate}:
                    self.wish = Wish(number, stops, None if rate is None else float(rate))
        if not self._control.is_open:
            self._loop.remove_reader(self._control.fd)

    @property
    def is_behind(self) -> bool:
        self._push()
        return bool(self._unsent)

    def send(self, kind: str, **fields: object) -> None:
        """What finds no room, because the supervisor is busy, is sent with the next."""
        self._unsent.append((kind, fields))
        self._push()

    def _push(self) -> None:
        while self._unsent and self._control.send(self._unsent[0][0], **self._unsent[0][1]):
            self._unsent.popleft()

    async def close(self) -> None:
        """Send what is left, within some seconds."""
        self._loop.remove_reader(self._control.fd)
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self._unsent and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            self._push()


async def train(coordinator: Coordinator, owner: Owner, last: LastSteps, gathering: Gathering | None = None) -> None:
    """All steps, or as many as the owner wishes. gathering: where ranks have to bring together what they tell."""
    mesh = coordinator.mesh
    steps = Steps(coordinator, owner, last, gathering)
    owner.send("clock", offset=await clock_offset(mesh))
    owner.send("ready", **facts_of(coordinator))
    with sending_events(coordinator, owner):
        # Left early, it shall stop loading now and not when the garbage collector comes by.
        async with serving_rank(coordinator, owner), aclosing(coordinator.batches()) as batches:
            async for batch in batches:
                await steps.make(batch)
                if steps.wish.stops:
                    break
    await steps.finish()


@contextmanager
def sending_events(coordinator: Coordinator, owner: Owner) -> Iterator[None]:
    """Also the last ones, however it ends."""
    mesh, recorder = coordinator.mesh, coordinator.recorder
    if recorder is None:
        yield
        return
    sender = EventSender(recorder, owner, lambda: mesh.is_computing, coordinator.queue)
    sender.start()
    try:
        yield
    finally:
        sender.stop()


def facts_of(coordinator: Coordinator) -> dict[str, object]:
    mesh = coordinator.mesh
    return {
        "device": _device_name(mesh),
        "parameters": coordinator.performance().parameters,
        "host": mesh.hosts[mesh.rank],
        "num_cores": num_cores(),
    }


class Steps:
    """Makes each step, and tells the owner of it."""

    def __init__(
        self, coordinator: Coordinator, owner: Owner, last: LastSteps, gathering: Gathering | None = None
    ) -> None:
        self._coordinator, self._mesh, self._owner, self._last = coordinator, coordinator.mesh, owner, last
        self._gathering, self._wishes = gathering, Wishes(coordinator.mesh)
        self._num_made = 0
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self.wish = Wish()

    async def make(self, batch: Any) -> None:
        """The next step, with what goes on beside it."""
        wish, gathering = self._owner.wish, self._gathering
        if gathering is not None:
            gathering.begin(self.wish.room)  # first, or one that begins now would be wished for again
            wish = wish._replace(room=gathering.wished_room)
        self._wishes.tell(wish)
        step = await self._train(batch)
        agreed = await self._wishes.agreed()
        if gathering is not None:
            await gathering.end()
        self.made(step)
        self.follow(agreed, step.step + 1)

    async def _train(self, batch: Any) -> TrainStep:
        try:
            return await self._coordinator.train_step(batch)
        except NonFiniteGradient:
            if self._mesh.rank == 0:  # all ranks know
                self._owner.send("nonfinite", step=self._num_made)
            raise

    def made(self, step: TrainStep) -> None:
        """A step has ended just now."""
        self._num_made += 1
        self._last.add(step)
        if self._mesh.rank == 0:  # for all: what its own time went into, each rank tells by its events
            self._owner.send(
                "step",
                step=step.step,
                loss=step.loss,
                grad_norm=step.grad_norm,
                learning_rate=step.learning_rate,
                tokens=step.tokens,
                seconds=step.ended - step.began,
                bandwidth=step.all_reduce_bandwidth,
            )
        if step.ended - self._looked > _MEMORY_SECONDS:
            self._looked = step.ended
            self._looking = asyncio.create_task(self._note_memory())

    def follow(self, wish: Wish, first: int) -> None:
        """Do what all ranks have agreed on, from step `first` on."""
        if wish.learning_rate != self.wish.learning_rate:
            self._coordinator.learning_rate = wish.learning_rate
        is_new, self.wish = wish.number != self.wish.number, wish
        if is_new and self._mesh.rank == 0:
            self._owner.send("agreed", number=wish.number, step=first, learning_rate=wish.learning_rate)

    async def _note_memory(self) -> None:
        """In a thread, while the next step is under way: it takes some milliseconds."""
        found = await asyncio.to_thread(used_memory, self._mesh.world.device)
        if found is not None:
            self._owner.send("memory", bytes=found, kinds=self._coordinator.memory())

    async def finish(self) -> None:
        """After the last step."""
        if self._gathering is not None:
            await self._gathering.close()
        if self._looking is not None:
            await self._looking
        await self._note_memory()


def used_memory(device: torch.device) -> int | None:
    """Bytes of this process, what ranks share divided between them; on a GPU the most that was allocated there."""
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
    """One rank of a run that another process supervises and writes the folder of."""
    control = rank_control()
    if control is None:
        raise InvalidCall("a rank of a run is started by `parallel3d run`.")
    config = load_config(folder / "config.yaml", environ={})  # the environment has had its say already
    owner = SupervisorOwner(control)
    try:
        async with make(config) as coordinator:
            last = LastSteps(coordinator.mesh, coordinator.recorder)
            try:
                await train(coordinator, owner, last)
            finally:
                write_span_file(folder, coordinator.mesh.rank, last.spans())
    finally:
        await owner.close()


def main(make: MakeCoordinator | None = None) -> None:
    """A rank that `parallel3d run` has started. The argument is the run's folder."""
    if make is None:
        from parallel3d.training.coordinator import Coordinator

        make = Coordinator.from_config
    maker, folder = make, Path(sys.argv[1])
    run(lambda: train_for_supervisor(folder, maker))


if __name__ == "__main__":
    main()
