"""Forms a mesh in this rank; ranks are processes, or tasks of one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from concurrent.futures import Future

import torch

from monitoring.events.collectives import CollectiveRecorder
from process_groups.call import Place
from process_groups.formation import GROUP_NAMES, Formation, MeshPlan, ranks_of
from process_groups.group import Group
from process_groups.in_process import CPU, InProcessWorld
from process_groups.rendezvous import Rendezvous
from runtime.environment import PrivateFile, RankEnvironment
from runtime.errors import DeadlineExceeded, Parallel3DError, PeerLost
from runtime.threads import DaemonThreads

_GRACE = 5.0  # seconds; the rendezvous times out first, with a more specific error


def form_in_process(
    plan: MeshPlan, world: InProcessWorld, rank: int, recorder: CollectiveRecorder | None = None
) -> Formation:
    """Form the mesh of a rank that is a task of this process."""
    plan.check_world_size(world.size)
    topology, number = plan.topology(world.size), world.next_mesh(rank)
    groups = {}
    for name in GROUP_NAMES:
        ranks = ranks_of(topology, name, rank)
        me = ranks.index(rank)
        transport = world.transport(number, name, ranks, me, topology.coords) if len(ranks) > 1 else None
        groups[name] = Group(
            name,
            ranks,
            me,
            transport,
            coords_of=topology.coords,
            timeout=plan.timeout,
            device=CPU,
            strategy=plan.strategy,
            recorder=recorder,
        )
    return Formation(rank, topology, (socket.gethostname(),) * world.size, groups)


async def form(
    plan: MeshPlan, environment: RankEnvironment, number: int, recorder: CollectiveRecorder | None = None
) -> Formation:
    """Form the mesh of a rank that is a process. `number` counts this rank's meshes; all ranks must pass the same.

    The rendezvous blocks, so it runs in a thread.
    """
    plan.check_world_size(environment.world_size)
    threads = DaemonThreads("parallel3d-form", limit=1)
    forming = threads.submit(Rendezvous(plan, environment, number, recorder).form)
    threads.stop()
    try:
        async with asyncio.timeout(plan.startup_timeout + _GRACE):
            formation = await asyncio.wrap_future(forming)
    except TimeoutError as late:
        if isinstance(late, Parallel3DError):
            raise
        forming.add_done_callback(_discard)
        raise DeadlineExceeded(
            f"start-up: the store did not answer within {plan.startup_timeout:g} s; is its host still reachable?",
            action="start-up",
        ) from None
    except asyncio.CancelledError:
        forming.add_done_callback(_discard)
        raise
    try:
        if isinstance(environment.meeting_place, PrivateFile):
            await _remove_meeting_file(formation, environment.meeting_place.path)
        if plan.strategy == "adaptive" and not plan.strategy_table:
            await _measure(formation)
    except BaseException as error:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        _give_up(formation, "was cancelled" if is_cancelled else f"failed with {type(error).__name__}: {error}")
        raise
    return formation


async def _measure(formation: Formation) -> None:
    """Make each group's first adaptive call, which measures; it is large enough that strategies differ."""
    for group in formation.groups.values():
        if group.size > 1:
            await group.all_reduce(torch.zeros(1 << 18, device=group.device))


def _discard(forming: Future[Formation]) -> None:
    if forming.exception() is None:
        _give_up(forming.result(), "was cancelled")


def _give_up(formation: Formation, how: str) -> None:
    """Abort and release a mesh that is not needed any more, so that its peers don't wait."""
    place = Place(formation.rank, formation.topology.coords(formation.rank))
    formation.abort(PeerLost(f"{place} {how}", rank=place.rank, coords=place.coords))
    formation.release()


async def _remove_meeting_file(formation: Formation, path: str) -> None:
    """Remove the rendezvous file, which a formed mesh doesn't need. The second barrier ensures that the next mesh
    doesn't find it."""
    world = formation.groups["world"]
    await world.barrier()
    if formation.rank == 0:
        os.unlink(path)
        with contextlib.suppress(OSError):  # another job of this user may be using the folder
            os.rmdir(os.path.dirname(path))
    await world.barrier()
