"""A run whose ranks this process starts and supervises: `async with parallel3d.start("run.yaml") as run`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from monitoring.analysis.facts import Status
from monitoring.messages import RunStep
from parallel3d.config import RunConfig, load_config, locate
from parallel3d.planning.preflight import Locate, ModelFacts, check_before_start, nowhere
from parallel3d.runs.commands import CommandSender, check_learning_rate
from parallel3d.runs.lifecycle import RunLifecycle
from parallel3d.runs.record import RunError
from runtime.control import Message
from runtime.errors import InvalidCall, LaunchError
from runtime.launch.launch import Launch
from runtime.launch.script import Target
from runtime.launch.spec import LaunchResult, LaunchSpec, WarmServer, prepare, warm_up
from runtime.launch.spec import start as start_launch
from runtime.threads import DaemonThreads

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
"""For the step that is under way; after that, ranks are interrupted in it."""
_INTERRUPT_GRACE = 5.0


def start(config: str | Path | RunConfig, *, overrides: Mapping[str, Any] | None = None) -> Run:
    """A run on this host, with as many ranks as the configuration says; enter it with `async with`.

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
    """A fork server for this run's ranks. It takes the longest to start, so it may start before the run is checked."""
    environment = dict(os.environ)
    if config.runtime.threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.runtime.threads)
    return warm_up(config.world_size, PRELOAD, environment)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run that has ended."""

    run_id: str
    folder: Path
    status: Status
    world_size: int
    steps: int
    """Number of steps that were made."""
    final_loss: float | None
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    tokens_per_second: float
    """Of the whole mesh, without warm-up steps."""
    metrics: Mapping[str, Any]
    """The content of `metrics.json`."""


class Run:
    """Made by `parallel3d.start`. Iterating it gives its steps as they are made, and also those made before."""

    def __init__(
        self,
        config: RunConfig,
        *,
        locate: Locate = nowhere,
        place: str = "runtime.run_dir",
        facts: ModelFacts | None = None,
        target: Target | None = None,
        on_step: Callable[[RunStep], object] | None = None,
    ) -> None:
        """locate: how errors name places. place: where the user named the folder. facts: None: check the configuration
        first. target: what ranks run. on_step: called with each step that was made."""
        self.lifecycle = RunLifecycle(config, place=place, on_step=on_step)
        self.lifecycle.check_folder()
        self.config, self.run_id, self.record = config, self.lifecycle.run_id, self.lifecycle.record
        self._locate, self._facts, self._target = locate, facts, target or _RANK
        self._warm: WarmServer | None = None
        self._commands = CommandSender(self._send_command)
        self._is_ready = False
        """Rank 0 makes steps, so it can stop after one."""
        self._next = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._result: LaunchResult | None = None

    # Enter and leave.

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Do in this thread, without an event loop, what entering does before ranks start; for `parallel3d run`."""
        with ExitStack() as stack:
            stack.callback(self.lifecycle.close_endpoint)
            self.lifecycle.open_endpoint(self._locate)  # first: its port may be taken
            self._warm = warm_up_for(self.config)  # imports torch while this process does
            stack.callback(self._warm.discard)
            with redirect_stdout(sys.stderr):  # stdout is for data, not for what the user's factories print
                self._facts = check_before_start(self.config, self._locate)
            yield

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise InvalidCall("this run was entered before; make a new one with parallel3d.start(...).")
        async with AsyncExitStack() as stack:
            await self._start(stack)
            stack.pop_all()
        self.lifecycle.event("started", run_id=self.run_id, world_size=self.config.world_size, pid=os.getpid())
        self._task = asyncio.create_task(self._supervise(), name=f"run {self.run_id}")
        self._task.add_done_callback(lambda _: self._news.set())
        return self

    async def _start(self, stack: AsyncExitStack) -> None:
        """Acquire everything; `stack` releases it if that fails."""
        lifecycle = self.lifecycle
        stack.callback(lifecycle.close_endpoint)
        lifecycle.open_endpoint(self._locate)
        # In this thread: ranks end when the thread ends that started their fork server.
        warm = self._warm or warm_up_for(self.config)
        stack.push_async_callback(_discard, warm)
        spec = self._spec()
        logs = prepare(spec)
        lifecycle.record.facts = self._facts if self._facts is not None else await self._check()
        lifecycle.create_folder()
        stack.push_async_exit(lifecycle.abandon)
        lifecycle.start_monitor()
        # Absolute: this program may change its working directory, ranks don't.
        folder = str(lifecycle.folder.path.resolve())
        spec = replace(spec, target=replace(spec.target, args=(*spec.target.args, folder)))
        self._launch = Launch(start_launch(spec, logs, warm), self._on_message)
        self._launch.begin()

    async def _check(self) -> ModelFacts:
        """In a daemon thread, so that a slow factory of the user's does not keep the program from ending."""
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
            task.cancel()  # ends the ranks at once
            await asyncio.wait([task])
            raise
        except Exception:
            if error is None:
                raise
        if error is None:
            self._raise_failure()

    def _entered(self) -> asyncio.Task[None]:
        if self._task is None:
            raise InvalidCall("the run is not entered: async with parallel3d.start(...) as run")
        return self._task

    # What is known of it.

    @property
    def folder(self) -> Path:
        """`runs/<run_id>`, or what `runtime.run_dir` says."""
        self._entered()
        return self.lifecycle.folder.path

    @property
    def endpoints(self) -> Mapping[str, Any]:
        """The content of `endpoints.json`: while the run lasts, `metrics`, `page`, `sd` and `token` of its endpoint."""
        return self.lifecycle.endpoints

    @property
    def bubble(self) -> float | None:
        """Mean share of a step that ranks wait for other stages, of the latest analysed step; None before the first."""
        return self.lifecycle.bubble

    @property
    def result(self) -> LaunchResult | None:
        """How the ranks ended; None before that, and if they could not be started."""
        return self._result

    @property
    def exit_code(self) -> int:
        """Of a program that is this run alone."""
        return self.lifecycle.exit_code

    def metrics(self) -> dict[str, Any]:
        """The content of `metrics.json`, as it is now."""
        return self.lifecycle.metrics()

    # Its steps.

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
        """Wait for the end of the run. Raises RunFailed if it did not end well."""
        await asyncio.wait([self._entered()])
        self._raise_failure()
        record = self.record
        return RunSummary(
            run_id=self.run_id,
            folder=self.folder,
            status=record.status,
            world_size=self.config.world_size,
            steps=len(record.steps),
            final_loss=record.steps[-1].loss if record.steps else None,
            losses=tuple(step.loss for step in record.steps),
            step_seconds=tuple(step.seconds for step in record.steps),
            tokens_per_second=record.tokens_per_second,
            metrics=self.metrics(),
        )

    # Commands to it.

    async def stop(self) -> None:
        """Let all ranks end after the step that they are in. Does not wait for that: the iteration ends then."""
        self._entered()
        self._commands.stop()

    async def set_learning_rate(self, rate: float | None) -> int | None:
        """Use this rate from the next step on, on all ranks; None: as configured again.

        Returns the first step with it, or None if the run ended before.
        """
        task = self._entered()
        check_learning_rate(rate)
        return None if task.done() else await self._commands.set_learning_rate(rate)

    def interrupt(self, number: signal.Signals) -> None:
        """As this signal from the user: ranks end after their step; the second time, in it; the third time, at once."""
        if self._entered().done():
            return
        if self.lifecycle.interrupted_by is None:
            self.lifecycle.interrupt(number)
            self._wind_down()
        else:
            self._launch.interrupt(number)

    def _wind_down(self) -> None:
        if not self._is_ready:  # no step is under way
            self._launch.interrupt(signal.SIGINT)
            return
        self._commands.stop()
        loop = asyncio.get_running_loop()
        patience = loop.call_later(_STOP_SECONDS, self._launch.interrupt, signal.SIGINT)
        self._entered().add_done_callback(lambda _: patience.cancel())

    def _send_command(self, **fields: object) -> None:
        self._launch.send(0, "command", **fields)

    # Its ranks.

    def _on_message(self, rank: int, message: Message) -> None:
        if self.lifecycle.take(rank, message) is not None:
            self._news.set()
        match message:
            case {"kind": "ready"} if rank == 0:
                self._is_ready = True
                self._commands.resend()
            case {"kind": "applied", "number": int(number), "step": int(first), "learning_rate": rate} if rank == 0:
                if self._commands.applied(number, first):
                    self.lifecycle.event("learning_rate", step=first, learning_rate=rate)

    async def _supervise(self) -> None:
        """Until all ranks have ended and the folder is complete."""
        lifecycle = self.lifecycle
        try:
            self._result = await self._launch.finish()
            lifecycle.conclude(self._result, was_stopped=self._commands.stops)
        except asyncio.CancelledError:
            self.record.status = Status.INTERRUPTED
            raise
        except LaunchError as error:
            lifecycle.fail(RunError(str(error), step=len(self.record.steps)))
        except Exception as error:  # of on_step
            lifecycle.fail(RunError(f"{type(error).__name__}: {error}", step=len(self.record.steps)))
            raise
        finally:
            self._commands.close()
            await lifecycle.finish()

    def _raise_failure(self) -> None:
        task = self._entered()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        if (failure := self.lifecycle.failure()) is not None:
            raise failure


async def _discard(warm: WarmServer) -> None:
    await asyncio.shield(asyncio.to_thread(warm.discard))
