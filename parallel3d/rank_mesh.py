"""The mesh as users meet it: `async with parallel3d.mesh(dp=2, tp=2, pp=2) as mesh`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from monitoring.events.collectives import CollectiveRecorder
from monitoring.events.loop_lag import LagHistogram, LagMeter
from parallel3d.seeding import OwnDraws
from process_groups.formation import Formation, MeshPlan
from process_groups.group import Group
from process_groups.in_process import InProcessWorld
from process_groups.manager import form, form_in_process
from process_groups.topology import Topology
from runtime.control import rank_control
from runtime.cores import threads_per_rank
from runtime.environment import RankEnvironment, read_environment
from runtime.errors import CommunicationError, Coords, GroupClosed, InvalidCall, NonFiniteGradient, PeerLost, name_rank
from runtime.log_settings import bind_rank
from runtime.threads import DaemonThreads

if TYPE_CHECKING:
    from parallel3d.config import RunConfig

T = TypeVar("T")
Place = tuple[InProcessWorld, int]

_mesh_numbers = itertools.count(1)  # counted where meshes are entered, which is in the same order on every rank
_REPORT_INTERVAL = 1.0  # seconds between two reports to the launcher
_place_in_process: contextvars.ContextVar[Place | None] = contextvars.ContextVar("place_in_process", default=None)


def mesh(
    config: str | Path | RunConfig | None = None,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    order: str | Sequence[Sequence[int]] = "auto",
    backend: str = "auto",
    strategy: str = "default",
    timeout: float = 30.0,
    startup_timeout: float = 120.0,
    threads: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Mesh:
    """A mesh of all started ranks, to be entered with `async with`.

    Give sizes (`mesh(dp=2, tp=2, pp=2)`; what is left out is 1) or a YAML file, where the file says all the rest
    (`mesh("run.yaml", overrides={"parallel.pp": 4})`). `strategy` is for all-reduces that name none. A mesh that the
    started ranks can't fill is refused here.
    """
    place = _place_in_process.get()
    environment = read_environment() if place is None else RankEnvironment(place[1], place[0].size)
    rows = order if isinstance(order, str) else tuple(Coords(*row) for row in order)
    plan = MeshPlan(dp, tp, pp, rows, backend, timeout, startup_timeout, strategy)
    if config is None:
        if overrides:
            raise InvalidCall("mesh: overrides change a YAML file, and none is given.")
        return Mesh(plan, threads, environment, place)
    if plan != MeshPlan() or threads is not None:
        raise InvalidCall("mesh: give sizes or a YAML file, not both; change the file's values with overrides.")
    return _configured_mesh(config, overrides or {}, environment, place)


def alone(config: RunConfig) -> Mesh:
    """A mesh of this process and no other, whatever has started it."""
    return _configured_mesh(config, {}, RankEnvironment(), None)


def _configured_mesh(
    config: str | Path | RunConfig,
    overrides: Mapping[str, Any],
    environment: RankEnvironment,
    place: Place | None,
) -> Mesh:
    from parallel3d.config import RunConfig, load_config  # pydantic takes a while, and sizes don't need it

    if not isinstance(config, RunConfig):
        config = load_config(config, overrides=overrides, world_size=environment.world_size, overrides_are="overrides")
    elif overrides:
        raise InvalidCall("mesh: a RunConfig is complete; load its file with overrides instead.")
    order = config.parallel.order
    plan = MeshPlan(
        dp=config.parallel.dp,
        tp=config.parallel.tp,
        pp=config.parallel.pp,
        order=order if isinstance(order, str) else tuple(Coords(*row) for row in order),
        backend=config.comm.backend,
        timeout=config.comm.timeout,
        startup_timeout=config.comm.startup_timeout,
        strategy=config.comm.strategy,
        strategy_table=config.comm.strategy_table or (),
    )
    return Mesh(plan, config.runtime.threads, environment, place, config)


class Mesh:
    """This rank's view of the mesh, there once it is entered. `config` is None where only sizes were given."""

    rank: int
    world_size: int
    coords: Coords
    topology: Topology
    world: Group
    dp: Group
    tp: Group
    pp: Group
    hosts: tuple[str, ...]
    """The host of each rank."""

    collectives: CollectiveRecorder
    """The calls on this mesh's groups that ended well here: `events()` gives the latest, `totals()` all added up."""

    def __init__(
        self,
        plan: MeshPlan,
        threads: int | None,
        environment: RankEnvironment,
        place: Place | None = None,
        config: RunConfig | None = None,
    ) -> None:
        plan.check_world_size(environment.world_size)
        self.config, self.collectives = config, CollectiveRecorder()
        self._plan, self._threads, self._environment, self._place = plan, threads, environment, place
        self._formation: Formation | None = None
        self._draws: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._engine = DaemonThreads("parallel3d-engine", limit=1)
        self._lag = LagMeter()
        self._control = rank_control() if place is None else None
        self._reporter: asyncio.TimerHandle | None = None
        self._num_computing = 0

    def __repr__(self) -> str:
        if self._formation is None:
            return f"<Mesh of {self._plan}, not entered>"
        return f"<Mesh {self.topology.shape}: rank {self.rank} ({self.coords})>"

    if not TYPE_CHECKING:  # its attributes are declared above, and checkers shall hold us to them

        def __getattr__(self, name: str) -> object:
            hint = " before it is entered: async with parallel3d.mesh(...) as mesh" if self._formation is None else ""
            raise AttributeError(f"the mesh has no {name!r}{hint}")

    async def __aenter__(self) -> Self:
        if self._formation is not None:
            raise InvalidCall("this mesh was entered before; make a new one with parallel3d.mesh(...).")
        if self._place is None:
            self._set_threads()
            self._number = next(_mesh_numbers)
            self._formation = await form(self._plan, self._environment, self._number, self.collectives)
        else:
            self._formation = form_in_process(self._plan, *self._place, self.collectives)
        self.rank, self.topology, self.hosts = (
            self._formation.rank,
            self._formation.topology,
            self._formation.hosts,
        )
        self.world_size, self.coords = self.topology.world_size, self.topology.coords(self.rank)
        for name, group in self._formation.groups.items():
            setattr(self, name, group)
        bind_rank(self.rank, self.coords)
        self._lag.start(self._formation.beat)
        if self._control is not None:
            self._control.send("mesh", coords=list(self.coords))
            self._report()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        formation = self._formation
        assert formation is not None
        try:
            # Every rank raises NonFiniteGradient: no peer waits, but some may still read the values that show it.
            if error is not None and not isinstance(error, NonFiniteGradient):
                formation.abort(self._exit_reason(error))
            await formation.close()
        except BaseException as late:
            formation.abort(self._exit_reason(late))
            if error is None or not isinstance(late, Exception):  # else the error that was raised first says more
                raise
        finally:
            self._lag.stop()
            if self._reporter is not None:
                self._reporter.cancel()
                self._send_report()
            self._engine.stop()
            formation.release()

    async def compute(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a computation on the engine thread, one at a time, so that the event loop stays responsive.

        Cancelling the await does not stop a function that already runs.
        """
        if inspect.iscoroutinefunction(function):
            raise InvalidCall(f"compute: {function.__name__} is async; await it on the event loop instead.")
        context = contextvars.copy_context()

        def run() -> T:
            with self._draws:
                return context.run(function, *args, **kwargs)

        self._num_computing += 1
        try:
            return await asyncio.wrap_future(self._engine.submit(run))
        finally:
            self._num_computing -= 1

    @property
    def shares_process(self) -> bool:
        """Whether other ranks are tasks of the same process."""
        return self._place is not None

    def draw_apart(self) -> None:
        """From now on computations draw random numbers of this rank's own, though it shares its process."""
        self._draws = OwnDraws()

    @property
    def is_computing(self) -> bool:
        """Whether somebody waits for the engine thread."""
        return self._num_computing > 0

    def abort(self, error: CommunicationError) -> None:
        """Close all groups on every rank: what is under way ends soon, with an error."""
        assert self._formation is not None
        self._formation.abort(error)

    def fail(self, error: BaseException) -> None:
        """Close all groups on every rank because a step failed here; peers' calls raise the abort reason."""
        self.abort(self.abort_reason(error))

    def abort_reason(self, error: BaseException | None) -> CommunicationError:
        """What calls of peers raise after a step failed here: a communication error itself, GroupClosed if the step was
        cancelled (None), PeerLost for any other error."""
        if isinstance(error, CommunicationError):
            return error
        return self._reason(error, "failed in the step with", GroupClosed, "cancelled the step")

    def _exit_reason(self, error: BaseException) -> CommunicationError:
        """The abort reason when the mesh is left with an error."""
        return self._reason(error, "failed with", PeerLost, "was cancelled")

    def _reason(
        self, error: BaseException | None, failed: str, when_cancelled: type[CommunicationError], cancelled: str
    ) -> CommunicationError:
        here = name_rank(self.rank, self.coords)
        if error is None or isinstance(error, asyncio.CancelledError):
            return when_cancelled(f"{here} {cancelled}", rank=self.rank, coords=self.coords)
        text = f"{here} {failed} {type(error).__name__}: {error}"
        return PeerLost(text, rank=self.rank, coords=self.coords)

    @property
    def loop_lag(self) -> LagHistogram:
        """How late this rank's event loop ran its timers since the mesh was entered."""
        return self._lag.histogram

    def _set_threads(self) -> None:
        if self._threads is None and "OMP_NUM_THREADS" in os.environ:
            return  # the launcher, or the user, has decided
        torch.set_num_threads(self._threads or threads_per_rank(self._environment.local_world_size))

    def _report(self) -> None:
        self._send_report()
        self._reporter = asyncio.get_running_loop().call_later(_REPORT_INTERVAL, self._report)

    def _send_report(self) -> None:
        assert self._control is not None
        for kind, fields in self.reports():
            self._control.send(kind, **fields)

    def reports(self) -> list[tuple[str, dict[str, object]]]:
        """What a launcher is told each second: the kinds and fields of control messages."""
        number = 0 if self._place is not None else self._number
        return [
            ("loop_lag", self._lag.histogram.to_wire()),
            ("collectives", {"mesh": number, **self.collectives.to_wire()}),
        ]


async def _noting_the_rank(main: Callable[[], Coroutine[Any, Any, T]], rank: int) -> T:
    try:
        return await main()
    except Exception as error:
        error.add_note(f"raised in rank {rank} of parallel3d.in_process")
        raise


async def in_process(main: Callable[[], Coroutine[Any, Any, T]], ranks: int) -> list[T]:
    """Run `main` once for each rank, as tasks of this loop; `parallel3d.mesh` inside it gives that rank's mesh.

    For tests: nothing is started, and the same `main` runs under `parallel3d launch`. Returns what each rank
    returned; when a rank raises, the others are cancelled and its error is raised.
    """
    world = InProcessWorld(ranks)

    def start(rank: int, tasks: asyncio.TaskGroup) -> asyncio.Task[T]:
        context = contextvars.copy_context()
        context.run(_place_in_process.set, (world, rank))
        return tasks.create_task(_noting_the_rank(main, rank), name=f"rank {rank}", context=context)

    try:
        async with asyncio.TaskGroup() as tasks:
            started = [start(rank, tasks) for rank in range(ranks)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in started]
