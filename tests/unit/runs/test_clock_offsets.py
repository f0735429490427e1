"""Clocks of other hosts, as pings find them."""

from __future__ import annotations

import asyncio
import time

import pytest

import parallel3d
from parallel3d.runs.clock_offsets import Ping, answering_ranks, best_offset, clock_offset, measure_offsets


def test_the_quickest_round_counts():
    pings = [Ping(10.0, 3.9, 10.4), Ping(11.0, 5.05, 11.1), Ping(12.0, 9.0, 13.0)]
    assert best_offset(pings) == pytest.approx(6.0)


def test_an_offset_errs_by_less_than_half_of_the_round():
    for there, back in ((0.0, 0.1), (0.1, 0.0), (0.03, 0.07)):
        ping = Ping(10.0, 10.0 + there - 4.0, 10.0 + there + back)
        assert abs(ping.offset - 4.0) <= ping.seconds / 2 + 1e-9


def test_the_first_rank_of_each_other_host_answers():
    assert answering_ranks(["a", "a", "b", "b", "c", "a"]) == {"b": 2, "c": 4}
    assert answering_ranks(["a"]) == {}


AHEAD = {"a": 0.0, "b": 1000.0, "c": -50.0}


async def on_hosts(hosts: str, ask) -> list[object]:
    """What each rank finds, where the clock of a host is ahead of the first one's."""

    async def main() -> object:
        async with parallel3d.mesh(dp=len(hosts)) as mesh:
            mesh.hosts = tuple(hosts)
            return await ask(mesh, lambda: time.monotonic() + AHEAD[hosts[mesh.rank]])

    return await parallel3d.in_process(main, ranks=len(hosts))


async def test_every_rank_finds_its_hosts_offset():
    found = await on_hosts("abbac", clock_offset)
    assert found == pytest.approx([0.0, -1000.0, -1000.0, 0.0, 50.0], abs=0.5)
    assert found[1] == found[2], "a host has one clock"


async def test_only_rank_0_knows_all():
    first, *others = await on_hosts("abc", measure_offsets)
    assert first == pytest.approx([0.0, -1000.0, 50.0], abs=0.5)
    assert others == [None, None]


async def test_a_single_host_asks_nothing():
    async def main() -> list[str]:
        async with parallel3d.mesh(dp=2) as mesh:
            assert await clock_offset(mesh) == 0.0
            return [event.kind for event in mesh.collectives.events()]

    assert await parallel3d.in_process(main, ranks=2) == [[], []]


async def test_pings_go_on_beside_collectives():
    async def main() -> None:
        async with parallel3d.mesh(dp=2) as mesh:
            mesh.hosts = ("a", "b")
            asking = asyncio.create_task(measure_offsets(mesh))
            for _ in range(20):
                await mesh.world.barrier()
            await asking

    await parallel3d.in_process(main, ranks=2)
