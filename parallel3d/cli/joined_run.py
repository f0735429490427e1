"""A worker's run from the join to its exit code: the live line, signals, and what is said at the end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import traceback
from contextlib import aclosing
from typing import Any

from monitoring.analysis.facts import Status
from monitoring.checks import or_null
from monitoring.messages import RunStep
from parallel3d.cli.run_text import LiveLine
from parallel3d.config import RunConfig
from parallel3d.gradient_worker.joined_training import JoinedTraining
from parallel3d.gradient_worker.worker import GradientWorker
from parallel3d.planning.preflight import ModelFacts
from parallel3d.runs.record import RunError, RunRecord
from runtime.errors import ConfigError, Parallel3DError, notes_of

EXIT_FAILED = 4
GRACE_SECONDS = 3.0
"""For a step that is under way when a signal comes; other workers would have to make it again."""


class JoinedRun:
    """One worker of a gradient server."""

    def __init__(self, config: RunConfig, facts: ModelFacts, worker: GradientWorker) -> None:
        self.record, self._worker = RunRecord(config, facts), worker
        self._training = JoinedTraining(config, worker)
        self._live = LiveLine(sys.stderr, os.environ, shutil.get_terminal_size().columns)
        self._signal: signal.Signals | None = None

    async def work(self) -> None:
        """All of it. Raises ConfigError only; what else fails is in the record."""
        self._hear_signals()
        record = self.record
        try:
            await self._train()
            made = record.steps[-1].step + 1 if record.steps else 0
            record.status = Status.COMPLETED if made >= record.config.train.steps else Status.STOPPED
        except asyncio.CancelledError:
            if self._signal is None:
                raise
        except ConfigError:
            raise
        except Exception as error:
            if not isinstance(error, Parallel3DError):
                traceback.print_exc()
            record.status = Status.FAILED
            record.error = RunError(f"{type(error).__name__}: {error}", step=self._worker.step, notes=notes_of(error))
        finally:
            self._live.close()
        if self._signal is not None and record.status is not Status.FAILED:
            record.status = Status.INTERRUPTED

    async def _train(self) -> None:
        async with self._training as training, aclosing(training.steps()) as steps:
            worker = self._worker
            print(f"worker {worker.worker_id} ({worker.node_id}) has joined", file=sys.stderr, flush=True)
            async for step in steps:
                self._made(step)
                if self._signal is not None:
                    break

    def _made(self, step: RunStep) -> None:
        self.record.steps.append(step)
        self._live.show(self.record, step)

    def _hear_signals(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(number: signal.Signals, task: asyncio.Task[Any] = task) -> None:
            is_first, self._signal = self._signal is None, self._signal or number
            if is_first and self._training.is_making:
                loop.call_later(GRACE_SECONDS, task.cancel)
            else:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(number, interrupt, number)

    @property
    def exit_code(self) -> int:
        if self.record.status is Status.FAILED:
            return EXIT_FAILED
        return 0 if self._signal is None else 128 + self._signal

    def summary(self) -> str:
        """In words."""
        record, steps = self.record, self.record.steps
        worker = self._worker.worker_id
        first = f"{record.status}: {len(steps)} steps" + ("" if worker is None else f" as worker {worker}")
        if steps:
            first += f", loss {steps[0].loss:.4f} to {steps[-1].loss:.4f}, {record.tokens_per_second:,.0f} tokens/s"
        why = self._worker.ended_because
        lines = [first, *([f"the server ended: {why}"] if why is not None else [])]
        return "\n".join([*lines, *([f"parallel3d: {record.error.message}"] if record.error is not None else [])])

    def to_json(self) -> dict[str, Any]:
        """The same for machines. tokens_per_sec: all workers'."""
        record, steps, worker = self.record, self.record.steps, self._worker
        return {
            "status": record.status,
            "error": record.error.message if record.error is not None else None,
            "server_ended": worker.ended_because,
            "worker_id": worker.worker_id,
            "node_id": worker.node_id,
            "joins": worker.num_joins,
            "first_step": steps[0].step if steps else None,
            "steps": len(steps),
            "tokens_per_sec": record.tokens_per_second,
            "final_loss": or_null(steps[-1].loss) if steps else None,
            "losses": [or_null(step.loss) for step in steps],
            "grad_norms": [or_null(step.grad_norm) for step in steps],
            "learning_rates": [step.learning_rate for step in steps],
            "step_seconds": [step.seconds for step in steps],
        }
