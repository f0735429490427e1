"""The executor: runs one rank's pipeline program. A step is handed to the engine thread once, as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monitoring.events.recorder import Recorder
from parallel3d.pipeline.pipeline_pass import GradientHandler, PassContext, PipelinePass, TimedAction
from parallel3d.pipeline.program import rank_program
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation.measured import Measured
from parallel3d.pipeline.stage import Loss, Stage
from parallel3d.rank_mesh import Mesh
from runtime.errors import GroupClosed, InvalidCall


@dataclass(frozen=True, slots=True)
class Step:
    """What a step gave on this rank."""

    loss: float
    """The whole pipeline's, on every rank."""
    timed: tuple[TimedAction, ...]
    """This rank's actions, in order."""
    peak_activations: dict[int, int]
    """By stage of this rank: the most microbatches whose activations were kept at a time."""


class Executor:
    """One rank's part of a pipeline. Make it on the event loop, in the same order on every rank."""

    def __init__(
        self,
        mesh: Mesh,
        table: Table,
        stages: Mapping[int, Stage],
        loss: Loss,
        *,
        gradients: GradientHandler | None = None,
        autocast: torch.dtype | None = None,
        collective_seconds: Callable[[], float] = lambda: 0.0,
        recorder: Recorder | None = None,
    ) -> None:
        if table.num_ranks != mesh.pp.size:
            raise InvalidCall(f"the table is for {table.num_ranks} ranks, but the mesh has pp = {mesh.pp.size}.")
        program = rank_program(table, stages, mesh.pp.rank)
        self.table, self.stages = program.table, dict(stages)
        self._mesh, self._group, self._gradients = mesh, mesh.pp, gradients
        pipes = {rank: mesh.pp.pipe(rank) for rank in program.peers}
        self._context = PassContext(
            mesh=mesh,
            program=program,
            stages=self.stages,
            pipes=pipes,
            loss=loss,
            gradients=gradients,
            autocast=autocast,
            collective_seconds=collective_seconds,
            recorder=recorder,
            calls_per_event=0 if any(pipe.is_recorded_by_group for pipe in pipes.values()) else 1,
        )

    async def step(self, inputs: Sequence[Any], targets: Sequence[Any], weights: Sequence[float] | None = None) -> Step:
        """Forward and backward of all microbatches; gradients are added to the parameters' `.grad`.

        The step's loss is the sum of the microbatches' losses, each times its weight: by default one over their number.
        """
        under_way = self.begin(inputs, targets, weights)
        await self.finish(under_way)
        loss = await self._share_loss(under_way.loss) if self._context.program.is_forward_only else under_way.loss
        peaks = {index: stage.peak_activations for index, stage in self.stages.items()}
        return Step(loss, tuple(under_way.timed), peaks)

    def begin(
        self, inputs: Sequence[Any], targets: Sequence[Any], weights: Sequence[float] | None = None
    ) -> PipelinePass:
        """A step to be run by `forward` and `finish`, or by `finish` alone."""
        num = self.table.microbatches
        weights = [1.0 / num] * num if weights is None else weights
        for name, given in (("inputs", inputs), ("targets", targets), ("weights", weights)):
            if len(given) != num:
                raise InvalidCall(f"step: {len(given)} {name} for {num} microbatches.")
        if self._group.has_failed:
            raise GroupClosed("step: an earlier step failed, so messages of it may be on their way. Enter a new mesh.")
        return PipelinePass(self._context, inputs, targets, weights)

    async def forward(self, under_way: PipelinePass) -> None:
        """All actions before the first backward."""
        await self._compute(under_way.run_forward)

    async def finish(self, under_way: PipelinePass) -> None:
        """All actions that are left; returns when gradients are ready for the optimizer."""
        await self._compute(under_way.run, self._gradients)

    async def measured(self, timed: Sequence[TimedAction]) -> Measured:
        """A step's times on all ranks of the pipeline. All have to call it, and to be on one host: clocks differ from
        host to host."""
        hosts = {self._mesh.hosts[rank] for rank in self._group.ranks}
        if len(hosts) > 1:
            raise InvalidCall(f"measured: the pipeline's ranks are on {len(hosts)} hosts, whose clocks differ.")
        most = max(map(len, self.table.columns))
        mine = torch.zeros(1, most, 4, dtype=torch.float64, device=self._group.device)
        mine[0, : len(timed)] = torch.tensor([each[1:] for each in timed], dtype=torch.float64)
        rows = (await self._group.all_gather(mine)).tolist()
        times = [row[: len(column)] for row, column in zip(rows, self.table.columns, strict=True)]
        return Measured.of(self.table, times)

    async def _compute(self, function: Callable[[], None], gradients: GradientHandler | None = None) -> None:
        """In the engine thread, then finish the gradients, if given. Any failure closes the mesh: messages of this step
        would be taken for the next one's."""
        computing = asyncio.ensure_future(self._mesh.compute(function))
        try:
            await asyncio.shield(computing)
            if gradients is not None:
                await gradients.finish()
        except BaseException as error:
            self._mesh.fail(error)
            await self._abandon(computing, error)
            raise

    async def _abandon(self, computing: asyncio.Future[None], error: BaseException) -> None:
        """Wait for the engine thread, which ends soon because its groups are closed, then cancel the gradients."""
        seconds = self._group.timeout
        computing.add_done_callback(_retrieve_exception)
        try:
            await asyncio.wait([computing], timeout=seconds)
        finally:
            if self._gradients is not None:
                self._gradients.cancel()
        if not computing.done():
            error.add_note(
                f"The engine thread still computes, {seconds:g} s after the step was given up: it ends when the "
                "forward or backward that it is in does."
            )

    async def _share_loss(self, loss: float) -> float:
        """The last stage's, on every rank."""
        if self._group.size == 1:
            return loss
        shared = torch.tensor([loss], dtype=torch.float64, device=self._group.device)
        await self._group.broadcast(shared, root=self.table.rank_of_stage[-1])
        return float(shared)


def _retrieve_exception(computing: asyncio.Future[None]) -> None:
    """So that asyncio doesn't log the error of an abandoned step as never retrieved."""
    if not computing.cancelled():
        computing.exception()
