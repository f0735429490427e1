"""A rank of a run without a supervisor, as under torchrun or SLURM: rank 0 gathers what all tell, and writes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from monitoring.analysis.facts import Status
from monitoring.events.trace import Span
from monitoring.messages import RunStep, receive
from parallel3d.config import RunConfig
from parallel3d.planning.preflight import ModelFacts
from parallel3d.rank_mesh import Mesh
from parallel3d.runs.clock_offsets import clock_offset
from parallel3d.runs.commands import Wish
from parallel3d.runs.folder import RunFolder
from parallel3d.runs.gathering import Gathering, Outbox, read
from parallel3d.runs.last_steps import LastSteps
from parallel3d.runs.monitor import Watch, complete
from parallel3d.runs.rank_loop import MakeCoordinator, train
from parallel3d.runs.record import RunError, RunRecord
from process_groups.group import Group
from process_groups.topology import Topology
from runtime.control import Message
from runtime.errors import CommunicationError, DeadlineExceeded, culprit_of, name_rank, notes_of


class RankOwner:
    """A rank that works for itself. Rank 0 has the run's folder, and hears what all others tell."""

    def __init__(
        self,
        rank: int,
        config: RunConfig,
        facts: ModelFacts,
        folder: RunFolder | None,
        on_step: Callable[[RunRecord, RunStep], None],
        make_watch: Callable[[RunRecord], Watch] | None = None,
    ) -> None:
        """make_watch: on rank 0, where somebody looks on."""
        self.wish = Wish()
        self.record = RunRecord(config, facts)
        self.spans: dict[int, list[Span]] = {}
        self._rank, self._folder, self._on_step, self._make_watch = rank, folder, on_step, make_watch
        self._watch: Watch | None = None
        self._outbox = Outbox()
        self._topology: Topology | None = None

    @property
    def is_behind(self) -> bool:
        return self._outbox.is_behind

    @property
    def bubble(self) -> float | None:
        """The ranks' mean, of the latest step of which it is known; only rank 0 knows."""
        return self._watch.bubble if self._watch is not None else None

    def send(self, kind: str, **fields: object) -> None:
        if self._rank:
            self._outbox.put(kind, fields)
        self._hear(self._rank, {"kind": kind, **fields})

    def _hear(self, rank: int, message: Message) -> None:
        """Of this rank; on rank 0, of all."""
        report = receive(rank, message)
        self.record.take(rank, report)
        if isinstance(report, RunStep) and self._folder is not None:
            self._folder.event("step", **report.to_json())
            self._on_step(self.record, report)
        if self._watch is not None:
            with suppress(Exception):  # whoever looks on must not end a run
                self._watch.take(rank, report)

    async def work(self, make: MakeCoordinator) -> None:
        """All of the run; the folder is complete then, also when it fails."""
        try:
            if self._make_watch is not None:
                self._watch = self._make_watch(self.record)
            await self._train(make)
            self.record.status = Status.COMPLETED
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.record.status = Status.INTERRUPTED
            raise
        except Exception as error:
            hung = isinstance(error, DeadlineExceeded)
            self.record.status = Status.HUNG if hung else Status.FAILED
            self.record.error = self._describe(error)
            raise
        finally:
            if self._folder is not None:
                await self._complete(self._folder)

    async def _train(self, make: MakeCoordinator) -> None:
        async with make(self.record.config) as coordinator:
            mesh, last = coordinator.mesh, LastSteps(coordinator.mesh, coordinator.recorder)
            self._topology = mesh.topology
            self.send("mesh", coords=list(mesh.coords))
            gathering = None if coordinator.recorder is None else Gathering(mesh, self._outbox, self._hear)
            try:
                await train(coordinator, self, last, gathering)
            finally:
                self.spans[self._rank] = list(last.spans())
            await self._gather(mesh, list(last.spans(await clock_offset(mesh))))

    async def _gather(self, mesh: Mesh, spans: list[Span]) -> None:
        """What is left, and the last steps as rank 0's clock has them."""
        mine = {
            "told": self._outbox.take(self._outbox.num_bytes).decode(),
            "spans": [span.to_wire() for span in spans],
        }
        everyone = await gather_json(mesh.world, mine)
        for rank, theirs in enumerate(everyone) if self._rank == 0 else ():
            self.spans[rank] = [Span.from_wire(row) for row in theirs["spans"]]
            for message in read(theirs["told"].encode()):
                self._hear(rank, message)

    def _describe(self, error: Exception) -> RunError:
        """Of an error that a peer has caused, or that all ranks raise alike, the rank that it blames is named."""
        culprit = culprit_of(error)
        rank = self._rank if culprit is None else culprit
        coords = None if self._topology is None else self._topology.coords(rank)
        if isinstance(error, CommunicationError) and error.rank is not None:
            rank, coords = error.rank, error.coords
        message = f"{name_rank(rank, coords)} failed: {type(error).__name__}: {error}"
        return RunError(message, rank, coords, len(self.record.steps), notes=notes_of(error))

    async def _complete(self, folder: RunFolder) -> None:
        record = self.record
        if record.error is not None:
            folder.event("failed", **record.error.to_json())
        folder.event("ended", status=record.status, steps=len(record.steps))
        await complete(folder, record, self._watch, self.spans)


async def gather_json(group: Group, value: Any) -> Iterator[Any]:
    """Every rank's value, on every rank that looks at them. Small ones: each rank gets room for the longest."""
    data = json.dumps(value).encode()
    longest = torch.tensor([len(data)], device=group.device)
    await group.all_reduce(longest, op="max")
    padded = torch.frombuffer(bytearray(data.ljust(int(longest))), dtype=torch.uint8).to(group.device)
    rows = await group.all_gather(padded.unsqueeze(0))
    return (json.loads(row.numpy().tobytes()) for row in rows.cpu())
