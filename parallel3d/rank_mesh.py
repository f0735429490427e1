"""The mesh as users meet it: `async with parallel3d.mesh(dp=2, tp=2, pp=2) as mesh`."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from monitoring.loop_lag import LagHistogram, LagMeter

from parallel3d.config import RunConfig, load_config
from process_groups.group import Group
from process_groups.in_process import InProcessWorld
from process_groups.manager import Formation, MeshPlan, form, form_in_process
from process_groups.topology import Topology
from runtime.control import rank_control
from runtime.environment import RankEnvironment, read_environment
from runtime.errors import Coords, InvalidCall, PeerLost, name_rank
from runtime.threads import DaemonThreads

T = TypeVar("T")

_REPORT_INTERVAL = 1.0  # seconds between two reports of the event loop's lag to the launcher
_place_in_process: contextvars.ContextVar[tuple[InProcessWorld, int] | None] = contextvars.ContextVar(
    "place_in_process", default=None
)


def mesh(
    config: str | Path | RunConfig | None = None,
    *,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    order: str | Sequence[Sequence[int]] | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    startup_timeout: float | None = None,
    threads: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Mesh:
    """A mesh of all started ranks, to be entered with `async with`.

    Give sizes (`mesh(dp=2, tp=2, pp=2)`) or a YAML file (`mesh("run.yaml", overrides={"parallel.pp": 4})`). Sizes
    left out are 1. Checked at once: a mesh that the started ranks can't fill raises here.
    """
    given = {"parallel.dp": dp, "parallel.tp": tp, "parallel.pp": pp, "parallel.order": order,
             "comm.backend": backend, "comm.timeout": timeout, "comm.startup_timeout": startup_timeout,
             "runtime.threads": threads}  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    place = _place_in_process.get()
    environment = read_environment() if place is None else RankEnvironment(place[1], place[0].size)
    if isinstance(config, RunConfig):
        if given or overrides:
            raise InvalidCall("mesh: a RunConfig is complete; load the file with overrides instead.")
        return Mesh(config, environment, place)
    settings = load_config(
        config,
        overrides={**(overrides or {}), **given},
        world_size=environment.world_size,
        for_training=config is not None,
    )
    return Mesh(settings, environment, place)


class Mesh:
    """This rank's view of the mesh. Attributes other than `config` exist once it is entered."""

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

    def __init__(
        self, config: RunConfig, environment: RankEnvironment, place: tuple[InProcessWorld, int] | None
    ) -> None:
        self.config = config
        self._environment, self._place = environment, place
        self._plan = _plan_of(config)
        self._plan.check_world_size(environment.world_size)
        self._formation: Formation | None = None
        self._engine = DaemonThreads("parallel3d-engine", limit=1)
        self._lag = LagMeter()
        self._control = rank_control() if place is None else None
        self._reporter: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self._formation is not None:
            raise InvalidCall("this mesh was entered before; make a new one with parallel3d.mesh(...).")
        if self._place is None:
            self._set_threads()
            self._formation = await form(self._plan, self._environment)
        else:
            self._formation = form_in_process(self._plan, *self._place)
        self.rank, self.topology, self.hosts = self._formation.rank, self._formation.topology, self._formation.hosts
        self.world_size, self.coords = self.topology.world_size, self.topology.coords(self.rank)
        for name, group in self._formation.groups.items():
            setattr(self, name, group)
        self._lag.start()
        if self._control is not None:
            self._control.send("mesh", coords=list(self.coords))
            self._report_lag()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        formation = self._formation
        assert formation is not None
        try:
            if error is not None:
                formation.abort(self._farewell(error))
            await formation.close()
        except BaseException as late:
            formation.abort(self._farewell(late))
            raise
        finally:
            self._lag.stop()
            if self._reporter is not None:
                self._reporter.cancel()
                self._send_lag()
            self._engine.stop()
            formation.release()

    async def compute(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:  # noqa: ANN401
        """Run a computation on the engine thread, one at a time, so that the event loop stays responsive.

        Cancelling the await does not stop a function that already runs.
        """
        context = contextvars.copy_context()
        return await asyncio.wrap_future(self._engine.submit(lambda: context.run(function, *args, **kwargs)))

    @property
    def loop_lag(self) -> LagHistogram:
        """How late this rank's event loop ran its timers since the mesh was entered."""
        return self._lag.histogram

    def _set_threads(self) -> None:
        threads = self.config.runtime.threads
        if threads is None and "OMP_NUM_THREADS" in os.environ:
            return  # the launcher, or the user, has decided
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(threads or max(1, cores // self._environment.local_world_size))

    def _farewell(self, error: BaseException) -> PeerLost:
        """What peers are told that still wait for this rank."""
        why = "was cancelled" if isinstance(error, asyncio.CancelledError) else f"failed with {type(error).__name__}"
        text = "" if isinstance(error, asyncio.CancelledError) else f": {error}"
        return PeerLost(
            f"{name_rank(self.rank, self.coords)} {why}{text}", rank=self.rank, coords=self.coords
        )

    def _report_lag(self) -> None:
        self._send_lag()
        self._reporter = asyncio.get_running_loop().call_later(_REPORT_INTERVAL, self._report_lag)

    def _send_lag(self) -> None:
        assert self._control is not None
        self._control.send("loop_lag", **self._lag.histogram.to_wire())


def _plan_of(config: RunConfig) -> MeshPlan:
    order = config.parallel.order
    return MeshPlan(
        dp=config.parallel.dp,
        tp=config.parallel.tp,
        pp=config.parallel.pp,
        order=order if isinstance(order, str) else tuple(Coords(*row) for row in order),
        backend=config.comm.backend,
        timeout=config.comm.timeout,
        startup_timeout=config.comm.startup_timeout,
    )


async def in_process(main: Callable[[], Coroutine[Any, Any, T]], ranks: int) -> list[T]:
    """Run `main` once for each rank, as tasks of this loop; `parallel3d.mesh` inside it gives that rank's mesh.

    For tests: nothing is started, and the same `main` runs under `parallel3d launch`. Returns what each rank
    returned; when a rank raises, the others are cancelled and its error is raised.
    """
    world = InProcessWorld(ranks)

    def start(rank: int, tasks: asyncio.TaskGroup) -> asyncio.Task[T]:
        context = contextvars.copy_context()
        context.run(_place_in_process.set, (world, rank))
        return tasks.create_task(main(), name=f"rank {rank}", context=context)

    try:
        async with asyncio.TaskGroup() as tasks:
            started = [start(rank, tasks) for rank in range(ranks)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in started]
