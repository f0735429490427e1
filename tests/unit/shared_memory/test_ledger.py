"""What a rank learns from its peers' pages: mismatches, deaths, departures, and who has not come."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from process_groups.call import Call, Place
from process_groups.shared_memory.board import Page
from process_groups.shared_memory.ledger import Ledger, Member
from runtime.errors import Coords, GroupClosed, Mismatch, PeerLost

SIZE = 3


@dataclass
class FakePulse:
    dead: bool = False
    still: float = 0.0

    def is_dead(self) -> bool:
        return self.dead

    def seconds_still(self) -> float:
        return self.still


@dataclass
class World:
    """Three ranks' ledgers over the same pages, in one process."""

    ledgers: list[Ledger]
    pulses: list[FakePulse]


@pytest.fixture
def world() -> World:
    pages = [Page(memoryview(bytearray(Page.size(SIZE))), SIZE) for _ in range(SIZE)]
    pulses = [FakePulse() for _ in range(SIZE)]
    places = [Place(rank, Coords(rank, 0, 0)) for rank in range(SIZE)]
    members = [Member(*parts) for parts in zip(places, pages, pulses, strict=True)]
    return World([Ledger("world", members, me) for me in range(SIZE)], pulses)


def barrier(number: int = 1, terms: str = "barrier") -> Call:
    return Call("barrier", number=number, terms=terms)


def send(peer: int, number: int = 1, terms: str = "float32 (4,)") -> Call:
    return Call("send", peer=peer, number=number, terms=terms)


def recv(peer: int, number: int = 1, terms: str = "float32 (4,)") -> Call:
    return Call("recv", peer=peer, number=number, terms=terms)


def test_the_second_to_come_sees_the_mismatch(world):
    world.ledgers[0].post(barrier())
    world.ledgers[1].post(barrier())
    with pytest.raises(Mismatch) as caught:
        world.ledgers[2].post(barrier(terms="all_reduce(sum) of float32 (4,)"))
    assert str(caught.value) == (
        "call number 1 on group world: rank 2 (dp=2 tp=0 pp=0) calls all_reduce(sum) of float32 (4,), "
        "but rank 0 (dp=0 tp=0 pp=0) calls barrier."
    )


def test_sends_and_receives_are_compared_pair_by_pair(world):
    world.ledgers[0].post(send(1))
    world.ledgers[0].post(send(2, terms="int8 (1,)"))
    world.ledgers[1].post(recv(0))
    world.ledgers[1].post(send(0, terms="another way"))
    with pytest.raises(Mismatch) as caught:
        world.ledgers[2].post(recv(0))
    assert str(caught.value) == (
        "call number 1 on group world: rank 2 (dp=2 tp=0 pp=0) receives float32 (4,), "
        "but rank 0 (dp=0 tp=0 pp=0) sends int8 (1,)."
    )


def test_nothing_is_wrong_while_all_live(world):
    world.ledgers[0].post(barrier())
    assert world.ledgers[0].trouble(barrier()) is None


def test_a_dead_peer_is_trouble_for_those_who_need_it(world):
    world.pulses[1].dead = True
    found = world.ledgers[0].trouble(barrier())
    assert type(found) is PeerLost
    assert str(found) == "rank 1 (dp=1 tp=0 pp=0) died; barrier on group world can't end."
    assert (found.rank, found.coords, found.action) == (1, (1, 0, 0), "barrier")
    assert world.ledgers[0].trouble(recv(1)).rank == 1
    assert world.ledgers[0].trouble(recv(2)) is None
    assert world.ledgers[0].trouble(send(2)) is None


def test_a_peer_that_left_is_trouble_only_without_having_called(world):
    world.ledgers[1].post(barrier())
    world.ledgers[1].post(send(0))
    world.ledgers[1].close(None)
    world.pulses[1].dead = True
    assert world.ledgers[0].trouble(barrier()) is None
    assert world.ledgers[0].trouble(recv(1)) is None
    lost = world.ledgers[0].trouble(barrier(2))
    assert str(lost) == "rank 1 (dp=1 tp=0 pp=0) left the mesh; barrier on group world can't end."
    assert world.ledgers[0].trouble(send(1)).rank == 1


def test_a_group_that_anybody_gave_up_is_trouble_for_all(world):
    world.ledgers[2].close(GroupClosed("cancelled", rank=2))
    for call in (barrier(), recv(1)):
        found = world.ledgers[0].trouble(call)
        assert (type(found), str(found), found.rank) == (GroupClosed, "cancelled", 2)


def test_the_absent_and_what_they_did_last(world):
    call = barrier(2)
    for ledger in world.ledgers:
        ledger.post(barrier())
    world.ledgers[0].post(call)
    assert world.ledgers[0].culprit(call) == (1, "has not called it; its last call there was barrier (number 1)")
    world.ledgers[1].post(call)
    assert world.ledgers[0].culprit(call) == (2, "has not called it; its last call there was barrier (number 1)")
    world.ledgers[2].post(call)
    assert world.ledgers[0].culprit(call) is None


def test_who_has_called_nothing(world):
    assert world.ledgers[0].culprit(barrier()) == (1, "has not called it; it has called nothing there")


def test_the_partner_who_has_not_sent_or_received(world):
    world.ledgers[2].post(send(0))
    assert world.ledgers[0].culprit(recv(2, 1)) is None
    assert world.ledgers[0].culprit(recv(2, 2)) == (2, "has not sent it; so far it has sent 1 here")
    assert world.ledgers[0].culprit(send(2)) == (
        2,
        "has not received it; of what was sent from here it has asked for 0",
    )


def test_one_who_has_called_and_stands_still(world):
    for ledger in world.ledgers:
        ledger.post(barrier())
    world.pulses[1].still, world.pulses[2].still = 0.3, 2.0
    assert world.ledgers[0].culprit(barrier()) == (
        2,
        "has called it, but its event loop has not moved for 2.0 s",
    )


async def leaves(ledger: Ledger) -> bool:
    """Whether it may leave now, though it had a moment only."""
    task = asyncio.create_task(ledger.wait_for_peers(time.monotonic() + 30.0))
    await asyncio.sleep(0)
    done = task.done()
    task.cancel()
    await asyncio.wait([task])
    return done


async def test_a_rank_stays_until_its_peers_have_all(world):
    call = barrier()
    for ledger in world.ledgers:
        ledger.post(call)
    for ledger in world.ledgers[:2]:
        ledger.finished(call)
    assert not await leaves(world.ledgers[0])
    world.ledgers[2].finished(call)
    assert await leaves(world.ledgers[0])
    world.ledgers[0].post(send(1))
    assert not await leaves(world.ledgers[0])
    world.ledgers[1].post(recv(0))
    world.ledgers[1].finished(recv(0))
    assert await leaves(world.ledgers[0])


async def test_a_rank_does_not_stay_for_those_who_are_gone(world):
    world.ledgers[0].post(barrier())
    world.ledgers[1].close(None)
    assert not await leaves(world.ledgers[0])
    world.pulses[2].dead = True
    assert await leaves(world.ledgers[0])


async def test_waiting_for_peers_has_a_deadline(world):
    world.ledgers[0].post(barrier())
    await world.ledgers[0].wait_for_peers(time.monotonic())


def test_calls_are_written_down_in_order(world):
    """Even if one found no room, and for the next there is some."""
    steps = {number: world.ledgers[0].posted(barrier(number), iter(())) for number in range(1, 257)}
    for number in range(1, 100):
        for ledger in world.ledgers[1:]:
            ledger.post(barrier(number))
    steps[257] = world.ledgers[0].posted(barrier(257), iter(()))
    assert world.ledgers[1].culprit(barrier(256))[0] == 0, "the first 255 only"
    for number, issued in ((256, 256), (257, 257)):
        assert list(steps[number]) == []
        assert world.ledgers[0]._own.collectives.issued == issued
