"""A run that this process starts and supervises, no rank itself: `async with parallel3d.start("run.yaml") as run`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from monitoring.analysis.facts import Status
from monitoring.http.endpoint import Endpoint
from monitoring.messages import RunStep, receive
from parallel3d.config import RunConfig, load_config, locate
from parallel3d.planning.preflight import Locate, ModelFacts, check_before_start, nowhere
from parallel3d.runs import endpoint as run_endpoint
from parallel3d.runs.folder import RunFolder, check_run_dir, new_run_id
from parallel3d.runs.monitor import RunWatch, complete
from parallel3d.runs.record import RunError, RunRecord
from runtime.control import Message
from runtime.errors import InvalidCall, LaunchError, RunFailed
from runtime.launch.launch import Launch
from runtime.launch.script import Target
from runtime.launch.spec import LaunchResult, LaunchSpec, WarmServer, prepare, warm_up
from runtime.launch.spec import start as start_launch
from runtime.threads import DaemonThreads

EXIT_FAILED, EXIT_HUNG = 4, 124
PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "uvloop",
    "parallel3d.training.coordinator",
    "parallel3d.runs.rank_loop",
)
_RANK = Target("parallel3d.runs.rank_loop", is_module=True)
_SHADOW_CHECK = "parallel3d.shadows:refuse_shadows"
_STOP_SECONDS = 3.0
"""For the step that is under way; then ranks are interrupted in it."""
_INTERRUPT_GRACE = 5.0


def start(config: str | Path | RunConfig, *, overrides: Mapping[str, Any] | None = None) -> Run:
    """A run of as many ranks as the configuration says, on this host, to be entered with `async with`.

    config: the YAML file, with `overrides={"train.steps": 100}` for some of its keys; or a RunConfig.
    Raises ConfigError, whose text lists everything that is wrong.
    """
    if isinstance(config, RunConfig):
        if overrides:
            raise InvalidCall("start: a RunConfig is complete; load its file with overrides instead.")
        return Run(config)
    place = "overrides runtime.run_dir" if overrides and "runtime.run_dir" in overrides else str(config)
    loaded = load_config(config, overrides=overrides or {}, overrides_are="overrides")
    where = partial(locate, config, overrides or {}, overrides_are="overrides")
    return Run(loaded, locate=where, place=place)


def warm_up_for(config: RunConfig) -> WarmServer:
    """A fork server for this run's ranks. It takes the longest, so it may start before all else is known."""
    environment = dict(os.environ)
    if config.runtime.threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.runtime.threads)
    return warm_up(config.world_size, PRELOAD, environment)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run that has ended."""

    run_id: str
    folder: Path
    """Where its files are."""
    status: Status
    world_size: int
    steps: int
    """That were made."""
    final_loss: float | None
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    tokens_per_second: float
    """The whole mesh's, warm-up steps left out."""
    metrics: Mapping[str, Any]
    """As in `metrics.json`."""


class Run:
    """Made by `parallel3d.start`. Iterating it gives its steps as they are made, those made before included."""

    def __init__(
        self,
        config: RunConfig,
        *,
        locate: Locate = nowhere,
        place: str = "runtime.run_dir",
        facts: ModelFacts | None = None,
        warm: WarmServer | None = None,
        target: Target | None = None,
        on_step: Callable[[RunStep], None] | None = None,
        open_endpoint: Callable[[], Endpoint | None] | None = None,
    ) -> None:
        """locate: how errors name places. place: where the user named the folder. facts: of an earlier check.
        open_endpoint: where it is served."""
        check_run_dir(config, place)
        self.config, self.run_id = config, new_run_id()
        self._locate, self._place, self._facts = locate, place, facts
        self._warm, self._target, self._on_step = warm, target or _RANK, on_step
        self._open_endpoint = open_endpoint or partial(run_endpoint.open_endpoint, config, locate)
        self._endpoint: Endpoint | None = None
        self._watch: RunWatch | None = None
        self._wish: dict[str, Any] = {"number": 0, "stops": False, "learning_rate": None}
        self._waiting: dict[int, asyncio.Future[int | None]] = {}
        """For all ranks to agree to a wish, by its number."""
        self._is_ready = False
        """Rank 0 makes steps, so that it can also stop after one."""
        self._interrupted_by: signal.Signals | None = None
        self._next = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._result: LaunchResult | None = None
        self.record = RunRecord(config)
        """All that is known so far."""

    # A block.

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise InvalidCall("this run was entered before; make a new one with parallel3d.start(...).")
        self._endpoint = self._open_endpoint()
        try:
            # By this very thread: ranks end when the one that has started them does.
            warm = self._warm or warm_up_for(self.config)
        except BaseException:
            self._close_endpoint()
            raise
        try:
            spec = self._spec()
            logs = prepare(spec)
            if self._facts is None:
                self._facts = await self._check()
            self.record.facts = self._facts
            self._folder = RunFolder.create(self.config, self.run_id, self._place, self.endpoints)
        except BaseException:
            self._close_endpoint()
            await asyncio.shield(asyncio.to_thread(warm.discard))
            raise
        # The folder's real place: the program may go to another one, and ranks don't.
        folder = str(self._folder.path.resolve())
        spec = replace(spec, target=replace(spec.target, args=(*spec.target.args, folder)))
        try:
            if self.config.monitoring.enabled:
                self._watch = RunWatch(self.record, self._folder, self._endpoint)
            self._launch = Launch(start_launch(spec, logs, warm), self._on_message)
            self._launch.begin()
        except BaseException as error:
            await self._give_up(warm, error)
            raise
        self._folder.event("started", run_id=self.run_id, world_size=self.config.world_size, pid=os.getpid())
        self._task = asyncio.create_task(self._supervise(), name=f"run {self.run_id}")
        self._task.add_done_callback(lambda _: self._news.set())
        return self

    async def _give_up(self, warm: WarmServer, error: BaseException) -> None:
        """No rank was started: the folder tells why, and nobody is answered."""
        self._fail(RunError(f"the run could not be started: {error}"))
        try:
            await complete(self._folder, self.record, self._watch)
        finally:
            self._close_endpoint()
            with suppress(OSError):  # of a full disk, which was told
                self._folder.write_endpoints(self.endpoints)
            await asyncio.shield(asyncio.to_thread(warm.discard))

    def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    async def _check(self) -> ModelFacts:
        """In a thread that no program waits for: a factory of the user's may take its time."""
        thread = DaemonThreads("parallel3d-check", limit=1)
        checking = thread.submit(check_before_start, self.config, self._locate)
        thread.stop()
        return await asyncio.wrap_future(checking)

    def _spec(self) -> LaunchSpec:
        return LaunchSpec(
            target=self._target,
            num_ranks=self.config.world_size,
            preload=PRELOAD,
            before_script=_SHADOW_CHECK,
            interrupt_grace=_INTERRUPT_GRACE,
            stdout_to_stderr=True,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task = self._entered()
        if not task.done():
            self._wind_down()
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()  # ranks are ended at once
            await asyncio.wait([task])
            raise
        except Exception:
            if error is None:
                raise
        if error is None:
            self._raise_failure()

    @property
    def folder(self) -> Path:
        """`runs/<run_id>`, or what `runtime.run_dir` says."""
        self._entered()
        return self._folder.path

    @property
    def endpoints(self) -> Mapping[str, Any]:
        """As in `endpoints.json`: `metrics`, `page`, `sd` and `token` say where it is watched, while it goes on."""
        return run_endpoint.endpoints(self.run_id, self._endpoint, self.config.monitoring.per_rank)

    # Steps.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RunStep:
        task = self._entered()
        while self._next >= len(self.record.steps):
            if task.done():
                self._raise_failure()
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        self._next += 1
        return self.record.steps[self._next - 1]

    async def summary(self) -> RunSummary:
        """Once the run has ended. Raises RunFailed where it did not end well."""
        await asyncio.wait([self._entered()])
        self._raise_failure()
        record = self.record
        return RunSummary(
            run_id=self.run_id,
            folder=self._folder.path,
            status=record.status,
            world_size=self.config.world_size,
            steps=len(record.steps),
            final_loss=record.steps[-1].loss if record.steps else None,
            losses=tuple(step.loss for step in record.steps),
            step_seconds=tuple(step.seconds for step in record.steps),
            tokens_per_second=record.tokens_per_second,
            metrics=self.metrics(),
        )

    # Wishes.

    async def stop(self) -> None:
        """Let all ranks end after the step that they are in. Does not wait for it: the iteration ends then."""
        self._entered()
        self._change(stops=True)

    async def set_learning_rate(self, rate: float | None) -> int | None:
        """From the next step on, the same for all ranks; None: as configured again.

        Gives the first step that it counts for, or None where the run ended before.
        """
        task = self._entered()
        if rate is not None and not (isinstance(rate, int | float) and 0 <= rate < 1e6):
            raise InvalidCall(f"set_learning_rate: {rate!r}: give a number from 0 to below a million, or None.")
        if task.done():
            return None
        self._change(learning_rate=None if rate is None else float(rate))
        agreed: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting[self._wish["number"]] = agreed
        return await agreed

    def _change(self, **wishes: Any) -> None:
        self._wish |= {"number": self._wish["number"] + 1, **wishes}
        self._launch.send(0, "wish", **self._wish)

    def interrupt(self, number: signal.Signals) -> None:
        """As if this signal had come from the user: once, ranks end after their step; again, in it; again, at once."""
        if self._entered().done():
            return
        if self._interrupted_by is None:
            self._interrupted_by = number
            self._folder.event("interrupted", signal=number.name)
            self._wind_down()
        else:
            self._launch.interrupt(number)

    def _wind_down(self) -> None:
        if not self._is_ready:  # no step is worth waiting for
            self._launch.interrupt(signal.SIGINT)
            return
        self._change(stops=True)
        loop = asyncio.get_running_loop()
        patience = loop.call_later(_STOP_SECONDS, self._launch.interrupt, signal.SIGINT)
        self._entered().add_done_callback(lambda _: patience.cancel())

    # Ranks.

    def _on_message(self, rank: int, message: Message) -> None:
        report = receive(rank, message)
        if self._watch is not None:
            self._watch.take(rank, report)
        self.record.take(rank, report)
        if isinstance(report, RunStep):
            self._folder.event("step", **report.to_json())
            self._news.set()
            if self._on_step is not None:
                self._on_step(report)
        match message:
            case {"kind": "ready"} if rank == 0:
                self._is_ready = True
                self._launch.send(0, "wish", **self._wish)  # what was wished before it could hear
            case {"kind": "agreed", "number": int(number), "step": int(first), "learning_rate": rate} if rank == 0:
                self._agreed(number, first, rate)

    def _agreed(self, number: int, first: int, rate: float | None) -> None:
        mine = [each for each in self._waiting if each <= number]
        if mine:
            self._folder.event("learning_rate", step=first, learning_rate=rate)
        for each in mine:
            _resolve(self._waiting.pop(each), first)

    async def _supervise(self) -> None:
        """Until all ranks have ended, and the folder is complete."""
        try:
            self._conclude(await self._launch.finish())
        except asyncio.CancelledError:
            self.record.status = Status.INTERRUPTED
            raise
        except LaunchError as error:
            self._fail(RunError(str(error), step=len(self.record.steps)))
        except Exception as error:  # of whoever is told of steps
            self._fail(RunError(f"{type(error).__name__}: {error}", step=len(self.record.steps)))
            raise
        finally:
            self._folder.event("ended", status=self.record.status, steps=len(self.record.steps))
            for waiting in self._waiting.values():
                _resolve(waiting, None)
            try:
                await complete(self._folder, self.record, self._watch)
            finally:
                self._endpoint = None

    def _conclude(self, result: LaunchResult) -> None:
        self._result = result
        if self._interrupted_by is not None or result.interrupted_by is not None:
            self.record.status = Status.INTERRUPTED
        elif result.root is None:
            stopped = self._wish["stops"] and len(self.record.steps) < self.config.train.steps
            self.record.status = Status.STOPPED if stopped else Status.COMPLETED
        else:
            root = result.root
            trace, notes = (root.report.traceback, root.report.notes) if root.report is not None else ("", ())
            hung = root.report is not None and root.report.error_kind == "DeadlineExceeded"
            message = f"{root.name} failed: {root.how}"
            error = RunError(message, root.rank, root.coords, len(self.record.steps), trace, notes)
            self._fail(error, Status.HUNG if hung else Status.FAILED)

    def _fail(self, error: RunError, status: Status = Status.FAILED) -> None:
        self.record.status, self.record.error = status, error
        self._folder.event("failed", **error.to_json())

    # The end.

    @property
    def result(self) -> LaunchResult | None:
        """How the ranks ended; None before, and where they could not be started."""
        return self._result

    @property
    def exit_code(self) -> int:
        """Of a program that was this run alone."""
        match self.record.status:
            case Status.FAILED:
                return EXIT_FAILED
            case Status.HUNG:
                return EXIT_HUNG
            case Status.INTERRUPTED:
                return 128 + (self._interrupted_by or signal.SIGINT)
            case _:
                return 0

    @property
    def bubble(self) -> float | None:
        """The share of the latest known step that ranks wait for other stages; None before it is known."""
        return None if self._watch is None else self._watch.bubble

    def metrics(self) -> dict[str, Any]:
        """The content of `metrics.json`, as it is now."""
        return self._folder.metrics(self.record)

    def _entered(self) -> asyncio.Task[None]:
        if self._task is None:
            raise InvalidCall("the run is not entered: async with parallel3d.start(...) as run")
        return self._task

    def _raise_failure(self) -> None:
        task, error = self._entered(), self.record.error
        if not task.cancelled() and (trouble := task.exception()) is not None:
            raise trouble
        if error is not None:
            traceback = f"\n{error.traceback.rstrip()}" if error.traceback else ""
            raise RunFailed(
                f"{error.message}\nThe run's files are in {self._folder.path}.{traceback}",
                rank=error.rank,
                coords=error.coords,
                step=error.step,
                traceback=error.traceback,
                exit_code=self.exit_code,
            )


def _resolve(future: asyncio.Future[int | None], value: int | None) -> None:
    if not future.done():  # its waiter may have been cancelled
        future.set_result(value)
