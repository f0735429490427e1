"""The measurement loop of `bench collectives`: for each size, every round times every contestant.

size 4 B     round 1   default ring … staged, ring … staged default, … | gloo gloo … | mpi mpi … | memory limit …
             round 2   gloo gloo … | mpi mpi … | memory limit … | ring … staged default, …   (another starts)
             …
size 4 KiB   round 1   …

A round's value is the median of several short turns, so a short disturbance on the machine affects some turns but not
the round. Our own contestants alternate from turn to turn, because the differences between them are smaller than the
machine's speed changes from second to second.

Worker processes are started once per number of ranks, so rounds include no start-up. While one contestant is timed, the
others block in a read and hold no buffers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from parallel3d.benchmarks.mpirun import Mpi, run_mpi
from parallel3d.benchmarks.plan import Plan
from parallel3d.benchmarks.results import GLOO, MEMORY_LIMIT, MPI, Measured, Run
from parallel3d.benchmarks.worker import Command
from parallel3d.benchmarks.worker_processes import Listener, WorkerProcesses, run_launched
from parallel3d.formatting import show_size
from runtime.cores import num_cores
from runtime.errors import BenchmarkError

OURS = "ours"
T = TypeVar("T")
Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One line of the table: a variant of the call, and the name of the worker processes that run it."""

    name: str
    workers: str
    strategy: str = "default"
    registered: bool = True
    shared: bool = False


def all_reducers(strategies: Sequence[str]) -> list[Contestant]:
    """The contestants of the all-reduce; those that share worker processes are adjacent."""
    return [
        *(Contestant(strategy, OURS, strategy) for strategy in strategies),
        Contestant("shared", OURS, shared=True),
        Contestant("staged", OURS, registered=False),
        *(Contestant(peer, peer) for peer in (GLOO, MPI, MEMORY_LIMIT)),
    ]


SENDERS = [Contestant("registered", OURS), Contestant("unregistered", OURS, registered=False), Contestant(GLOO, GLOO)]


async def measure(
    plan: Plan, mpi: Mpi | None, folder: Path, progress: Notify, note: Notify, finished: Callable[[Run], None]
) -> list[Run]:
    """Run the plan for each number of ranks and call `finished` after each. `folder` must be private."""
    runs = []
    for num_ranks in plan.ranks:
        runs.append(await _measure_ranks(plan, num_ranks, mpi, folder, progress, note))
        finished(runs[-1])  # between measurements, so that slow output doesn't disturb them
    return runs


async def _measure_ranks(
    plan: Plan, num_ranks: int, mpi: Mpi | None, folder: Path, progress: Notify, note: Notify
) -> Run:
    progress(f"{num_ranks} ranks: starting")
    async with Listener(folder) as listener, AsyncExitStack() as stack:
        workers = {each.name: each for each in _workers(num_ranks, mpi, listener, folder)}
        for each in workers.values():  # start all before waiting for any: most of the time is imports
            await stack.enter_async_context(each)
        for each in list(workers.values()):
            try:
                await each.ready()
            except BenchmarkError as error:
                if each.name != MPI:
                    raise
                # Without a working MPI the others are still worth measuring.
                await workers.pop(MPI).dismiss()
                note(f"mpi is left out of {num_ranks} ranks: {error}")
        return Run(
            num_ranks,
            tuple([await _measure_size(plan, "all_reduce", size, workers, progress) for size in plan.sizes]),
            tuple([await _measure_size(plan, "send", size, workers, progress) for size in plan.sizes]),
        )


def _workers(num_ranks: int, mpi: Mpi | None, listener: Listener, folder: Path) -> list[WorkerProcesses]:
    socket, cores = str(listener.path), num_cores()
    workers = [
        WorkerProcesses(OURS, num_ranks, listener, partial(run_launched, "our_rank", num_ranks, OURS, socket)),
        WorkerProcesses(GLOO, num_ranks, listener, partial(run_launched, "gloo_rank", num_ranks, GLOO, socket)),
    ]
    if mpi is not None:
        run = partial(run_mpi, mpi, num_ranks, folder, MPI, socket)
        workers.append(WorkerProcesses(MPI, num_ranks, listener, run))
    limit = partial(run_launched, "memory_rank", cores, MEMORY_LIMIT, socket, str(num_ranks))
    return [*workers, WorkerProcesses(MEMORY_LIMIT, cores, listener, limit)]


async def _ask(workers: WorkerProcesses, command: Command, where: str) -> float:
    try:
        return await workers.ask(command)
    except BenchmarkError as error:
        raise BenchmarkError(f"{where}: {error}") from None


def _rotated(contestants: list[T], by: int) -> list[T]:
    """Rotate the list, so that a different one goes first each time: the first one runs on cold cores and caches."""
    first = by % len(contestants)
    return contestants[first:] + contestants[:first]


async def _measure_size(
    plan: Plan, kind: str, num_bytes: int, workers: dict[str, WorkerProcesses], progress: Notify
) -> Measured:
    all_of_kind = all_reducers(plan.strategies) if kind == "all_reduce" else SENDERS
    contestants = [each for each in all_of_kind if each.workers in workers]
    taking_part = list(dict.fromkeys(each.workers for each in contestants))
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    turns, repeats = plan.turns(num_bytes), plan.repeats(num_bytes)
    for round_number in range(plan.rounds):
        in_turns: dict[str, list[float]] = {each.name: [] for each in contestants}
        for name in _rotated(taking_part, round_number):
            for turn in range(turns):
                for each in _rotated([each for each in contestants if each.workers == name], round_number + turn):
                    where = f"{kind} of {show_size(num_bytes)}, round {round_number + 1} of {plan.rounds}: {each.name}"
                    if turn == 0:  # printing progress takes longer than a turn
                        progress(where)
                    how = each.strategy, each.registered, each.shared
                    is_first = round_number == turn == 0
                    command = Command(kind, num_bytes, plan.dtype, repeats, *how, check=is_first)
                    in_turns[each.name].append(await _ask(workers[name], command, where))
            await _ask(workers[name], Command("rest"), where)
        for name, of_round in in_turns.items():
            seconds[name].append(statistics.median(of_round))
    return Measured(num_bytes, num_bytes // plan.element_size, turns * repeats, seconds)
