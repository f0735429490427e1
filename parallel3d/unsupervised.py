"""A rank of a run without a supervisor, as under torchrun or SLURM: rank 0 gathers what all tell, and writes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from monitoring.trace import STEPS, Span
from parallel3d.config import RunConfig
from parallel3d.last_steps import LastSteps
from parallel3d.rank_mesh import Mesh
from parallel3d.run_folder import RunFolder
from parallel3d.run_record import ModelFacts, RankTotals, RunError, RunRecord, RunStep, Status, step_event
from parallel3d.trainer import MakeCoordinator, train
from parallel3d.wishes import Wish
from process_groups.group import Group
from runtime.errors import CommunicationError, DeadlineExceeded, name_rank


class RankOwner:
    """A rank that works for itself. Rank 0 has the run's folder."""

    def __init__(
        self,
        rank: int,
        config: RunConfig,
        facts: ModelFacts,
        folder: RunFolder | None,
        on_step: Callable[[RunRecord, RunStep], None],
    ) -> None:
        self.wish = Wish()
        self.record = RunRecord(config, facts)
        self.spans: dict[int, list[Span]] = {}
        self._rank, self._folder, self._on_step = rank, folder, on_step

    is_behind = False

    def send(self, kind: str, **fields: object) -> None:
        step = self.record.take(self._rank, {"kind": kind, **fields})
        if step is not None and self._folder is not None:
            self._folder.event("step", **step_event(step))
            self._on_step(self.record, step)

    async def work(self, make: MakeCoordinator) -> None:
        """All of the run; the folder is complete then, also when it fails."""
        try:
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
            self.send("mesh", coords=list(mesh.coords))
            try:
                await train(coordinator, self, last)
            finally:
                self.spans[self._rank] = list(last.spans())
            await self._gather(mesh)

    async def _gather(self, mesh: Mesh) -> None:
        mine = {
            "totals": self.record.ranks[self._rank].to_wire(),
            "spans": [span.to_wire() for span in self.spans[self._rank]],
        }
        everyone = await gather_json(mesh.world, mine)
        for rank, told in enumerate(everyone):
            self.record.ranks[rank] = RankTotals.from_wire(told["totals"])
            self.spans[rank] = [Span.from_wire(row) for row in told["spans"]]
        for rank, host in enumerate(mesh.hosts):
            if host != mesh.hosts[self._rank]:
                self.spans[rank] = _aligned(self.spans[rank], self.spans[self._rank])

    def _describe(self, error: Exception) -> RunError:
        """Of an error that a peer has caused, the peer is named."""
        rank: int | None = self._rank
        coords = self.record.ranks[self._rank].coords if self._rank in self.record.ranks else None
        if isinstance(error, CommunicationError) and error.rank is not None:
            rank, coords = error.rank, error.coords
        message = f"{name_rank(rank, coords)} failed: {type(error).__name__}: {error}"
        return RunError(message, rank, coords, len(self.record.steps))

    async def _complete(self, folder: RunFolder) -> None:
        record = self.record
        if record.error is not None:
            folder.event("failed", **record.error.to_json())
        folder.event("ended", status=record.status, steps=len(record.steps))
        await folder.complete(record, self.spans)


async def gather_json(group: Group, value: Any) -> list[Any]:
    """Every rank's value, on every rank. Small ones: each rank gets room for the longest."""
    data = json.dumps(value).encode()
    longest = torch.tensor([len(data)], device=group.device)
    await group.all_reduce(longest, op="max")
    padded = torch.frombuffer(bytearray(data.ljust(int(longest))), dtype=torch.uint8).to(group.device)
    rows = await group.all_gather(padded.unsqueeze(0))
    return [json.loads(bytes(row.tolist())) for row in rows.cpu()]


def _aligned(spans: Sequence[Span], to: Sequence[Span]) -> list[Span]:
    """Clocks of hosts differ, but all ranks end a step together."""

    def end_of_steps(each: Sequence[Span]) -> float:
        return max((span.end for span in each if span.row == STEPS), default=0.0)

    offset = end_of_steps(to) - end_of_steps(spans)
    return [replace(span, start=span.start + offset, end=span.end + offset) for span in spans]
