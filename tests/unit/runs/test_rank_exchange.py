"""What ranks exchange beside their steps: reports, commands, clock offsets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import parallel3d
from parallel3d.runs.commands import Command
from parallel3d.runs.rank_exchange import (
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    CommandBroadcast,
    Outbox,
    Ping,
    ReportGathering,
    answering_ranks,
    best_offset,
    clock_offset,
    max_block_bytes,
    measure_offsets,
    read_messages,
)
from runtime.control import MAX_MESSAGE_BYTES


def test_an_outbox_gives_whole_messages_in_order():
    outbox = Outbox()
    for number in range(5):
        outbox.put("step", {"number": number})
    line = len(b'{"kind": "step", "number": 0}\n')
    first = outbox.take(2 * line + line - 1)
    assert [message["number"] for message in read_messages(first)] == [0, 1]
    assert outbox.num_bytes == 3 * line
    assert [message["number"] for message in read_messages(outbox.take(1 << 20))] == [2, 3, 4]
    assert (outbox.take(1 << 20), outbox.num_bytes) == (b"", 0)


def test_the_oldest_go_where_there_are_too_many():
    outbox = Outbox(max_messages=3)
    for number in range(5):
        outbox.put("step", {"number": number})
    assert [message["number"] for message in read_messages(outbox.take(1 << 20))] == [2, 3, 4]
    assert outbox.num_bytes == 0


def test_what_is_too_big_for_a_message_is_left_out_and_much_is_behind():
    outbox = Outbox()
    outbox.put("log", {"text": "x" * MAX_MESSAGE_BYTES})
    assert outbox.num_bytes == 0
    while not outbox.is_behind:
        outbox.put("log", {"text": "x" * 60_000})
    assert outbox.num_bytes < 2 << 20


def test_what_is_no_message_is_left_out():
    assert list(read_messages(b'{"kind": "a"}\n[1]\n\xff\n{"kind": 3}\n{"kind": "b"')) == [{"kind": "a"}]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


Heard = list[tuple[int, dict[str, Any]]]


async def gathered(num_steps: int, num_reports: dict[int, int], ranks: int = 3) -> list[tuple[Heard, list[int]]]:
    """So many steps a second long, in each of which rank r reports some messages of 1000 bytes."""

    async def main() -> tuple[Heard, list[int]]:
        async with parallel3d.mesh(dp=ranks) as mesh:
            outbox, clock, heard, sizes = Outbox(), Clock(), [], []
            gathering = ReportGathering(mesh, outbox, lambda rank, message: heard.append((rank, message)), clock)
            broadcast, block_bytes = CommandBroadcast(mesh), 0
            for step in range(num_steps):
                for number in range(num_reports.get(mesh.rank, 0)):
                    outbox.put("report", {"step": step, "number": number, "text": "x" * 1000})
                gathering.begin(block_bytes)
                broadcast.begin(Command(report_bytes=gathering.due_bytes))
                sizes.append(block_bytes)
                await mesh.compute(lambda: None)
                block_bytes = (await broadcast.end()).report_bytes
                await gathering.end()
                clock.now += 1.0
            await gathering.close()
            return heard, sizes

    return await parallel3d.in_process(main, ranks=ranks)


async def test_rank_0_hears_every_rank_in_order():
    (heard, sizes), *others = await gathered(6, {1: 2, 2: 3})
    assert sizes == [0, 0, MIN_BLOCK_BYTES, 0, MIN_BLOCK_BYTES, 0], (
        "due after a second, known to all in the step that follows; once"
    )
    for rank, num in ((1, 2), (2, 3)):
        reported = [(each["step"], each["number"]) for who, each in heard if (who, each["kind"]) == (rank, "report")]
        assert reported[: 3 * num] == [(step, number) for step in range(3) for number in range(num)]
        assert len(reported) == len(set(reported))
    assert {each["kind"] for who, each in heard if who == 0} == {"loop_lag", "collectives"}
    assert {each["kind"] for who, each in heard if who == 2} == {"loop_lag", "collectives", "report"}
    assert [found for found, _ in others] == [[], []]


async def test_the_end_waits_for_no_further_step(monkeypatch):
    """Rank 0 hands on what came while the engine computes; after the last step it does not again."""

    async def main() -> list[int]:
        async with parallel3d.mesh(dp=2) as mesh:
            outbox, heard = Outbox(), []
            outbox.put("report", {})
            gathering = ReportGathering(mesh, outbox, lambda rank, message: heard.append(rank))
            gathering.begin(MIN_BLOCK_BYTES)
            await gathering.end()
            await gathering.close()
            return heard

    monkeypatch.setattr("parallel3d.runs.rank_exchange._PAUSE", 1000.0)
    first, second = await asyncio.wait_for(parallel3d.in_process(main, ranks=2), 60)
    assert (set(first), second) == ({0, 1}, [])


async def test_blocks_grow_with_the_reports():
    (heard, sizes), *_ = await gathered(12, {1: 300})
    assert max(sizes) > MIN_BLOCK_BYTES
    assert max(sizes) <= MAX_BLOCK_BYTES
    reported = [(each["step"], each["number"]) for who, each in heard if each["kind"] == "report"]
    assert reported == sorted(reported)
    assert len(reported) > 1500


def test_a_large_mesh_fills_no_rank_with_reports():
    assert [max_block_bytes(ranks) for ranks in (1, 16, 64, 512, 4096)] == [
        4 << 20,
        4 << 20,
        1 << 20,
        MIN_BLOCK_BYTES,
        MIN_BLOCK_BYTES,
    ]


async def test_a_single_rank_reports_too():
    ((heard, _),) = await gathered(4, {}, ranks=1)
    assert {each["kind"] for _, each in heard} == {"loop_lag", "collectives"}


# Clock offsets.


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
