"""A mesh over a network: two hosts of two ranks, what crosses between them, and how fast."""

from __future__ import annotations

import time

import pytest
import torch

import parallel3d
from tests.support.hosts import BURST
from tests.support.ranks import Ranks, Tell

pytestmark = pytest.mark.slow

RANKS_PER_HOST = [2, 2]
STRATEGIES = ("default", "ring", "tree", "hierarchical")
SOME = 4 << 20  # bytes
MANY = 16 << 20


async def tell_about_the_mesh(tell: Tell) -> None:
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        sums = []
        for group in (mesh.world, mesh.dp, mesh.tp):
            tensor = torch.tensor([10.0**mesh.rank])
            await group.all_reduce(tensor)
            sums.append(tensor.item())
        tell((mesh.hosts, tuple(mesh.coords), sums))


def test_a_mesh_of_two_hosts(two_hosts):
    first, second = two_hosts.names
    where = (first, first, second, second)
    with Ranks(tell_about_the_mesh, two_hosts.variables(RANKS_PER_HOST)) as ranks:
        assert [rank.hear() for rank in ranks] == [
            (where, (0, 0, 0), [1111, 101, 11]),
            (where, (0, 1, 0), [1111, 1010, 11]),
            (where, (1, 0, 0), [1111, 101, 1100]),
            (where, (1, 1, 0), [1111, 1010, 1100]),
        ]
        assert [rank.finish() for rank in ranks] == [0] * 4


async def reduce(tell: Tell, strategy: str, num_bytes: int) -> None:
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        values = torch.arange(num_bytes // 4, dtype=torch.float32) % 1000  # small enough for exact sums
        tensor = values * 10**mesh.rank
        await mesh.tp.barrier()
        begin = time.monotonic()
        await mesh.world.all_reduce(tensor, strategy=strategy)
        tell((torch.equal(tensor, values * 1111), begin, time.monotonic()))


def seconds_to_reduce(hosts, strategy: str, num_bytes: int) -> float:
    with Ranks(reduce, hosts.variables(RANKS_PER_HOST), (strategy, num_bytes)) as ranks:
        heard = [rank.hear() for rank in ranks]
        assert [rank.finish() for rank in ranks] == [0] * 4
    assert [is_right for is_right, _, _ in heard] == [True] * 4
    return max(end for _, _, end in heard) - max(begin for _, begin, _ in heard)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_an_all_reduce_moves_between_hosts(two_hosts, strategy):
    """From each host at least the tensor, as no other can know what its ranks hold; and not once for every rank."""
    seconds_to_reduce(two_hosts, strategy, SOME)
    for host in range(2):
        assert SOME <= two_hosts.bytes_sent(host) < 4 * SOME
        assert SOME <= two_hosts.bytes_received(host) < 4 * SOME


def test_hierarchical_sends_less_between_hosts_than_a_ring_and_is_faster(two_hosts):
    two_hosts.limit("200mbit")
    seconds, sent = {}, {}
    for strategy in ("ring", "hierarchical"):
        before = two_hosts.bytes_sent(0)
        seconds[strategy] = seconds_to_reduce(two_hosts, strategy, MANY)
        sent[strategy] = two_hosts.bytes_sent(0) - before
    # A ring of four passes two thirds of all parts on to its neighbour, twice; a hierarchy each byte once.
    assert 1.45 * MANY < sent["ring"] < 1.7 * MANY
    assert MANY <= sent["hierarchical"] < 1.2 * MANY
    assert seconds["hierarchical"] < seconds["ring"]


async def adapt(tell: Tell) -> None:
    async with parallel3d.mesh(dp=2, tp=2, strategy="adaptive") as mesh:
        tensor = torch.full((SOME // 4,), float(mesh.rank))
        await mesh.world.all_reduce(tensor)
        tell((tensor.unique().tolist(), mesh.world.explain(MANY)))


def test_adaptive_measures_the_network_and_all_ranks_agree(two_hosts):
    two_hosts.limit("200mbit")
    with Ranks(adapt, two_hosts.variables(RANKS_PER_HOST)) as ranks:
        heard = [rank.hear() for rank in ranks]
        assert [rank.finish() for rank in ranks] == [0] * 4
    assert [sums for sums, _ in heard] == [[6.0]] * 4
    explanations = [explanation for _, explanation in heard]
    assert all(explanation == explanations[0] for explanation in explanations)
    assert explanations[0].strategy == "hierarchical"
    seconds = explanations[0].seconds  # without those that were hopeless at smaller sizes
    assert seconds["hierarchical"] == min(seconds.values())


async def exchange(tell: Tell, one: int, other: int, num_bytes: int) -> None:
    """From one rank to the other; both tell when, on the clock that all processes share."""
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        begin = time.monotonic()
        if mesh.rank == one:
            await mesh.world.send(torch.full((num_bytes,), 7, dtype=torch.uint8), other)
        if mesh.rank == other:
            tensor = torch.zeros(num_bytes, dtype=torch.uint8)
            await mesh.world.recv(tensor, one)
            assert bool((tensor == 7).all())
        tell((begin, time.monotonic()))


def seconds_from_rank_0_to(rank: int, hosts, num_bytes: int) -> float:
    with Ranks(exchange, hosts.variables(RANKS_PER_HOST), (0, rank, num_bytes)) as ranks:
        times = [each.hear() for each in ranks]
        assert [each.finish() for each in ranks] == [0] * 4
    return times[rank][1] - times[0][0]


def test_bytes_between_hosts_cannot_be_faster_than_the_network(two_hosts):
    two_hosts.limit("200mbit")
    assert seconds_from_rank_0_to(2, two_hosts, MANY) >= (MANY - BURST) * 8 / 200e6
    assert two_hosts.bytes_sent(0) >= MANY


def test_bytes_within_a_host_do_not_use_the_network(two_hosts):
    """Not even in a group that spans hosts."""
    two_hosts.limit("1mbit")  # over the network it would take two minutes
    seconds_from_rank_0_to(1, two_hosts, MANY)
    assert two_hosts.bytes_sent(0) < MANY // 10
