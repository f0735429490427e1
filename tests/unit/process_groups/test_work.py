"""A call that ends on the spot, and one that fails."""

import asyncio
import time

import pytest
import torch

from process_groups.group import Group
from process_groups.transport import Transport
from runtime.errors import Coords, DeadlineExceeded, GroupClosed


class InstantTransport(Transport):
    """Every call has ended well before it can be awaited."""

    name, device = "instant", torch.device("cpu")

    def start(self, call):
        return self

    ended_at = None

    def ended_well(self, seconds):
        return True

    def finished(self, call):
        pass


class FailingTransport(InstantTransport):
    """Every call has failed."""

    def __init__(self, error):
        self._error = error

    def ended_well(self, seconds):
        return False

    def exception(self):
        return self._error

    def add_done_callback(self, callback):
        callback(self)

    def culprit(self, call):
        return None

    def abort(self, error):
        pass


def group_over(transport):
    return Group(
        "world",
        (0, 1),
        0,
        transport,
        coords_of=lambda rank: Coords(rank, 0, 0),
        timeout=30.0,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (DeadlineExceeded("too late by its own clock"), "barrier on group world did not end within 30 s, though every"),
        (DeadlineExceeded("a peer waited 0.5 s", rank=1, action="barrier"), "a peer waited 0.5 s"),
        (GroupClosed("a peer cancelled it", rank=1, action="barrier"), "a peer cancelled it"),
    ],
)
async def test_what_a_peer_tells_is_passed_on(error, text):
    with pytest.raises(type(error)) as caught:
        await group_over(FailingTransport(error)).barrier()
    assert str(caught.value).startswith(text)


class EndlessTransport(InstantTransport):
    """No call ever ends, for rank 1 does not come."""

    def __init__(self):
        self.aborted = None

    def ended_well(self, seconds):
        return False

    def add_done_callback(self, callback):
        pass

    def trouble(self, call):
        return None

    def culprit(self, call):
        return 1, "has not called it"

    def abort(self, error):
        self.aborted = error

    async def close(self, deadline):
        pass


async def test_who_leaves_waits_no_longer_than_that_for_what_is_under_way():
    transport = EndlessTransport()
    group = group_over(transport)
    group.barrier()
    with pytest.raises(DeadlineExceeded) as caught:
        await group.close(0.05)
    assert str(caught.value).startswith("barrier on group world did not end within 0.05")
    assert str(caught.value).endswith(" s: rank 1 (dp=1 tp=0 pp=0) has not called it.")
    assert transport.aborted is caught.value


async def test_calls_in_a_row_let_other_tasks_run():
    group = group_over(InstantTransport())
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
