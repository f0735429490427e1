"""What `bench collectives` measures, and in which order: in every round each contestant has its turns at a size.

size 4 B     round 1   default ring … staged, ring … staged default, … | gloo gloo … | mpi mpi … | memory limit …
             round 2   gloo gloo … | mpi mpi … | memory limit … | ring … staged default, …   (another crew begins)
             …
size 4 KiB   round 1   …

Short turns, and their median: a busy moment of the machine spoils some turns, not a round. Ours alternate from turn to
turn, for they differ by less than this machine's speed does from second to second.

All crews live through the whole run, so that nothing but the measured calls happens within a round; while one is timed,
the others wait in a read and hold no buffers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from parallel3d.benchmarks.crews import Crew, Reception, run_launched
from parallel3d.benchmarks.figures import GLOO, MEMORY_LIMIT, MPI, Measured, Run
from parallel3d.benchmarks.mpirun import Mpi, run_mpi
from parallel3d.benchmarks.plan import Plan
from parallel3d.benchmarks.wire import Command
from parallel3d.formatting import show_size
from runtime.cores import num_cores
from runtime.errors import BenchmarkError

OURS = "ours"
T = TypeVar("T")
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One line of the table: a way to make the call, and whose processes make it."""

    name: str
    crew: str
    strategy: str = "default"
    registered: bool = True
    shared: bool = False


def all_reducers(strategies: Sequence[str]) -> list[Contestant]:
    """Who takes part in the all-reduce; those of one crew stand together."""
    return [
        *(Contestant(strategy, OURS, strategy) for strategy in strategies),
        Contestant("shared", OURS, shared=True),
        Contestant("staged", OURS, registered=False),
        *(Contestant(peer, peer) for peer in (GLOO, MPI, MEMORY_LIMIT)),
    ]


SENDERS = [Contestant("registered", OURS), Contestant("unregistered", OURS, registered=False), Contestant(GLOO, GLOO)]


async def measure(
    plan: Plan, mpi: Mpi | None, folder: Path, progress: Tell, note: Tell, finished: Callable[[Run], None]
) -> list[Run]:
    """Everything, one number of ranks after the other, each told when it is `finished`. `folder` is private to us."""
    runs = []
    for num_ranks in plan.ranks:
        runs.append(await _measure_ranks(plan, num_ranks, mpi, folder, progress, note))
        finished(runs[-1])  # between two measurements: nobody is disturbed by somebody who reads slowly
    return runs


async def _measure_ranks(plan: Plan, num_ranks: int, mpi: Mpi | None, folder: Path, progress: Tell, note: Tell) -> Run:
    progress(f"{num_ranks} ranks: starting")
    async with Reception(folder) as reception, AsyncExitStack() as stack:
        crews = {crew.name: crew for crew in _crews(num_ranks, mpi, reception, folder)}
        for crew in crews.values():  # all at once: most of it is waiting for imports
            await stack.enter_async_context(crew)
        for crew in list(crews.values()):
            try:
                await crew.ready()
            except BenchmarkError as error:
                if crew.name != MPI:
                    raise
                # An installation of the user's that does not work is no reason to measure nothing.
                await crews.pop(MPI).dismiss()
                note(f"mpi is left out of {num_ranks} ranks: {error}")
        return Run(
            num_ranks,
            tuple([await _measure_size(plan, "all_reduce", size, crews, progress) for size in plan.sizes]),
            tuple([await _measure_size(plan, "send", size, crews, progress) for size in plan.sizes]),
        )


def _crews(num_ranks: int, mpi: Mpi | None, reception: Reception, folder: Path) -> list[Crew]:
    socket, cores = str(reception.path), num_cores()
    crews = [
        Crew(OURS, num_ranks, reception, partial(run_launched, "our_rank", num_ranks, OURS, socket)),
        Crew(GLOO, num_ranks, reception, partial(run_launched, "gloo_rank", num_ranks, GLOO, socket)),
    ]
    if mpi is not None:
        crews.append(Crew(MPI, num_ranks, reception, partial(run_mpi, mpi, num_ranks, folder, MPI, socket)))
    limit = partial(run_launched, "memory_rank", cores, MEMORY_LIMIT, socket, str(num_ranks))
    return [*crews, Crew(MEMORY_LIMIT, cores, reception, limit)]


async def _ask(crew: Crew, command: Command, where: str) -> float:
    try:
        return await crew.ask(command)
    except BenchmarkError as error:
        raise BenchmarkError(f"{where}: {error}") from None


def _rotated(contestants: list[T], by: int) -> list[T]:
    """Whoever comes first finds the cores and caches cold, so it is another one each time."""
    first = by % len(contestants)
    return contestants[first:] + contestants[:first]


async def _measure_size(plan: Plan, kind: str, num_bytes: int, crews: dict[str, Crew], progress: Tell) -> Measured:
    all_of_kind = all_reducers(plan.strategies) if kind == "all_reduce" else SENDERS
    contestants = [each for each in all_of_kind if each.crew in crews]
    taking_part = list(dict.fromkeys(each.crew for each in contestants))
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    turns, repeats = plan.turns(num_bytes), plan.repeats(num_bytes)
    for round_number in range(plan.rounds):
        in_turns: dict[str, list[float]] = {each.name: [] for each in contestants}
        for crew in _rotated(taking_part, round_number):
            for turn in range(turns):
                for each in _rotated([each for each in contestants if each.crew == crew], round_number + turn):
                    where = f"{kind} of {show_size(num_bytes)}, round {round_number + 1} of {plan.rounds}: {each.name}"
                    if turn == 0:  # drawing it takes longer than a turn
                        progress(where)
                    how = each.strategy, each.registered, each.shared
                    is_first = round_number == turn == 0
                    command = Command(kind, num_bytes, plan.dtype, repeats, *how, check=is_first)
                    in_turns[each.name].append(await _ask(crews[crew], command, where))
            await _ask(crews[crew], Command("rest"), where)
        for name, of_round in in_turns.items():
            seconds[name].append(statistics.median(of_round))
    return Measured(num_bytes, num_bytes // plan.element_size, turns * repeats, seconds)
