"""What ranks without a supervisor tell, brought to rank 0 beside their steps."""

from __future__ import annotations

import asyncio
from typing import Any

import parallel3d
from parallel3d.runs.commands import Wish, Wishes
from parallel3d.runs.gathering import LEAST_ROOM, MOST_ROOM, Gathering, Outbox, most_room, read
from runtime.control import MAX_MESSAGE_BYTES


def test_an_outbox_gives_whole_messages_in_order():
    outbox = Outbox()
    for number in range(5):
        outbox.put("step", {"number": number})
    line = len(b'{"kind": "step", "number": 0}\n')
    first = outbox.take(2 * line + line - 1)
    assert [message["number"] for message in read(first)] == [0, 1]
    assert outbox.num_bytes == 3 * line
    assert [message["number"] for message in read(outbox.take(1 << 20))] == [2, 3, 4]
    assert (outbox.take(1 << 20), outbox.num_bytes) == (b"", 0)


def test_the_oldest_go_where_there_are_too_many():
    outbox = Outbox(most=3)
    for number in range(5):
        outbox.put("step", {"number": number})
    assert [message["number"] for message in read(outbox.take(1 << 20))] == [2, 3, 4]
    assert outbox.num_bytes == 0


def test_what_is_too_big_for_a_message_is_left_out_and_much_is_behind():
    outbox = Outbox()
    outbox.put("log", {"text": "x" * MAX_MESSAGE_BYTES})
    assert outbox.num_bytes == 0
    while not outbox.is_behind:
        outbox.put("log", {"text": "x" * 60_000})
    assert outbox.num_bytes < 2 << 20


def test_what_is_no_message_is_left_out():
    assert list(read(b'{"kind": "a"}\n[1]\n\xff\n{"kind": 3}\n{"kind": "b"')) == [{"kind": "a"}]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def gathered(num_steps: int, to_tell: dict[int, int], ranks: int = 3) -> list[list[tuple[int, dict[str, Any]]]]:
    """So many steps a second long, in each of which rank r tells some messages of 1000 bytes."""

    async def main() -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
        async with parallel3d.mesh(dp=ranks) as mesh:
            outbox, clock, heard, rooms = Outbox(), Clock(), [], []
            gathering = Gathering(mesh, outbox, lambda rank, message: heard.append((rank, message)), clock)
            wishes, room = Wishes(mesh), 0
            for step in range(num_steps):
                for number in range(to_tell.get(mesh.rank, 0)):
                    outbox.put("told", {"step": step, "number": number, "text": "x" * 1000})
                gathering.begin(room)
                wishes.tell(Wish(room=gathering.wished_room))
                rooms.append(room)
                await mesh.compute(lambda: None)
                room = (await wishes.agreed()).room
                await gathering.end()
                clock.now += 1.0
            await gathering.close()
            return heard, rooms

    return await parallel3d.in_process(main, ranks=ranks)


async def test_rank_0_hears_every_rank_in_order():
    (heard, rooms), *others = await gathered(6, {1: 2, 2: 3})
    assert rooms == [0, 0, LEAST_ROOM, 0, LEAST_ROOM, 0], "due after a second, agreed in the step that follows; once"
    for rank, num in ((1, 2), (2, 3)):
        told = [(each["step"], each["number"]) for who, each in heard if (who, each["kind"]) == (rank, "told")]
        assert told[: 3 * num] == [(step, number) for step in range(3) for number in range(num)]
        assert len(told) == len(set(told))
    assert {each["kind"] for who, each in heard if who == 0} == {"loop_lag", "collectives"}
    assert {each["kind"] for who, each in heard if who == 2} == {"loop_lag", "collectives", "told"}
    assert [found for found, _ in others] == [[], []]


async def test_the_end_waits_for_no_further_step(monkeypatch):
    """Rank 0 hands on what came while the engine computes; after the last step it does not again."""

    async def main() -> list[int]:
        async with parallel3d.mesh(dp=2) as mesh:
            outbox, heard = Outbox(), []
            outbox.put("told", {})
            gathering = Gathering(mesh, outbox, lambda rank, message: heard.append(rank))
            gathering.begin(LEAST_ROOM)
            await gathering.end()
            await gathering.close()
            return heard

    monkeypatch.setattr("parallel3d.runs.gathering._PAUSE", 1000.0)
    first, second = await asyncio.wait_for(parallel3d.in_process(main, ranks=2), 60)
    assert (set(first), second) == ({0, 1}, [])


async def test_room_grows_with_what_there_is_to_tell():
    (heard, rooms), *_ = await gathered(12, {1: 300})
    assert max(rooms) > LEAST_ROOM
    assert max(rooms) <= MOST_ROOM
    told = [(each["step"], each["number"]) for who, each in heard if each["kind"] == "told"]
    assert told == sorted(told)
    assert len(told) > 1500


def test_a_large_mesh_fills_no_rank_with_what_all_tell():
    assert [most_room(ranks) for ranks in (1, 16, 64, 512, 4096)] == [4 << 20, 4 << 20, 1 << 20, LEAST_ROOM, LEAST_ROOM]


async def test_a_single_rank_reports_too():
    ((heard, _),) = await gathered(4, {}, ranks=1)
    assert {each["kind"] for _, each in heard} == {"loop_lag", "collectives"}
