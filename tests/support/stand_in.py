"""A coordinator that computes nothing, on a real mesh: for tests of how runs live, stop and fail.

The environment variable STAND_IN says what goes wrong: `raise`, `kill`, `hang` or `speak`, a rank and a step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

import parallel3d
from monitoring.events.events import What
from monitoring.events.recorder import Recorder
from parallel3d.config import RunConfig
from parallel3d.data.batches import QueueDepths
from parallel3d.pipeline.pipeline_pass import TimedAction
from parallel3d.pipeline.schedules.actions import Action, Kind
from parallel3d.runs.supervised import Run
from parallel3d.training.performance import Performance, TrainStep
from parallel3d.training.step_events import Span, StepEvents, StepMoments
from runtime.launch.script import Target

STAND_IN = "STAND_IN"
SCRIPT = str(Path(__file__).with_name("stand_in_rank.py"))


def stand_in_run(config: RunConfig, **options: Any) -> Run:
    """A run whose ranks have this coordinator."""
    from parallel3d.planning.preflight import ModelFacts

    return Run(config, facts=ModelFacts(parameters=12), target=Target(SCRIPT), **options)


class StandIn:
    """Step k has the loss 10 - k."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.mesh = config, parallel3d.mesh(config)
        self.learning_rate: float | None = None
        what, rank, step = (os.environ.get(STAND_IN) or "nothing 0 0").split()
        self._trouble: Callable[[], Any] = getattr(self, f"_{what}")
        self._place = int(rank), int(step)
        self.recorder, self.queue = Recorder(), QueueDepths(2)

    async def __aenter__(self) -> Self:
        await self.mesh.__aenter__()
        self.mesh.collectives.events_into = self.recorder
        self._events = StepEvents(self.recorder)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.mesh.__aexit__(kind, error, trace)

    def performance(self) -> Performance:
        return Performance(6)

    async def batches(self) -> AsyncIterator[int]:
        for step in range(self.config.train.steps):
            self.queue.note(1)
            yield step

    def memory(self) -> dict[str, int]:
        return {"weights": 24, "gradients": 24, "optimizer": 48}

    async def train_step(self, batch: int) -> TrainStep:
        start = time.monotonic()
        if (self.mesh.rank, batch) == self._place:
            await self._trouble()
        gradients = torch.ones(1024)
        await self.mesh.dp.all_reduce(gradients)
        loss = torch.full((1,), (10.0 - batch) / self.mesh.world_size, dtype=torch.float64)
        await self.mesh.world.all_reduce(loss)
        end = time.monotonic()
        rate = self.config.optimizer.lr if self.learning_rate is None else self.learning_rate
        middle = (start + end) / 2
        self.recorder.record(What.F, batch, start, middle, 0, 0)
        self.recorder.record(What.B, batch, middle, end, 0, 0)
        whole = self._events.end(batch, StepMoments(None, None, end, end, Span(end, end), end))
        return TrainStep(
            step=batch,
            loss=float(loss),
            grad_norm=1.0,
            learning_rate=rate,
            tokens=128,
            seconds=end - start,
            data_seconds=0.0,
            reduce_seconds=0.0,
            optimizer_seconds=0.0,
            tensor_seconds=0.0,
            began=whole.start,
            ended=whole.end,
            all_reduce_bandwidth=1.5,
            actions=(TimedAction(Action(0, Kind.F, 0), start, middle), TimedAction(Action(0, Kind.B, 0), middle, end)),
        )

    async def _nothing(self) -> None:
        pass

    async def _raise(self) -> None:
        error = ValueError("the model has an opinion: <b>no</b>")
        error.add_note("Layer 3 of the model has it.")
        raise error

    async def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def _hang(self) -> None:
        await asyncio.sleep(3600)

    async def _speak(self) -> None:
        print("a word")
