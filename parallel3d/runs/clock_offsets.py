"""How far the clocks of other hosts are from rank 0's, found by pings: one rank of each host answers for all of it.

    rank 0    t0 ───────────►  answer: its own time   t1
              t3 ◄───────────

If both ways take equally long, t1 was at (t0 + t3) / 2. The quickest of several rounds errs least: by less than half of
what it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from parallel3d.rank_mesh import Mesh
from process_groups.group import Group

Clock = Callable[[], float]
ROUNDS = 8


class Ping(NamedTuple):
    """One round."""

    sent: float
    answered: float
    """In the other's clock."""
    received: float

    @property
    def seconds(self) -> float:
        return self.received - self.sent

    @property
    def offset(self) -> float:
        """To be added to the other's moments."""
        return (self.sent + self.received) / 2 - self.answered


def best_offset(pings: Sequence[Ping]) -> float:
    """Of the quickest round."""
    return min(pings, key=lambda ping: ping.seconds).offset


def answering_ranks(hosts: Sequence[str]) -> dict[str, int]:
    """The first rank of each host but rank 0's."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    del first[hosts[0]]
    return first


async def measure_offsets(mesh: Mesh, clock: Clock = time.monotonic) -> list[float] | None:
    """Of each rank, the seconds to be added to its moments to get rank 0's; None on other ranks than that. All ranks
    have to call it. Nothing but sends and receives on `mesh.world`, so that it may go on beside collectives."""
    answering = answering_ranks(mesh.hosts)
    if mesh.rank == 0:
        of_host = {host: await _ping(mesh.world, rank, clock) for host, rank in answering.items()}
        return [of_host.get(host, 0.0) for host in mesh.hosts]
    if mesh.rank in answering.values():
        await _answer(mesh.world, clock)
    return None


async def clock_offset(mesh: Mesh, clock: Clock = time.monotonic) -> float:
    """Of this rank. All ranks have to call it; on a single host nothing is asked."""
    if len(set(mesh.hosts)) == 1:
        return 0.0
    found = await measure_offsets(mesh, clock)
    shared = torch.tensor(found or [0.0] * mesh.world_size, dtype=torch.float64, device=mesh.world.device)
    await mesh.world.broadcast(shared, root=0)
    return float(shared[mesh.rank])


async def _ping(world: Group, rank: int, clock: Clock) -> float:
    pings, word = [], torch.zeros(1, dtype=torch.float64, device=world.device)
    for _ in range(ROUNDS):
        sent = clock()
        await world.send(word, rank)
        await world.recv(word, rank)
        pings.append(Ping(sent, float(word), clock()))
    return best_offset(pings)


async def _answer(world: Group, clock: Clock) -> None:
    word = torch.zeros(1, dtype=torch.float64, device=world.device)
    for _ in range(ROUNDS):
        await world.recv(word, 0)
        word.fill_(clock())
        await world.send(word, 0)
