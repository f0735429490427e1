"""The life of a run, however its ranks are started: its files and endpoint, its status, and the exit code of that.

    running ─┬─► completed     all steps were made
             ├─► stopped       the program asked for it, after a whole step
             ├─► interrupted   by a signal, or by leaving the program's block before the first step
             ├─► failed        a rank raised or was killed, or none could be started
             └─► hung          a rank missed a deadline

`parallel3d run` and `parallel3d.start` have one in the supervisor (supervised.py). Under torchrun and SLURM each rank
has one, and only rank 0's has a folder, an endpoint and a monitor (torchrun_rank.py).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from monitoring.analysis.facts import Status
from monitoring.events.trace import Span
from monitoring.http.endpoint import Endpoint
from monitoring.messages import RunStep, receive
from parallel3d import exit_codes
from parallel3d.config import RunConfig
from parallel3d.planning.preflight import Locate, nowhere
from parallel3d.runs.endpoint import endpoints, open_endpoint
from parallel3d.runs.folder import RunFolder, check_run_dir, new_run_id
from parallel3d.runs.monitor import RunMonitor
from parallel3d.runs.record import RunError, RunRecord
from process_groups.topology import Topology
from runtime.control import Message
from runtime.errors import CommunicationError, DeadlineExceeded, RunFailed, culprit_of, name_rank, notes_of
from runtime.launch.failures import Failure
from runtime.launch.spec import LaunchResult


class RunLifecycle:
    """Record, endpoint, folder and monitor of one run. The caller acquires them in this order, and calls `finish`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        place: str = "runtime.run_dir",
        on_step: Callable[[RunStep], object] | None = None,
    ) -> None:
        """place: where the user named the folder, for errors. on_step: called with each step that was made."""
        self.config, self.run_id, self.record = config, new_run_id(), RunRecord(config)
        self.interrupted_by: signal.Signals | None = None
        self._place, self._on_step = place, on_step
        self._has_opened = False
        self._endpoint: Endpoint | None = None
        self._folder: RunFolder | None = None
        self._monitor: RunMonitor | None = None

    # What it acquires.

    def check_folder(self) -> None:
        """Raises ConfigError where the folder that the user named can't be this run's."""
        check_run_dir(self.config, self._place)

    def open_endpoint(self, locate: Locate = nowhere) -> None:
        """Listen, where monitoring is enabled. Only the first call does something. locate: how errors name places."""
        if not self._has_opened:
            self._has_opened = True
            self._endpoint = open_endpoint(self.config, locate)

    def close_endpoint(self) -> None:
        """Stop listening, and remove the token from `endpoints.json`: the port may soon be another program's."""
        if self._endpoint is None:
            return
        self._endpoint.close()
        self._endpoint = None
        if self._folder is not None:
            with suppress(OSError):  # a full disk; completing the folder has raised that already
                self._folder.write_endpoints(self.endpoints)

    def create_folder(self) -> None:
        """Raises ConfigError where it can't be made."""
        self._folder = RunFolder.create(self.config, self.run_id, self._place, self.endpoints)

    def start_monitor(self) -> None:
        """Observe the ranks and serve the endpoint, where monitoring is enabled; needs the folder."""
        if self.config.monitoring.enabled:
            self._monitor = RunMonitor(self.record, self.folder, self._endpoint)

    @property
    def folder(self) -> RunFolder:
        assert self._folder is not None
        return self._folder

    @property
    def endpoints(self) -> dict[str, Any]:
        """The content of `endpoints.json`."""
        return endpoints(self.run_id, self._endpoint, self.config.monitoring.per_rank)

    # While it runs.

    def take(self, rank: int, message: Message) -> RunStep | None:
        """Pass a rank's message to the monitor, the record and `events.jsonl`. Returns the step that it reports."""
        report = receive(rank, message)
        if self._monitor is not None:
            with suppress(Exception):  # monitoring must not end a run
                self._monitor.take(rank, report)
        self.record.take(rank, report)
        if not isinstance(report, RunStep):
            return None
        self.event("step", **report.to_json())
        if self._on_step is not None:
            self._on_step(report)
        return report

    def event(self, kind: str, **fields: object) -> None:
        """Append a line to `events.jsonl`; ranks without a folder ignore it."""
        if self._folder is not None:
            self._folder.event(kind, **fields)

    @property
    def bubble(self) -> float | None:
        """Mean share of a step that ranks wait for other stages, of the latest analysed step; None before the first."""
        return None if self._monitor is None else self._monitor.bubble

    def metrics(self) -> dict[str, Any]:
        """The content of `metrics.json`, as it is now."""
        return self.folder.metrics(self.record)

    # How it ends.

    def interrupt(self, number: signal.Signals) -> None:
        """Note that this signal ends the run."""
        self.interrupted_by = number
        self.event("interrupted", signal=number.name)

    def fail(self, error: RunError, status: Status = Status.FAILED) -> None:
        """Note what ends the run."""
        self.record.status, self.record.error = status, error
        self.event("failed", **error.to_json())

    def conclude(self, result: LaunchResult, *, was_stopped: bool) -> None:
        """Set the status of a run whose ranks have all ended. was_stopped: the program asked for an early end."""
        num_steps = len(self.record.steps)
        if self.interrupted_by is not None or result.interrupted_by is not None:
            self.record.status = Status.INTERRUPTED
        elif result.root is not None:
            is_hang = result.root.report is not None and result.root.report.error_kind == DeadlineExceeded.__name__
            self.fail(_error_of_rank(result.root, num_steps), Status.HUNG if is_hang else Status.FAILED)
        elif was_stopped and num_steps < self.config.train.steps:
            self.record.status = Status.STOPPED
        else:
            self.record.status = Status.COMPLETED

    def fail_with(self, error: Exception, rank: int, topology: Topology | None) -> None:
        """Note the exception that ends the run on this rank. topology: None before the mesh is formed."""
        status = Status.HUNG if isinstance(error, DeadlineExceeded) else Status.FAILED
        self.fail(_error_of_exception(error, rank, topology, len(self.record.steps)), status)

    async def finish(self, spans: Mapping[int, list[Span]] | None = None) -> None:
        """Complete the folder and stop serving; without a folder, do nothing.

        spans: each rank's last steps; None: ranks left them in the folder.
        A caller that is cancelled still waits for the complete folder, because it is all that is left of the run.
        """
        self.event("ended", status=self.record.status, steps=len(self.record.steps))
        if self._folder is not None:
            await self._complete(spans)

    async def abandon(self, kind: object, error: BaseException | None, trace: object) -> None:
        """An `__aexit__` for a run whose ranks could not be started: the folder says why."""
        if error is not None:
            self.fail(RunError(f"the run could not be started: {error}"))
            await self._complete(None)

    async def _complete(self, spans: Mapping[int, list[Span]] | None) -> None:
        hurry = asyncio.Event()
        ending = asyncio.create_task(self._write_and_close(spans, hurry))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            hurry.set()
            if not ending.done():
                await asyncio.wait([ending])  # cancelled a second time, it goes on alone
            raise

    async def _write_and_close(self, spans: Mapping[int, list[Span]] | None, hurry: asyncio.Event) -> None:
        try:
            if self._monitor is not None:
                await self._monitor.settle()
            await self.folder.complete(self.record, spans)
            if self._monitor is not None:
                await self._monitor.linger(hurry)
        finally:
            if self._monitor is not None:
                await self._monitor.close()
            if self._endpoint is not None:
                await asyncio.to_thread(self.close_endpoint)

    @property
    def exit_code(self) -> int:
        """Of a program that is this run alone."""
        return exit_code(self.record.status, self.interrupted_by)

    def failure(self) -> RunFailed | None:
        """What `parallel3d.start` raises for a run that did not end well."""
        error = self.record.error
        if error is None:
            return None
        traceback = f"\n{error.traceback.rstrip()}" if error.traceback else ""
        return RunFailed(
            f"{error.message}\nThe run's files are in {self.folder.path}.{traceback}",
            rank=error.rank,
            coords=error.coords,
            step=error.step,
            traceback=error.traceback,
            exit_code=self.exit_code,
        )


def exit_code(status: Status, interrupted_by: signal.Signals | None = None) -> int:
    """Of a run with this status. interrupted_by: the signal; None: Ctrl-C."""
    match status:
        case Status.FAILED:
            return exit_codes.FAILED
        case Status.HUNG:
            return exit_codes.HUNG
        case Status.INTERRUPTED:
            return exit_codes.of_signal(interrupted_by or signal.SIGINT)
        case _:
            return exit_codes.OK


def _error_of_rank(root: Failure, num_steps: int) -> RunError:
    """Of the rank whose end ended the others."""
    traceback, notes = (root.report.traceback, root.report.notes) if root.report is not None else ("", ())
    return RunError(f"{root.name} failed: {root.how}", root.rank, root.coords, num_steps, traceback, notes)


def _error_of_exception(error: Exception, rank: int, topology: Topology | None, num_steps: int) -> RunError:
    """Names the rank at fault, where a peer caused the error or all ranks raise the same."""
    culprit = culprit_of(error)
    rank = rank if culprit is None else culprit
    coords = None if topology is None else topology.coords(rank)
    if isinstance(error, CommunicationError) and error.rank is not None:
        rank, coords = error.rank, error.coords
    message = f"{name_rank(rank, coords)} failed: {type(error).__name__}: {error}"
    return RunError(message, rank, coords, num_steps, notes=notes_of(error))
