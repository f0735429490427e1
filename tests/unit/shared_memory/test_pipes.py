"""Messages through shared memory between two ranks of one process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
import torch

from process_groups.arena import Arena, open_peer
from process_groups.counters import Patience
from process_groups.pipes import DTYPES, describe, read_description, signature_of
from process_groups.shared_memory import writer
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import MESSAGE_WORDS, NUM_MESSAGES, lay_out
from process_groups.shared_memory.pipes import SharedPipe
from runtime.errors import CommunicationError, DeadlineExceeded, GroupClosed, InvalidCall, PeerLost
from tests.support.processes import SECONDS

Pipes = tuple[SharedPipe, SharedPipe]


class Ends:
    """Both ends of a pipe, and what is wrong with the peer."""

    def __init__(self) -> None:
        layout = lay_out([2])[0]
        self.arenas = [Arena(layout.stop, 2) for _ in range(2)]
        self.exchanges = []
        for me in range(2):
            mapped = [
                each if rank == me else open_peer(each.address_for_peers) for rank, each in enumerate(self.arenas)
            ]
            self.exchanges.append(Exchange(mapped, me, layout))
        self.trouble: PeerLost | None = None
        self.one, self.other = (
            SharedPipe(exchange, 1 - me, Patience(10, 10), lambda: self.trouble)
            for me, exchange in enumerate(self.exchanges)
        )


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for arena in made.arenas:
        arena.close()


def take(pipe: SharedPipe) -> list[torch.Tensor | None]:
    return pipe.receive(time.monotonic() + SECONDS, lambda: math.inf)


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4, 5), (70_000,)])
def test_any_shape_and_dtype(ends, shape, dtype, is_far):
    ends.one._writer.is_far = is_far
    values = torch.arange(max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].view(shape)
    ends.one.send([values, None, values])
    found = take(ends.other)
    assert found[1] is None
    assert all(torch.equal(each, values) and each.dtype is dtype for each in (found[0], found[2]))


def test_far_ranks_are_written_to_round_the_cache(ends, monkeypatch):
    streamed, stream = [], writer.stream
    monkeypatch.setattr(
        writer, "stream", lambda target, source: streamed.append(source.nbytes) or stream(target, source)
    )
    monkeypatch.setattr(ends.one._writer, "_next_try", math.inf)
    for is_far in (False, True):
        ends.one._writer.is_far = is_far
        ends.one.send([torch.ones(70_000), torch.ones(10)])
        assert all(each.eq(1).all() for each in take(ends.other))
    assert streamed == [280_000]


def test_a_tensor_without_memory_is_sent(ends):
    ends.one._writer.is_far, ends.one._writer._next_try = True, 0.0
    ends.one.send([torch._efficientzerotensor(70_000)])
    assert torch.equal(take(ends.other)[0], torch.zeros(70_000))


def test_gradients_are_asked_for_where_the_sender_does(ends):
    leaf = torch.ones(3, requires_grad=True)
    ends.one.send([leaf * 2, leaf.detach(), torch.ones(2, dtype=torch.int64)])
    assert [each.requires_grad for each in take(ends.other)] == [True, False, False]


@pytest.mark.parametrize("is_far", [False, True])
def test_a_view_is_sent_as_it_is_seen(ends, is_far):
    ends.one._writer.is_far = is_far
    many = torch.randn(70_000, dtype=torch.complex64)
    for values in (torch.arange(12.0).view(3, 4).t()[1:], many.view(7, -1).t(), many.conj(), torch._neg_view(many)):
        ends.one.send([values])
        assert torch.equal(take(ends.other)[0], values)


def test_what_is_received_is_its_own(ends):
    values = torch.ones(1000)
    ends.one.send([values])
    first = take(ends.other)[0]
    ends.one.send([values.fill_(2.0)])
    take(ends.other)
    assert first.unique().tolist() == [1.0]


def test_sends_never_wait(ends):
    """More than there is room for are kept, in order, with their values."""
    num = 3 * NUM_MESSAGES
    values = torch.zeros(5)
    for number in range(num):
        ends.one.send([values.fill_(number)])
    for number in range(num):
        assert take(ends.other)[0].tolist() == [number] * 5
        ends.one.send([])  # the next chance to show what there is room for now


def test_what_found_no_room_is_pushed_on(ends):
    num = 2 * NUM_MESSAGES + 3
    for number in range(num):
        ends.one.send([torch.tensor([float(number)])])
    assert not ends.one.push()
    assert [take(ends.other)[0].item() for _ in range(NUM_MESSAGES)] == list(range(NUM_MESSAGES))
    assert not ends.one.push()
    assert [take(ends.other)[0].item() for _ in range(NUM_MESSAGES)] == list(range(NUM_MESSAGES, 2 * NUM_MESSAGES))
    assert ends.one.push()
    assert [take(ends.other)[0].item() for _ in range(3)] == list(range(2 * NUM_MESSAGES, num))


def test_a_peer_that_gave_up_is_not_read(ends):
    ends.one.send([torch.ones(1)])
    ends.exchanges[0].give_up()
    with pytest.raises(GroupClosed):
        take(ends.other)


def test_memory_is_used_again(ends):
    for _ in range(5 * NUM_MESSAGES):
        ends.one.send([torch.ones(10_000)])
        take(ends.other)
    assert ends.arenas[0].num_bytes_used <= 4 * 65536


def test_idle_time_is_used_until_something_comes(ends):
    done = []

    def idle() -> float:
        done.append(1)
        if len(done) == 3:
            ends.one.send([torch.ones(1)])
        return 0.0 if len(done) < 10 else math.inf

    assert ends.other.receive(time.monotonic() + SECONDS, idle)[0].tolist() == [1.0]
    assert len(done) == 3, "a message that is there is taken at once"


def test_who_has_more_to_do_soon_is_asked_again(ends, monkeypatch):
    monkeypatch.setattr("process_groups.shared_memory.pipes._LOOK", SECONDS)
    asked = []

    def idle() -> float:
        asked.append(1)
        if len(asked) == 3:
            ends.one.send([torch.ones(1)])
        return 0.001

    assert ends.other.receive(time.monotonic() + SECONDS, idle)[0].tolist() == [1.0]
    assert len(asked) == 3


def test_a_deadline(ends):
    with pytest.raises(DeadlineExceeded):
        ends.other.receive(time.monotonic() + 0.02, lambda: math.inf)


def test_a_peer_that_is_gone(ends):
    ends.trouble = PeerLost("rank 0 died", rank=0)
    with pytest.raises(PeerLost) as caught:
        take(ends.other)
    assert caught.value is ends.trouble


@pytest.mark.parametrize("who", [0, 1])
def test_a_group_that_is_given_up(ends, who):
    ends.exchanges[who].give_up()
    with pytest.raises(GroupClosed):
        take(ends.other)


def test_descriptions():
    signature = signature_of([torch.ones(2, 3), None, torch.ones(0, dtype=torch.int64)])
    words = describe(signature, [64, 0, 0])
    assert read_description([*words, 99, 99]) == (signature, [64, 0, 0])
    with pytest.raises(InvalidCall, match=r"^a stage passes 60 tensors on, which are too many; join some of them\.$"):
        describe(signature_of([torch.ones(1)] * 60), [0] * 60)
    assert len(describe(signature_of([torch.ones(1)] * 50), [0] * 50)) <= MESSAGE_WORDS
    with pytest.raises(InvalidCall, match=r"^a stage can't pass torch\.float8_e5m2 on; convert it to one of float32, "):
        describe(signature_of([torch.ones(1).to(torch.float8_e5m2)]), [0])


def test_no_memory_for_a_message(ends, monkeypatch):
    monkeypatch.setattr("process_groups.arena.available_memory", lambda: 3 << 20)
    with pytest.raises(CommunicationError) as caught:
        ends.one.send([torch.ones(1024, 1024)])
    assert str(caught.value) == (
        "no memory for a message with torch.float32 (1024, 1024) of 4.0 MiB: 3.0 MiB are available here. Give the "
        "ranks more memory (a container's --memory), start fewer on this host, or make microbatches smaller; with "
        "comm.backend: gloo nothing is kept in shared memory."
    )


def test_shapes_that_come_and_go(ends):
    """What is kept of old ones is let go."""
    for length in range(1, 300):
        for _ in range(2):
            ends.one.send([torch.full((length,), float(length))])
            assert take(ends.other)[0].tolist() == [length] * length
    assert len(ends.one._free) <= 65


def test_there_will_be_no_room_where_the_peer_is_gone(ends):
    for _ in range(NUM_MESSAGES + 1):
        ends.one.send([])
    ends.trouble = PeerLost("rank 1 died", rank=1)
    with pytest.raises(PeerLost):
        ends.one.push()
    ends.trouble = None
    ends.exchanges[1].give_up()
    with pytest.raises(GroupClosed):
        ends.one.push()
