"""A rank of a run without a supervisor, as under torchrun or SLURM; rank 0 gathers all reports for the folder."""

from __future__ import annotations

import asyncio

from monitoring.analysis.facts import Status
from monitoring.events.trace import Span
from parallel3d.rank_mesh import Mesh
from parallel3d.runs.commands import Command
from parallel3d.runs.lifecycle import RunLifecycle
from parallel3d.runs.rank_exchange import Outbox, ReportGathering, clock_offset, gather_json, read_messages
from parallel3d.runs.rank_loop import LastSteps, MakeCoordinator, train
from process_groups.topology import Topology


class RankReporter:
    """A rank's own reporter. Rank 0 passes all ranks' messages to its lifecycle, other ranks only their own."""

    def __init__(self, rank: int, lifecycle: RunLifecycle) -> None:
        """lifecycle: on rank 0 with a folder."""
        self.command = Command()
        self.spans: dict[int, list[Span]] = {}
        self._rank, self._lifecycle = rank, lifecycle
        self._outbox = Outbox()
        self._topology: Topology | None = None

    @property
    def is_behind(self) -> bool:
        return self._outbox.is_behind

    def send(self, kind: str, **fields: object) -> None:
        if self._rank:
            self._outbox.put(kind, fields)
        self._lifecycle.take(self._rank, {"kind": kind, **fields})

    async def work(self, make: MakeCoordinator) -> None:
        """Run this rank from its mesh to its status; on rank 0 the folder is complete then, also after a failure."""
        record = self._lifecycle.record
        try:
            if self._rank == 0:
                self._lifecycle.start_monitor()
            await self._train(make)
            record.status = Status.COMPLETED
        except (asyncio.CancelledError, KeyboardInterrupt):
            record.status = Status.INTERRUPTED
            raise
        except Exception as error:
            self._lifecycle.fail_with(error, self._rank, self._topology)
            raise
        finally:
            await self._lifecycle.finish(self.spans)

    async def _train(self, make: MakeCoordinator) -> None:
        async with make(self._lifecycle.config) as coordinator:
            mesh, last = coordinator.mesh, LastSteps(coordinator.mesh, coordinator.recorder)
            self._topology = mesh.topology
            self.send("mesh", coords=list(mesh.coords))
            gathering = None
            if coordinator.recorder is not None:
                gathering = ReportGathering(mesh, self._outbox, self._lifecycle.take)
            try:
                await train(coordinator, self, last, gathering)
            finally:
                self.spans[self._rank] = list(last.spans())
            await self._gather_rest(mesh, list(last.spans(await clock_offset(mesh))))

    async def _gather_rest(self, mesh: Mesh, spans: list[Span]) -> None:
        """Bring the remaining messages to rank 0, and the last steps by rank 0's clock."""
        mine = {
            "messages": self._outbox.take(self._outbox.num_bytes).decode(),
            "spans": [span.to_wire() for span in spans],
        }
        everyone = await gather_json(mesh.world, mine)
        for rank, theirs in enumerate(everyone) if self._rank == 0 else ():
            self.spans[rank] = [Span.from_wire(row) for row in theirs["spans"]]
            for message in read_messages(theirs["messages"].encode()):
                self._lifecycle.take(rank, message)
