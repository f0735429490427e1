"""All-reduce in two levels: directly inside a host, and in rings between hosts. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from process_groups.strategies.program import Program, Step, split, tidy, transfer
from process_groups.strategies.ring import ring_steps


def hierarchical(size: int, rank: int, numel: int, hosts: Sequence[int]) -> Program:
    """Reduce-scatter in the host, ring all-reduce across hosts, all-gather in the host. hosts[i] is rank i's host.

    There are as many slices as the smallest host has ranks, and a ring for each. For hosts [0, 0, 0, 1, 1]:

                 host 0                host 1
    slice 0      rank 0 ←── ring ──→   rank 3
    slice 1      rank 1 ←── ring ──→   rank 4
    none         rank 2

    Rank 0 first gets slice 0 of ranks 1 and 2 and at last sends them the result; rank 2 only sends and receives. So
    each element crosses between hosts as often as in a ring that has one rank per host.
    """
    assert len(hosts) == size, (size, hosts)
    ranks_of: dict[int, list[int]] = {}  # in the order in which hosts occur, so that lonely ranks form a plain ring
    for member, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(member)
    neighbours = ranks_of[hosts[rank]]
    slices = split(range(numel), min(map(len, ranks_of.values())))
    of_others = tuple(transfer(owner, part) for owner, part in zip(neighbours, slices, strict=False) if owner != rank)
    place = neighbours.index(rank)
    if place >= len(slices):
        return tidy([Step(sends=of_others), Step(replaces=of_others)])

    own = tuple(transfer(peer, slices[place]) for peer in neighbours if peer != rank)
    across = [ranks[place] for ranks in ranks_of.values()]
    return tidy(
        [
            Step(sends=of_others, reduces=own),
            *ring_steps(across, across.index(rank), slices[place]),
            Step(sends=own, replaces=of_others),
        ]
    )
