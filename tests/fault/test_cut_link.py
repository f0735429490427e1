"""Breaks the network between two hosts, or a rank behind it, in the middle of a call: nobody hangs, nothing stays."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
import torch

import parallel3d
from parallel3d import CommunicationError, DeadlineExceeded, PeerLost
from tests.support.hosts import Hosts
from tests.support.processes import abandoned_memory
from tests.support.ranks import Ranks, Tell

pytestmark = pytest.mark.slow

RANKS_PER_HOST = [2, 2]
RATE = "50mbit"  # the call below would take 16 s
MANY = 64 << 20  # bytes
UNDER_WAY = 1 << 20  # bytes: many times what forming the mesh sends
LIMIT = 3.0  # seconds that a call may take
GRACE = 5.0  # seconds after which a deadline counts as missed
LEAVING = 5.0  # seconds that a rank takes to leave the groups in which nothing has failed yet


@pytest.fixture(autouse=True)
def nothing_stays_in_shared_memory():
    before = abandoned_memory()
    yield
    assert abandoned_memory() <= before


async def reduce_and_leave(tell: Tell) -> None:
    """Goes on after the error, and so leaves groups that know of no trouble."""
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        begin = time.monotonic()
        try:
            await mesh.world.all_reduce(torch.ones(MANY // 4), timeout=LIMIT)
        except CommunicationError as error:
            tell((error, time.monotonic() - begin))
    tell(time.monotonic() - begin)


async def reduce_and_fail(tell: Tell) -> None:
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        await mesh.world.all_reduce(torch.ones(MANY // 4), timeout=LIMIT)


def wait_until_under_way(hosts: Hosts) -> None:
    for host in range(2):
        hosts.wait_until_sent(host, UNDER_WAY)


def is_dead(hosts: Hosts, received_then: list[int]) -> bool:
    """Whether no more has arrived since than what was in the air."""
    return all(hosts.bytes_received(host) < received_then[host] + UNDER_WAY for host in range(2))


@pytest.mark.parametrize("breaking", [Hosts.cut, pytest.param(Hosts.unplug, marks=pytest.mark.exhaustive)])
def test_a_link_breaks_in_mid_call(two_hosts, breaking):
    two_hosts.limit(RATE)
    with Ranks(reduce_and_leave, two_hosts.variables(RANKS_PER_HOST)) as ranks:
        wait_until_under_way(two_hosts)
        breaking(two_hosts)
        received = [two_hosts.bytes_received(host) for host in range(2)]
        for rank in ranks:
            error, seconds = rank.hear()
            assert type(error) in (PeerLost, DeadlineExceeded)
            assert seconds < LIMIT + GRACE
        for rank in ranks:
            assert rank.hear() < LIMIT + LEAVING + GRACE
            assert rank.finish() == 0
        assert is_dead(two_hosts, received)


def test_an_error_leaves_the_mesh_though_the_link_is_cut(two_hosts):
    two_hosts.limit(RATE)
    with Ranks(reduce_and_fail, two_hosts.variables(RANKS_PER_HOST)) as ranks:
        wait_until_under_way(two_hosts)
        two_hosts.cut()
        for rank in ranks:
            with pytest.raises((PeerLost, DeadlineExceeded)):
                rank.hear(LIMIT + LEAVING + GRACE)
            assert rank.finish(GRACE) == 1


async def leave_when_told(tell: Tell) -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    async with parallel3d.mesh(dp=2, tp=2, timeout=LIMIT) as mesh:
        await mesh.world.barrier()
        tell("ready")
        await told.wait()
        begin = time.monotonic()
    tell(time.monotonic() - begin)


def test_ranks_leave_though_the_link_is_cut(two_hosts):
    """Their store is behind it for half of them, and it never says no."""
    with Ranks(leave_when_told, two_hosts.variables(RANKS_PER_HOST)) as ranks:
        assert [rank.hear() for rank in ranks] == ["ready"] * 4
        two_hosts.cut()
        for rank in ranks:
            rank.send(signal.SIGUSR1)
        for rank in ranks:
            assert rank.hear() < LIMIT + GRACE
            assert rank.finish() == 0


@pytest.mark.parametrize("victim", [0, 3])  # rank 0 serves the store
def test_a_rank_is_killed_in_mid_call(two_hosts, victim):
    two_hosts.limit(RATE)
    with Ranks(reduce_and_leave, two_hosts.variables(RANKS_PER_HOST)) as ranks:
        wait_until_under_way(two_hosts)
        ranks[victim].send(signal.SIGKILL)
        survivors = [rank for number, rank in enumerate(ranks) if number != victim]
        for rank in survivors:
            error, seconds = rank.hear()
            assert type(error) in (PeerLost, DeadlineExceeded)
            assert seconds < LIMIT + GRACE
        for rank in survivors:
            assert rank.hear() < LIMIT + LEAVING + GRACE
            assert rank.finish() == 0
        assert ranks[victim].finish() == -signal.SIGKILL
