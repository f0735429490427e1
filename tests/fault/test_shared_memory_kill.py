"""A rank dies at each point of a call through shared memory: the others learn who it was, and go on without it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import parallel3d
from parallel3d import CommunicationError, PeerLost
from process_groups.counters import Counter
from process_groups.reduction import Reducer
from process_groups.shared_memory.collectives import FlatAllReduce
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.link import SharedLink
from process_groups.shared_memory.packets import Inbox, Outbox
from tests.support.processes import abandoned_memory
from tests.support.ranks import Ranks, Tell, torch_variables

pytestmark = pytest.mark.slow

RANKS = 4
VICTIM = 3
PROMISE = 1.0  # seconds within which a death is known
NUM = 3 << 20  # floats: twelve pieces for each of four ranks
STRATEGIES = ("ring", "tree", "hierarchical")

Point = tuple[type, str, int]
"""A method, and at which of the victim's calls of it the victim dies."""

POINTS: dict[str, tuple[str, Point]] = {
    "before it arrives": ("registered", (Exchange, "arrive", 1)),
    "arrived and waiting": ("registered", (Exchange, "everybody", 1)),
    "arrived at a barrier and waiting": ("barrier", (Exchange, "everybody", 1)),
    "in the middle of its slice": ("registered", (Reducer, "__call__", 3)),
    "after its slice and before the last round": ("registered", (Exchange, "arrive", 2)),
    "in the middle of a staged call": ("staged", (Exchange, "check", 5)),
    "in a small call, before it arrives": ("small", (Exchange, "arrive", 1)),
    "in a small call, after it has arrived": ("small", (FlatAllReduce, "at_once", 1)),
    "in the middle of its slice of a result in common": ("shared", (Reducer, "__call__", 3)),
    "after its slice of a result in common": ("shared", (Exchange, "arrive", 2)),
    "while others read its source": ("all_gather", (Exchange, "everybody", 2)),
    "in the middle of what it reduces for itself": ("reduce_scatter", (Reducer, "__call__", 2)),
    "before it shows what it broadcasts": ("broadcast", (Exchange, "arrive", 1)),
    "while others copy what it broadcasts": ("broadcast", (Exchange, "everybody", 2)),
    "while others pick from its source": ("all_to_all", (Exchange, "everybody", 2)),
    "in the middle of a staged exchange": ("staged all_to_all", (Exchange, "arrive", 3)),
    "before it says that a range is ready (ring)": ("ring", (SharedLink, "send", 2)),
    "before it says that a range is ready (tree)": ("tree", (SharedLink, "send", 2)),
    "while it waits for a range (hierarchical)": ("hierarchical", (SharedLink, "receive", 2)),
    "after a strategy and before the last round": ("tree", (Exchange, "arrive", 1)),
    "while it receives a registered tensor": ("to the victim", (Counter, "store", 1)),
    "while it receives what others copy for it": ("to the victim", (Inbox, "_claim", 1)),
    "while it copies for a receiver": ("from the victim", (Counter, "store", 2)),
    "before it sends": ("from the victim", (Outbox, "send", 1)),
    "in the middle of what it sends": ("staged from the victim", (Outbox, "_write_header", 7)),
    "in the middle of what it receives": ("staged to the victim", (Inbox, "_packet", 7)),
}


@pytest.fixture(autouse=True)
def nothing_stays_in_shared_memory():
    before = abandoned_memory()
    yield
    assert abandoned_memory() <= before


def die_at(point: Point, tell: Tell) -> None:
    """Arrange for this process to be killed by itself, after it has told when."""
    owner, name, number = point
    method: Callable[..., Any] = getattr(owner, name)
    count = 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            tell(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args)

    setattr(owner, name, counted)


def begin(mesh: parallel3d.Mesh, what: str) -> parallel3d.Work | None:
    """This rank's part in a call that the victim takes part in; None where it has none."""
    world, registered = mesh.world, not what.startswith("staged")
    if what == "barrier":
        return world.barrier()
    tensor = (world.empty(NUM) if registered else torch.empty(NUM)).fill_(1.0)
    match what:
        case "registered" | "staged":
            return world.all_reduce(tensor)
        case "small":
            return world.all_reduce(tensor[:100])
        case "shared":
            return world.all_reduce(tensor, shared=True)
        case "all_gather":
            return world.all_gather(tensor)
        case "reduce_scatter":
            return world.reduce_scatter(tensor)
        case "broadcast":
            return world.broadcast(tensor, root=VICTIM)
        case "all_to_all" | "staged all_to_all":
            return world.all_to_all(tensor)
    if what in STRATEGIES:
        return world.all_reduce(tensor, strategy=what)
    sender, receiver = (VICTIM, 0) if what.endswith("from the victim") else (0, VICTIM)
    if mesh.rank == sender:
        return world.send(tensor, receiver)
    return world.recv(tensor, sender) if mesh.rank == receiver else None


async def lose_a_peer(tell: Tell, what: str, point: Point) -> None:
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        await mesh.world.all_reduce(torch.ones(1))
        await mesh.dp.barrier()
        if mesh.rank == VICTIM:
            die_at(point, tell)
        work = begin(mesh, what)
        if work is None:  # it has no part in that, but shall hear of it
            work = mesh.world.recv(torch.ones(1), 0 if mesh.rank != 0 else 1)
        try:
            await work
            await mesh.world.barrier()  # the victim may have done its whole part in the call before
        except CommunicationError as error:
            tell((error, time.monotonic()))
        if mesh.rank == VICTIM:
            raise AssertionError("still alive")
        if mesh.rank < 2:  # the victim is not in this group
            tensor = mesh.tp.empty(NUM).fill_(mesh.rank + 1.0)
            await mesh.tp.all_reduce(tensor)
            tell(tensor.unique().tolist())


@pytest.mark.parametrize("when", POINTS)
def test_a_rank_is_killed(when):
    what, point = POINTS[when]
    with Ranks(lose_a_peer, torch_variables(RANKS), (what, point)) as ranks:
        killed = ranks[VICTIM].hear()
        assert isinstance(killed, float), killed
        for rank in ranks[:VICTIM]:
            error, moment = rank.hear()
            assert type(error) is PeerLost, error
            assert error.rank == VICTIM
            assert str(error).startswith(f"rank {VICTIM} (dp=1 tp=1 pp=0) died; ")
            assert str(error).endswith(" on group world can't end.")
            assert moment - killed < PROMISE
        assert [rank.hear() for rank in ranks[:2]] == [[3.0], [3.0]]
        assert [rank.finish() for rank in ranks] == [0, 0, 0, -signal.SIGKILL]
