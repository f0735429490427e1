"""Small calls that are made again on the same tensor, in shared-memory groups whose ranks are threads."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from monitoring.events.collectives import CollectiveEvent, CollectiveRecorder
from process_groups.arena import Arena
from process_groups.call import Call
from process_groups.call_queue import Quick
from process_groups.group import Group
from process_groups.repeated import EndedWork, Repeated
from process_groups.strategies import measurements
from runtime.errors import GroupClosed, Mismatch
from tests.unit.shared_memory.test_transport import threads_of

__all__ = ["threads_of"]  # a fixture


@pytest.fixture
def group(threads_of) -> Iterator[Group]:
    """The first of two ranks, of which the other never comes."""
    threads = threads_of(2)
    made = threads._group(0)
    yield made
    made.abort(GroupClosed("the test is over"))


def repeated(
    group: Group, tensor: torch.Tensor, strategy: str | None = None, begin: Callable[[Call], None] = lambda call: None
) -> Repeated:
    call = Call("all_reduce", tensor, tensor, "sum")
    quick, channel = Quick(group._transport._collectives, lambda: True, begin), group._transport._ledger.channel(call)
    return Repeated(group._issuer, quick, channel, weakref.ref(tensor), strategy, call)


def test_it_is_for_the_same_call_only(group):
    tensor = torch.ones(4, 3)
    known = repeated(group, tensor)
    assert known.is_for(tensor, "sum", None)
    assert not known.is_for(tensor, "max", None)
    assert not known.is_for(tensor, "sum", "default"), "the group's strategy may be another"
    assert not known.is_for(tensor, "sum", "ring")
    assert not known.is_for(tensor.clone(), "sum", None)
    assert not known.is_for(tensor.view(4, 3), "sum", None), "another tensor, though of the same bytes"
    assert repeated(group, tensor, "default").is_for(tensor, "sum", "default")
    assert not repeated(group, tensor, "default").is_for(tensor, "sum", None)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.resize_(3, 4),
        lambda tensor: tensor.resize_(2, 3),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.set_(torch.ones(4, 3)),
        lambda tensor: tensor.as_strided_((4, 3), (1, 4)),
        lambda tensor: setattr(tensor, "data", torch.ones(4, 3)),
        lambda tensor: setattr(tensor, "data", tensor.view(torch.int32)),
    ],
    ids=["shape", "smaller", "transposed", "storage", "strides", "data", "dtype"],
)
def test_it_is_not_for_a_tensor_that_has_changed(group, change):
    tensor = torch.ones(4, 3)
    known = repeated(group, tensor)
    change(tensor)
    assert not known.is_for(tensor, "sum", None)


def test_a_failure_on_the_spot_closes_the_group(group):
    """Peers have seen the call by then."""

    def fails(_: Call) -> None:
        raise RuntimeError("torch is out of sorts")

    tensor = torch.ones(3)
    known = repeated(group, tensor, begin=fails)
    group._issuer.numbers[None] = 0
    work = known.start(tensor)
    assert work.done()
    assert group.has_failed
    assert str(work._error) == "RuntimeError: torch is out of sorts"


def test_what_ended_at_once_knows_when(threads_of):
    async def main(group: Group, _: Arena) -> None:
        tensor = torch.ones(5)
        for _ in range(5):
            work = group.all_reduce(tensor)
            await work
            assert work.began <= work.ended_at()

    threads_of(2).run(main)


async def settled(group: Group) -> None:
    """Until no queue has anything to do, so that the next call can be carried out at once."""
    while not all(queue.is_idle for queue in group._transport._queues()):  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_a_tensor_is_known_from_the_third_call_on(threads_of):
    async def main(group: Group, _: Arena) -> list[bool]:
        tensor, ways = torch.ones(5), []
        for _ in range(4):
            ways.append(group._repeated.knows("all_reduce", tensor))
            await group.all_reduce(tensor)
        assert tensor.tolist() == [16.0] * 5
        return ways

    assert threads_of(2).run(main) == [[False, False, True, True]] * 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_values_of_calls_that_change_in_everything(threads_of, size):
    """The op, the tensor's shape, and what comes in between."""

    async def main(group: Group, _: Arena) -> None:
        tensor, large, other = torch.empty(6), torch.empty(30_000), torch.empty(4)
        for number in range(150):
            tensor.fill_(number + group.rank)
            op = ("sum", "sum", "sum", "max", "max", "mean")[number % 6]
            if number % 50 == 30:
                tensor.resize_(2, 3)
            work = group.all_reduce(tensor, op)
            if number % 7 == 0:
                large.fill_(group.rank)
                second = group.all_reduce(large)
                third = group.all_reduce(other.fill_(1))
                assert (await third).tolist() == [size] * 4
                assert (await second).eq(sum(range(size))).all()
            total = sum(range(size)) + size * number
            assert (await work) is tensor
            assert tensor.eq({"sum": total, "max": number + size - 1, "mean": total / size}[op]).all(), number

    threads_of(size).run(main)


@pytest.mark.parametrize("kind", ["all_reduce", "send", "recv"])
async def test_after_the_end_of_the_group_a_repeated_call_is_refused(threads_of, kind):
    threads = threads_of(2)
    group, peer = threads._group(0), threads._group(1)
    mine, theirs = torch.ones(3), torch.ones(3)

    def pair() -> tuple:
        if kind == "all_reduce":
            return peer.all_reduce(theirs), group.all_reduce(mine)
        return (peer.recv(theirs, 0), group.send(mine, 1)) if kind == "send" else (
            peer.send(theirs, 0), group.recv(mine, 1)
        )  # fmt: skip

    for _ in range(3):
        first, second = pair()
        await second
        await first
        await settled(group)
        await settled(peer)
    assert isinstance(pair()[1], EndedWork)
    numbers = dict(group._issuer.numbers)
    group.abort(GroupClosed("that is all"))
    before = mine.clone()
    for call in (lambda: group.all_reduce(mine), lambda: group.send(mine, 1), lambda: group.recv(mine, 1)):
        with pytest.raises(GroupClosed, match="group world is closed: that is all"):
            call()
    channel = None if kind == "all_reduce" else (kind, 1)
    assert group._transport._ledger._own.collectives.issued == numbers.get(None, 0), "nothing was posted"
    assert numbers[channel] == 4
    assert torch.equal(mine, before)
    peer.abort(GroupClosed("that is all"))


async def test_a_repeated_call_that_peers_answer_with_another_fails(threads_of):
    threads = threads_of(2)
    group, peer = threads._group(0), threads._group(1)
    mine, theirs = torch.ones(3), torch.ones(3)
    for _ in range(3):
        works = peer.all_reduce(theirs), group.all_reduce(mine)
        await works[1]
        await works[0]
        await settled(group)
    peer.all_reduce(theirs, "max")
    work = group.all_reduce(mine)
    assert work.done()
    with pytest.raises(Mismatch, match="call number 4 on group world"):
        await work
    with pytest.raises(GroupClosed):
        group.all_reduce(mine)
    peer.abort(GroupClosed("that is all"))


@pytest.mark.parametrize("strategy", ["default", "adaptive"])
def test_what_is_recorded(threads_of, monkeypatch, strategy):
    monkeypatch.setattr(measurements, "load", lambda *_: {12: [1e-9, 1.0, 1.0, 1.0]})  # `default` is the best by far

    async def main(group: Group, _: Arena) -> tuple[list[CollectiveEvent], int]:
        group._issuer.recorder = recorder = CollectiveRecorder()
        tensor, packet, num_at_once = torch.ones(5), torch.ones(2, 3, dtype=torch.float64), 0
        for number in range(50):
            works = [group.all_reduce(tensor, "max", strategy)]
            works.append(group.send(packet, 1) if group.rank == 0 else group.recv(packet, 0))
            num_at_once += sum(isinstance(work, EndedWork) for work in works)
            for work in works:
                await work
            if number > 3:
                await settled(group)
        return recorder.events(), num_at_once

    for rank, (events, num_at_once) in enumerate(threads_of(2).run(main)):
        assert num_at_once > 0
        assert len(events) == 100
        for event in events:
            assert (event.group, event.num_ranks, event.strategy) == ("world", 2, "default")
            assert event.seconds > 0
        reduced = [event for event in events if event.kind == "all_reduce"]
        moved = [event for event in events if event.kind == ("send", "recv")[rank]]
        assert len(reduced) == len(moved) == 50
        assert {(event.requested, event.num_bytes) for event in reduced} == {(strategy, 20)}
        assert {(event.requested, event.num_bytes) for event in moved} == {("default", 48)}
        for one_kind in (reduced, moved):
            assert [event.began for event in one_kind] == sorted(event.began for event in one_kind)


def test_sends_and_receives_keep_their_order_with_large_ones_in_between(threads_of):
    async def main(group: Group, _: Arena) -> int:
        small, large, registered = torch.empty(4), torch.empty(200_000), group.empty(50_000)
        num_at_once = 0
        for number in range(120):
            tensors = [small, small, large, small, registered, small] if number % 5 == 4 else [small]
            for place, tensor in enumerate(tensors):
                value = 10 * number + place
                if group.rank == 0:
                    work = group.send(tensor.fill_(value), 1)
                    if tensor is large and number % 2:  # what follows comes while it is under way
                        other = group.send(torch.full((4,), value + 0.5), 1)
                        await other
                else:
                    work = group.recv(tensor, 0)
                    if tensor is large and number % 2:
                        other = torch.empty(4)
                        await group.recv(other, 0)
                        assert other.eq(value + 0.5).all()
                num_at_once += isinstance(work, EndedWork)
                await work
                assert tensor.eq(value).all(), (number, place)
        return num_at_once

    assert threads_of(2).run(main)[0] > 0


async def test_sends_that_wait_for_room_are_not_overtaken(threads_of):
    """One tensor, sent again and again while nobody receives: the ring fills, and then the queue keeps the order."""
    threads = threads_of(2)
    group, peer = threads._group(0), threads._group(1)
    value, found = torch.zeros(2), torch.zeros(2)
    tensors = [torch.full((2,), float(n)) for n in range(3)]
    for number in range(60):
        works = [group.send(tensors[n % 3], 1) for n in range(12)]
        large = group.send(torch.full((100_000,), -1.0), 1)
        works += [group.send(value.fill_(number), 1)]
        for n in range(12):
            await peer.recv(found, 0)
            assert found.eq(n % 3).all(), (number, n)
        whole = torch.zeros(100_000)
        await peer.recv(whole, 0)
        assert whole.eq(-1).all()
        assert (await peer.recv(found, 0)).eq(number).all()
        for work in (*works, large):
            await work
    await asyncio.gather(group.close(5), peer.close(5))


def test_the_memory_of_a_tensor_that_is_gone_is_free(threads_of):
    async def main(group: Group, arena: Arena) -> tuple[int, bool]:
        await group.barrier()
        used = arena.num_bytes_used
        whole = group.empty(100_000).fill_(0)
        tensor = whole[:10]
        for _ in range(4):
            await group.all_reduce(tensor)
        await settled(group)
        gone = weakref.ref(tensor)
        del tensor, whole
        gc.collect()
        return arena.num_bytes_used - used, gone() is None

    assert threads_of(2).run(main) == [(0, True)] * 2
