"""A call that ends on the spot."""

import asyncio
import time

import torch

from process_groups.group import Group
from runtime.errors import Coords


class InstantTransport:
    """Every call has ended well before it can be awaited."""

    name, device = "instant", torch.device("cpu")

    def start(self, call):
        return self

    ended_at = None

    def ended_well(self, seconds):
        return True

    def finished(self, call):
        pass


async def test_calls_in_a_row_let_other_tasks_run():
    group = Group(
        "world",
        (0, 1),
        0,
        InstantTransport(),
        coords_of=lambda rank: Coords(rank, 0, 0),
        timeout=30.0,
        device=torch.device("cpu"),
    )
    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        await group.barrier()
    counting.cancel()
    assert turns >= 3
