"""Shared-memory groups whose ranks are all in this process: stepped in any order, or each with a loop and thread."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from process_groups.arena import Arena, open_peer
from process_groups.call import Call, Place
from process_groups.call_queue import ENDED, CallQueue, Steps, Wait
from process_groups.counters import Abandoned, Counter, Patience
from process_groups.group import Group
from process_groups.reduction import PIECE, Reducer
from process_groups.shared_memory import collectives as shared_collectives
from process_groups.shared_memory import exchange, relay, writer
from process_groups.shared_memory import packets as shared_packets
from process_groups.shared_memory.board import Page
from process_groups.shared_memory.collectives import FLAT, FlatAllReduce, steps_of
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import NUM_PACKETS, NUM_WINDOWS, PACKET, lay_out
from process_groups.shared_memory.ledger import Member
from process_groups.shared_memory.link import SharedLink
from process_groups.shared_memory.packets import Packets
from process_groups.shared_memory.transport import SharedMemoryTransport
from process_groups.shared_memory.writer import WORTH_STREAMING
from process_groups.strategies.algorithms import program_of
from process_groups.strategies.execute import all_reduce_steps
from runtime.errors import Coords, GroupClosed
from tests.support.processes import SECONDS

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
STRATEGIES = ("ring", "tree", "hierarchical")
SMALL, MIDDLE, LARGE = 60, 1200, 36_000  # floats: one round, two rounds, three chunks; all can be cut for 2 to 6 ranks
COPIED = 64 << 10  # bytes: what is sent with no more than these is always copied, and without a header


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    """The same steps with fewer bytes."""
    monkeypatch.setattr(shared_collectives, "FLAT", 4 << 10)
    monkeypatch.setattr(shared_collectives, "CHUNK", 64 << 10)
    monkeypatch.setattr(relay, "WINDOW", 8 << 10)
    monkeypatch.setattr(writer, "WORTH_STREAMING", 64)
    monkeypatch.setattr(writer, "_TRY_EVERY", math.inf)  # how a rank writes does not depend on the time


class Rank:
    """One rank's memory, and what it does without a queue."""

    def __init__(self, arenas: list[Arena], me: int) -> None:
        layout = lay_out([len(arenas)])[0]
        mapped = [arena if peer == me else open_peer(arena.address_for_peers) for peer, arena in enumerate(arenas)]
        assert None not in mapped
        self.arena, self.mapped, self.me, self.size, self.layout = arenas[me], mapped, me, len(arenas), layout
        self.exchange = Exchange(mapped, me, layout)
        self.exchange.writer.is_far = me % 2 == 1
        self.packets = Packets(
            self.exchange,
            lambda name: CallQueue(name, Patience(0, 0), self.exchange.is_abandoned, lambda _: GroupClosed("given up")),
        )
        self._links = {peer: SharedLink(self.exchange, peer) for peer in range(self.size) if peer != me}

    def tensor(self, values: torch.Tensor, registered: bool) -> torch.Tensor:
        tensor = self.arena.empty(values.shape, values.dtype) if registered else torch.empty_like(values)
        assert tensor is not None
        return tensor.copy_(values)

    def steps(self, call: Call) -> Steps:
        if call.is_point_to_point:
            return self.packets.queue_and_steps(call)[1]
        if call.strategy == "default":
            return steps_of(self.exchange, call)
        program = partial(program_of, call.strategy, self.size, self.me, hosts=(0,) * self.size)
        return all_reduce_steps(call, program, self._links, self.exchange, self.size)


@pytest.fixture
def ranks_of() -> Iterator[Callable[[int], list[Rank]]]:
    made: list[Arena] = []

    def ranks_of(size: int) -> list[Rank]:
        arenas = [Arena(lay_out([size])[-1].stop, size) for _ in range(size)]
        made.extend(arenas)
        return [Rank(arenas, me) for me in range(size)]

    yield ranks_of
    for arena in made:
        arena.close()


@pytest.fixture
def streamed(monkeypatch) -> list[int]:
    """How many bytes were written round the cache, each time."""
    found: list[int] = []

    def stream(target: torch.Tensor, source: torch.Tensor) -> None:
        found.append(source.nbytes)
        target.copy_(source)

    for module in (writer, shared_packets):
        monkeypatch.setattr(module, "stream", stream)
    return found


class Stepped:
    """Steps of one rank, which go on only when told to."""

    def __init__(self, *steps: Steps) -> None:
        self._steps = list(steps)
        self.waits_for: Wait | None = None
        self._has_failed = False

    @property
    def has_ended(self) -> bool:
        return not self._steps

    def go_on(self) -> bool:
        """As far as it can; whether it did anything."""
        if self.has_ended or (self.waits_for is not None and self.waits_for[0].value < self.waits_for[1]):
            return False
        self.waits_for = next(self._steps[0], None)
        if self.waits_for is None:
            del self._steps[0]
        return True

    def goes_on_until_it_fails(self) -> bool:
        """As far as it can; whether it has not been abandoned."""
        try:
            while self.go_on():
                pass
        except Abandoned:
            self._has_failed = True
        return not self._has_failed


def in_any_order(stepped: list[Stepped], choose: random.Random) -> None:
    """Go on with ranks at random; each as far as it can, or it would never get far ahead."""
    while not all(rank.has_ended for rank in stepped):
        able = [rank for rank in choose.sample(stepped, len(stepped)) if rank.go_on()]
        assert able, "nobody can go on"


def values_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randn(numel, generator=generator).mul_(100).to(dtype)


def expected(kind: str, sources: list[torch.Tensor], me: int, op: str = "sum", root: int = 0) -> torch.Tensor:
    size = len(sources)
    if kind == "all_gather":
        return torch.cat(sources)
    if kind == "broadcast":
        return sources[root]
    if kind == "all_to_all":
        return torch.cat([source.chunk(size)[me] for source in sources])
    wide = torch.float32 if sources[0].dtype in (torch.float16, torch.bfloat16) else sources[0].dtype
    total = sources[0].to(wide)
    for source in sources[1:]:
        total = total + source.to(wide)
    total = (total / size if op == "mean" else total).to(sources[0].dtype)
    return total if kind == "all_reduce" else total.chunk(size)[me]


def make_call(rank: Rank, kind: str, values: torch.Tensor, registered: bool, **options: Any) -> Call:
    source = rank.tensor(values, registered)
    if kind in ("all_reduce", "broadcast"):
        return Call(kind, source, source, **options)
    numel = {"all_gather": rank.size * values.numel(), "reduce_scatter": values.numel() // rank.size}
    return Call(kind, source, torch.empty(numel.get(kind, values.numel()), dtype=values.dtype), **options)


@pytest.mark.parametrize("registered", ["all", "none", "some"])
@pytest.mark.parametrize("numel", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_in_any_order_of_steps(ranks_of, size, kind, numel, registered):
    ranks = ranks_of(size)
    for seed in range(3):
        choose = random.Random(seed)
        sources = [values_of(me, numel) for me in range(size)]
        options = {"op": "sum"} if "reduce" in kind else {"peer": size - 1} if kind == "broadcast" else {}
        is_registered = {
            "all": [True] * size,
            "none": [False] * size,
            "some": [me != seed % size for me in range(size)],
        }
        calls = [
            make_call(rank, kind, source, is_registered[registered][rank.me], **options)
            for rank, source in zip(ranks, sources, strict=True)
        ]
        in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], choose)
        for me, call in enumerate(calls):
            assert torch.equal(call.target, expected(kind, sources, me, root=size - 1)), (seed, me)
            if call.target is not call.source:
                assert torch.equal(call.source, sources[me]), "a source stays as it is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 24, 1024 + 24])
@pytest.mark.parametrize("numel", [SMALL, MIDDLE, LARGE, LARGE + 7])
@pytest.mark.parametrize("size", [2, 3])
def test_a_result_in_common(ranks_of, size, numel, start, dtype):
    """Of tensors that begin anywhere in a page, at the same place on every rank."""
    ranks, sources = ranks_of(size), [values_of(me, numel, dtype) for me in range(size)]
    for op in ("sum", "mean"):
        tensors = [rank.arena.empty((start + numel,), dtype)[start:] for rank in ranks]
        calls = [
            Call("all_reduce", tensor.copy_(source), tensor, op, shared=True)
            for tensor, source in zip(tensors, sources, strict=True)
        ]
        in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(numel))
        total = expected("all_reduce", sources, 0, op)
        if total.nbytes <= shared_collectives.FLAT:
            assert all(call.result is None and torch.equal(call.target, total) for call in calls)
            continue
        assert all(torch.equal(call.result, total) for call in calls)
        for me, tensor in enumerate(tensors):
            tensor.fill_(me)
        cuts = shared_collectives.cuts_at_pages(start * dtype.itemsize, numel, dtype.itemsize, size)
        owners = torch.cat([torch.full((b - a,), float(me)) for me, (a, b) in enumerate(itertools.pairwise(cuts))])
        assert all(torch.equal(call.result, owners.to(dtype)) for call in calls), "it lies in the ranks' own tensors"


def test_no_result_in_common_for_tensors_that_lie_otherwise(ranks_of):
    ranks, sources = ranks_of(2), [values_of(me, LARGE) for me in range(2)]
    tensors = [rank.arena.empty((LARGE + 16,), torch.float32)[16 * rank.me :][:LARGE] for rank in ranks]
    calls = [
        Call("all_reduce", tensor.copy_(source), tensor, "sum", shared=True)
        for tensor, source in zip(tensors, sources, strict=True)
    ]
    in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(0))
    assert all(call.result is None and torch.equal(call.target, sources[0] + sources[1]) for call in calls)


@pytest.mark.parametrize("offset", [0, 24, 4088])
@pytest.mark.parametrize("numel", [1, 3, 1000, 5000])
def test_slices_begin_with_pages(offset, numel):
    for num in (1, 2, 3, 8):
        cuts = shared_collectives.cuts_at_pages(offset, numel, 8, num)
        assert (cuts[0], cuts[-1], len(cuts)) == (0, numel, num + 1)
        assert cuts == sorted(cuts)
        assert all((offset + 8 * cut) % 4096 == 0 for cut in cuts[1:-1] if cut)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_strategies_in_any_order_of_steps(ranks_of, size, dtype, strategy):
    ranks = ranks_of(size)
    for seed, numel in enumerate((1, 3, SMALL, MIDDLE)):
        sources = [values_of(me, numel, dtype) for me in range(size)]
        calls = [
            make_call(rank, "all_reduce", source, (rank.me + seed) % 2 == 0, op="mean", strategy=strategy)
            for rank, source in zip(ranks, sources, strict=True)
        ]
        in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(seed))
        exact = torch.stack(sources).double().mean(0)
        tolerance = 1.0 if dtype is torch.bfloat16 else 1e-4
        assert (calls[0].target.double() - exact).abs().max() <= tolerance
        assert all(torch.equal(call.target, calls[0].target) for call in calls)


def test_blocks_of_a_strategy_follow_each_other(ranks_of, monkeypatch):
    monkeypatch.setattr("process_groups.strategies.execute.BLOCK", 400)
    ranks = ranks_of(3)
    sources = [torch.arange(1050.0) * 10**me for me in range(3)]
    calls = [
        make_call(rank, "all_reduce", source, rank.me == 1, op="sum", strategy="ring")
        for rank, source in zip(ranks, sources, strict=True)
    ]
    in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(5))
    assert all(torch.equal(call.target, torch.arange(1050.0) * 111) for call in calls)


def all_sorts_of_calls(rank: Rank, choose: random.Random) -> list[Call]:
    """The same for all ranks, but for what is registered and the values."""
    calls = []
    for number in range(40):
        kind, numel = choose.choice(KINDS), choose.choice((SMALL, SMALL, MIDDLE, LARGE))
        strategy = choose.choice(("default", *STRATEGIES)) if kind == "all_reduce" else "default"
        registered = [choose.random() < 0.7 for _ in range(rank.size)][rank.me]
        options = {"op": "sum"} if "reduce" in kind else {"peer": number % rank.size} if kind == "broadcast" else {}
        values = torch.full((numel,), float((rank.me + 1) * (number + 1)))
        calls.append(make_call(rank, kind, values, registered, strategy=strategy, **options))
    return calls


@pytest.mark.parametrize("seed", range(3))
def test_calls_in_a_row_do_not_mix(ranks_of, seed):
    """Slots and offers are used again and again, while one rank is as far ahead of another as it can be."""
    size = 3
    ranks = ranks_of(size)
    calls = [all_sorts_of_calls(rank, random.Random(seed)) for rank in ranks]
    stepped = [Stepped(*(rank.steps(call) for call in mine)) for rank, mine in zip(ranks, calls, strict=True)]
    in_any_order(stepped, random.Random(seed))
    for number, of_all in enumerate(zip(*calls, strict=True)):
        for me, call in enumerate(of_all):
            sources = [torch.full_like(call.source, float((peer + 1) * (number + 1))) for peer in range(size)]
            assert torch.equal(call.target, expected(call.kind, sources, me, root=number % size)), (number, call.kind)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("place", ["own", "first", "last"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_source_and_result_may_share_memory(ranks_of, kind, place, registered):
    size, numel = 3, LARGE
    for seed in range(5):
        ranks = ranks_of(size)
        sources = [values_of(me, numel if kind != "all_gather" else numel // size) for me in range(size)]
        calls = []
        for rank, source in zip(ranks, sources, strict=True):
            whole = rank.tensor(torch.zeros(numel), registered)
            part = whole.chunk(size)[{"own": rank.me, "first": 0, "last": size - 1}[place]]
            mine, out = {"all_gather": (part, whole), "reduce_scatter": (whole, part)}.get(kind, (whole, whole))
            calls.append(Call(kind, mine.copy_(source), out, "sum" if kind == "reduce_scatter" else None))
        in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(seed))
        for me, call in enumerate(calls):
            assert torch.equal(call.target, expected(kind, sources, me)), (seed, me)


@pytest.mark.parametrize("registered", [True, False])
def test_a_source_that_lies_across_the_result(ranks_of, registered):
    """Rows would be overwritten before they are read."""
    ranks, sources = ranks_of(2), [values_of(me, LARGE) for me in range(2)]
    wholes = [rank.tensor(torch.zeros(2 * LARGE), registered) for rank in ranks]
    calls = [
        Call("all_gather", whole[LARGE // 2 :][:LARGE].copy_(source), whole)
        for whole, source in zip(wholes, sources, strict=True)
    ]
    in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(0))
    assert all(torch.equal(whole, torch.cat(sources)) for whole in wholes)


def test_a_barrier_waits_for_the_last(ranks_of):
    ranks = ranks_of(3)
    stepped = [Stepped(rank.steps(Call("barrier"))) for rank in ranks]
    for rank in stepped[:2]:
        while rank.go_on():
            pass
    assert [rank.has_ended for rank in stepped] == [False, False, False]
    while stepped[2].go_on():
        pass
    assert stepped[2].has_ended
    in_any_order(stepped, random.Random(1))


# Sends and receives.


SIZES = (
    *(0, 1, COPIED, COPIED + 1, PACKET, PACKET + 1, PACKET + COPIED, NUM_PACKETS * PACKET),
    3 * NUM_PACKETS * PACKET + 5,
)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_message_of_any_size(ranks_of, num_bytes, registered):
    one, other = ranks_of(2)
    values = torch.arange(num_bytes).to(torch.uint8)
    for _ in range(3):
        target = other.tensor(torch.zeros_like(values), registered)
        send = one.steps(Call("send", source=one.tensor(values, registered), peer=1))
        recv = other.steps(Call("recv", target=target, peer=0))
        in_any_order([Stepped(send), Stepped(recv)], random.Random(num_bytes))
        assert torch.equal(target, values)


def test_small_sends_end_before_their_receiver_comes(ranks_of):
    one, other = ranks_of(2)
    sends = [
        Stepped(one.steps(Call("send", source=torch.full((3,), float(n)), peer=1))) for n in range(NUM_PACKETS + 1)
    ]
    for send in sends:
        while send.go_on():
            pass
    assert [send.has_ended for send in sends] == [True] * NUM_PACKETS + [False]
    targets = [torch.zeros(3) for _ in sends]
    receives = Stepped(*(other.steps(Call("recv", target=target, peer=0)) for target in targets))
    in_any_order([sends[-1], receives], random.Random(1))
    assert [target[0].item() for target in targets] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("num_bytes", "registered", "is_shown"),
    [(COPIED, True, False), (COPIED + 4, True, True), (COPIED + 4, False, False), (3 * PACKET, True, True)],
)
def test_what_is_registered_and_not_small_is_read_where_it_lies(ranks_of, num_bytes, registered, is_shown):
    one, other = ranks_of(2)
    source = one.tensor(torch.ones(num_bytes // 4), registered)
    packet = one.arena.tensor(one.layout.packet(1, 0), 4, torch.float32).fill_(7)
    send = Stepped(one.steps(Call("send", source=source, peer=1)))
    while send.go_on():
        pass
    assert send.has_ended is not is_shown, "it waits for its reader, or is copied and has ended"
    assert packet.eq(7 if is_shown else 1).all()
    source.fill_(2)
    target = torch.zeros(num_bytes // 4)
    in_any_order([send, Stepped(other.steps(Call("recv", target=target, peer=0)))], random.Random(1))
    assert target.eq(2 if is_shown else 1).all()


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("kind", ["send", "all_gather"])
def test_tensors_without_memory(ranks_of, monkeypatch, kind, begin):
    monkeypatch.setattr(writer, "WORTH_STREAMING", WORTH_STREAMING)
    monkeypatch.setattr(writer, "_TRY_EVERY", 0.0)
    one, other = ranks_of(2)
    for numel in (5000, 3 * PACKET // 4):
        source = torch._efficientzerotensor(begin + numel)[begin:]
        if kind == "send":
            target = torch.ones(numel)
            calls = [(one, Call("send", source=source, peer=1)), (other, Call("recv", target=target, peer=0))]
        else:
            target = torch.ones(2 * numel)
            calls = [(rank, Call(kind, target=target, source=source)) for rank in (one, other)]
        in_any_order([Stepped(rank.steps(call)) for rank, call in calls], random.Random(1))
        assert not target.any()


@pytest.mark.parametrize(
    ("num_bytes", "goes_around"), [(64, False), (WORTH_STREAMING - 4, False), (WORTH_STREAMING, True), (COPIED, True)]
)
def test_which_messages_always_go_round_the_cache(ranks_of, streamed, num_bytes, goes_around):
    one, other = ranks_of(2)
    values, target = values_of(0, num_bytes // 4), torch.zeros(num_bytes // 4)
    finish(one.steps(Call("send", source=values, peer=1)))
    outbox = one.packets._boxes["send", 1][1]
    streamed.clear()
    assert outbox.begin(Call("send", source=values, peer=1)) is None
    assert streamed == ([num_bytes] if goes_around else [])
    for _ in range(2):
        in_any_order([Stepped(other.steps(Call("recv", target=target, peer=0)))], random.Random(1))
        assert torch.equal(target, values)


def test_a_registered_tensor_is_copied_where_the_receiver_is_far(ranks_of, streamed):
    one, other = ranks_of(2)
    values = values_of(0, 3 * PACKET // 4)
    source, target = one.tensor(values, True), other.tensor(torch.zeros_like(values), True)
    send, receive = Call("send", source=source, peer=1), Call("recv", target=target, peer=0)
    in_any_order([Stepped(one.steps(send)), Stepped(other.steps(receive))], random.Random(1))
    outbox = one.packets._boxes["send", 1][1]
    outbox._writer.is_far = True
    finish(one.steps(send))
    assert sum(streamed) == values.nbytes
    source.zero_()
    target.zero_()
    in_any_order([Stepped(other.steps(receive))], random.Random(1))
    assert torch.equal(target, values)


@pytest.mark.parametrize(
    "is_far", [(False, False, False), (True, True, True), (True, False, True), (False, True, False)]
)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_sums_are_the_same_however_each_rank_writes(ranks_of, streamed, is_far, op, dtype):
    ranks, numel = ranks_of(3), 30_000
    sources = [values_of(rank, numel, dtype) for rank in range(3)]
    for rank, far in zip(ranks, is_far, strict=True):
        rank.exchange.writer.is_far = far
    calls = [Call("all_reduce", target=source.clone(), op=op) for source in sources]
    in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(1))
    extreme = {"min": torch.amin, "max": torch.amax}.get(op)
    wanted = extreme(torch.stack(sources), 0) if extreme else expected("all_reduce", sources, 0, op)
    assert all(torch.equal(call.target, wanted) for call in calls)
    width = 4 if op in ("sum", "mean") else dtype.itemsize
    assert sum(streamed) == sum(is_far) * numel * width


def test_a_rank_in_the_midst_of_near_ones_adds_in_place_but_for_the_first_window(ranks_of, monkeypatch):
    """Which tells how far its readers are."""
    ranks, written = ranks_of(3), [0, 0, 0]
    for rank in ranks:
        rank.exchange.writer.is_far = False

    def write(self, target, source):
        written[[rank.exchange.writer for rank in ranks].index(self)] += 1
        target.copy_(source)

    monkeypatch.setattr(writer.Writer, "write", write)
    calls = [Call("all_reduce", target=torch.ones(10 * relay.WINDOW // 4), op="sum") for _ in ranks]
    in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(1))
    assert written == [10, 1, 10]


def test_nothing_is_added_to_what_a_rank_that_gave_up_has_left(ranks_of):
    one, other = ranks_of(2)
    calls = [Call("all_reduce", target=torch.ones(4 * relay.WINDOW // 4), op="sum") for _ in range(2)]
    first, second = (Stepped(rank.steps(call)) for rank, call in zip((one, other), calls, strict=True))
    assert [first.go_on(), second.go_on(), first.go_on()] == [True] * 3
    assert one.exchange.windows_added[0].value > 0, "the second could go on"
    one.exchange.give_up()
    assert not second.goes_on_until_it_fails()
    assert calls[1].target.eq(1).all()


@pytest.mark.parametrize("num_bytes", [COPIED, 2 * PACKET])
def test_a_packet_is_written_before_it_is_told(ranks_of, monkeypatch, num_bytes):
    one, _ = ranks_of(2)
    values = torch.arange(num_bytes // 4, dtype=torch.int32)
    told, store = [], Counter.store

    def look_and_store(counter, value):
        if counter is one.packets._boxes["send", 1][1].sent:
            numel = min(num_bytes, PACKET) // 4
            packet = one.arena.tensor(one.layout.packet(1, value - 1), numel, torch.int32)
            told.append(torch.equal(packet, values.split(numel)[value - 1]))
        store(counter, value)

    monkeypatch.setattr(Counter, "store", look_and_store)
    send = Call("send", source=values, peer=1)
    if not at_once(one, send):
        finish(one.steps(send))
    assert told == [True] * -(-num_bytes // PACKET)


@pytest.mark.parametrize("kind", ["all_gather", "broadcast"])
def test_what_is_staged_for_far_ranks_goes_round_the_cache(ranks_of, streamed, kind):
    ranks = ranks_of(2)
    for rank in ranks:
        rank.exchange.writer.is_far = True
    calls = [
        make_call(rank, kind, values_of(rank.me, LARGE), False, peer=0 if kind == "broadcast" else None)
        for rank in ranks
    ]
    in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(1))
    assert sum(streamed) == 4 * LARGE * (1 if kind == "broadcast" else 2)


def test_a_shown_tensor_is_held_until_it_was_read(ranks_of):
    one, other = ranks_of(2)
    values = values_of(0, COPIED)
    used = one.arena.num_bytes_used
    send = Stepped(one.steps(Call("send", source=one.tensor(values, True), peer=1)))
    send.go_on()
    gc.collect()
    assert one.arena.num_bytes_used == used + values.nbytes
    target = torch.empty(COPIED)
    in_any_order([send, Stepped(other.steps(Call("recv", target=target, peer=0)))], random.Random(1))
    assert torch.equal(target, values)
    gc.collect()
    assert one.arena.num_bytes_used == used


class Baton:
    """Threads of which one runs at a time, and another at random wherever one hands over."""

    def __init__(self, choose: random.Random, num: int) -> None:
        self._choose, self._running = choose, list(range(num))
        self._turns = [threading.Semaphore(0) for _ in range(num)]
        self._here = threading.local()

    def hand_over(self) -> None:
        following = self._choose.choice(self._running)
        if following != self._here.number:
            self._turns[following].release()
            assert self._turns[self._here.number].acquire(timeout=SECONDS)

    def run(self, *functions: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._run_one, args=each, daemon=True) for each in enumerate(functions)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join(SECONDS)
        assert not self._running, "a thread has failed"

    def _run_one(self, number: int, function: Callable[[], None]) -> None:
        self._here.number = number
        assert self._turns[number].acquire(timeout=SECONDS)
        function()
        self._running.remove(number)
        if self._running:
            self._turns[self._choose.choice(self._running)].release()


@pytest.mark.parametrize("num_bytes", [257, 64 * 5, 64 * 9 + 3])
def test_both_ends_copy_a_registered_tensor_until_they_meet(ranks_of, monkeypatch, num_bytes):
    """They may be interrupted wherever one looks at what the other does."""
    monkeypatch.setattr(shared_packets, "_WORTH_SHOWING", 256)
    monkeypatch.setattr(shared_packets, "_PIECE", 64)
    choose, copied_by_sender = random.Random(num_bytes), 0
    baton = Baton(choose, 2)
    claim, is_abandoned = shared_packets._Pair._claim, Exchange.is_abandoned

    def claim_and_hand_over(pair, words, index, value):
        baton.hand_over()
        claim(pair, words, index, value)
        baton.hand_over()

    def look_and_hand_over(exchange):  # what comes next is a copy
        nonlocal copied_by_sender
        if exchange is one.exchange:
            copied_by_sender += 1
            done_by_sender.append("look")
        baton.hand_over()
        return is_abandoned(exchange)

    monkeypatch.setattr(shared_packets._Pair, "_claim", claim_and_hand_over)
    monkeypatch.setattr(Exchange, "is_abandoned", look_and_hand_over)
    one, other = ranks_of(2)
    done_by_sender, write, store = [], writer.Writer.write, Counter.store

    def store_and_note(counter, value):
        if counter is one.packets._boxes["send", 1][1].helped:
            done_by_sender.append("tell")
        store(counter, value)

    monkeypatch.setattr(writer.Writer, "write", lambda *call: done_by_sender.append("write") or write(*call))
    monkeypatch.setattr(Counter, "store", store_and_note)

    def run(stepped):
        while not stepped.has_ended:
            if not stepped.go_on():
                baton.hand_over()

    def receive(target):
        run(Stepped(other.steps(Call("recv", target=target, peer=0))))
        received.append(target.clone())
        baton.hand_over()
        target.fill_(7)  # it is the user's again

    for _ in range(200):
        values, received = torch.randint(8, 256, (num_bytes,), dtype=torch.uint8), []
        source, target = one.tensor(values, True), other.tensor(torch.zeros_like(values), True)
        baton._running[:] = [0, 1]
        baton.run(
            partial(run, Stepped(one.steps(Call("send", source=source, peer=1)))),
            partial(receive, target),
        )
        assert torch.equal(received[0], values)
        assert target.eq(7).all(), "the sender wrote after the receive had ended"
    assert copied_by_sender > 200
    pieces = [done_by_sender[n : n + 3] for n, what in enumerate(done_by_sender) if what == "look"]
    assert all(each == ["look", "write", "tell"] for each in pieces), "by the writer, so that it learns how far that is"


# Small calls that are carried out where they are made.


def finish(steps: Steps) -> None:
    """Nothing keeps it from ending."""
    assert list(steps) == []


def at_once(rank: Rank, call: Call) -> bool:
    """Carry a send or receive out where it is made; False, and nothing done, where that can't be."""
    quick = rank.packets.quick(call)
    return quick is not None and quick.is_next() and quick.begin(call) is None


def test_sends_and_receives_at_once_and_in_steps_are_the_same(ranks_of):
    one, other = ranks_of(2)
    choose = random.Random(3)
    shapes = ((1,), (3,), (2, 5), (COPIED // 4,), (4, COPIED // 16))
    for number in range(200):
        shape, dtype = choose.choice(shapes), choose.choice((torch.float32, torch.bfloat16, torch.int64))
        if torch.Size(shape).numel() * dtype.itemsize > COPIED:
            continue
        values = values_of(number, torch.Size(shape).numel(), dtype).view(shape)
        send = Call("send", source=one.tensor(values, choose.random() < 0.5), peer=1)
        recv = Call("recv", target=torch.zeros(shape, dtype=dtype), peer=0)
        for rank, call in ((one, send), (other, recv)):
            if choose.random() < 0.5:
                assert at_once(rank, call)
            else:
                finish(rank.steps(call))
        assert torch.equal(recv.target, values), number


@pytest.mark.parametrize("num_bytes", [0, COPIED + 1, PACKET, PACKET + 1])
def test_only_what_is_small_is_sent_at_once(ranks_of, num_bytes):
    one, other = ranks_of(2)
    values = torch.arange(num_bytes).to(torch.uint8)
    send = Call("send", source=values, peer=1)
    recv = Call("recv", target=torch.zeros(num_bytes, dtype=torch.uint8), peer=0)
    assert one.packets.quick(send) is None
    assert other.packets.quick(recv) is None
    finish(one.steps(send))
    assert other.packets.quick(recv) is None, "not either when it is there"
    finish(other.steps(recv))
    assert torch.equal(recv.target, values)


@pytest.mark.parametrize("num_bytes", [WORTH_STREAMING - 4, WORTH_STREAMING, COPIED])
def test_repeated_messages_that_are_not_tiny_go_round_the_cache(ranks_of, streamed, num_bytes):
    one, _ = ranks_of(2)
    values = torch.ones(num_bytes // 4)
    send = Call("send", source=values, peer=1, memory=memoryview(values.numpy()).cast("B"))
    assert at_once(one, send)
    assert streamed == ([num_bytes] if num_bytes >= WORTH_STREAMING else [])


def test_messages_that_wait_are_not_written_over(ranks_of):
    one, other = ranks_of(2)
    for first in range(0, 3 * NUM_PACKETS, NUM_PACKETS - 1):  # so that all packets have been used, each in its turn
        for number in range(first, first + NUM_PACKETS):
            assert at_once(one, Call("send", source=torch.full((COPIED // 4,), float(number)), peer=1))
        for number in range(first, first + NUM_PACKETS):
            target = torch.zeros(COPIED // 4)
            assert at_once(other, Call("recv", target=target, peer=0))
            assert target.unique().tolist() == [number]


def test_a_full_ring_of_packets_takes_nothing_at_once(ranks_of):
    one, other = ranks_of(2)
    sends = [Call("send", source=torch.full((3,), float(n)), peer=1) for n in range(NUM_PACKETS + 2)]
    receives = [Call("recv", target=torch.zeros(3), peer=0) for _ in sends]
    assert not at_once(other, receives[0]), "nothing is there"
    for lead in range(len(sends)):
        if lead >= NUM_PACKETS:
            assert not at_once(one, sends[lead])
            assert not at_once(one, sends[lead]), "asking changes nothing"
            assert at_once(other, receives[lead - NUM_PACKETS])
        assert at_once(one, sends[lead])
    for call in receives[2:]:
        assert at_once(other, call)
    assert not at_once(other, receives[0]), "all are read"
    assert [call.target.tolist() for call in receives] == [[float(n)] * 3 for n in range(len(sends))]


async def test_a_receive_does_not_overtake_one_that_waits(ranks_of):
    one, other = ranks_of(2)
    first, second = (Call("recv", target=torch.zeros(2), peer=0) for _ in range(2))
    queue, steps = other.packets.queue_and_steps(first)
    task = queue.add(first, steps, is_short=True)
    for n in (1.0, 2.0):
        assert at_once(one, Call("send", source=torch.full((2,), n), peer=1))
    assert not at_once(other, second), "its packet is there, but not its turn"
    assert second.target.tolist() == [0, 0]
    assert task.ended_well(0.0)
    assert at_once(other, second)
    assert [first.target.tolist(), second.target.tolist()] == [[1, 1], [2, 2]]
    queue.stop()


async def test_a_send_does_not_overtake_one_that_waits(ranks_of):
    one, other = ranks_of(2)
    sends = [Call("send", source=torch.full((2,), float(n)), peer=1) for n in range(NUM_PACKETS + 2)]
    receives = [Call("recv", target=torch.zeros(2), peer=0) for _ in sends]
    assert [at_once(one, call) for call in sends[:NUM_PACKETS]] == [True] * NUM_PACKETS
    queue, steps = one.packets.queue_and_steps(sends[-2])
    task = queue.add(sends[-2], steps, is_short=True)
    assert [at_once(other, call) for call in receives[:2]] == [True, True]
    assert not at_once(one, sends[-1]), "there is room, but it is not its turn"
    assert task.ended_well(0.0)
    assert at_once(one, sends[-1])
    assert [at_once(other, call) for call in receives[2:]] == [True] * NUM_PACKETS
    assert [call.target.tolist() for call in receives] == [[float(n)] * 2 for n in range(len(sends))]
    queue.stop()


async def test_each_pair_and_direction_has_its_own_turn(ranks_of):
    one, other, third = ranks_of(3)
    waiting = Call("recv", target=torch.zeros(2), peer=1)
    queue, steps = one.packets.queue_and_steps(waiting)
    task = queue.add(waiting, steps, is_short=True)
    assert at_once(one, Call("send", source=torch.ones(2), peer=1))
    assert at_once(third, Call("send", source=torch.ones(2), peer=0))
    assert at_once(one, Call("recv", target=torch.zeros(2), peer=2))
    assert at_once(other, Call("send", source=torch.ones(2), peer=0))
    assert task.ended_well(0.0)
    queue.stop()


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduces_at_once_and_in_steps_have_the_same_bits(ranks_of, size, dtype, op):
    ranks, others = ranks_of(size), ranks_of(size)
    choose = random.Random(size)
    for number, shape in enumerate(((1,), (SMALL,), (3, 7), (1024,)) * 5):
        sources = [values_of(100 * number + me, torch.Size(shape).numel(), dtype).view(shape) for me in range(size)]
        calls = [make_call(rank, "all_reduce", sources[rank.me], False, op=op) for rank in ranks]
        order = choose.sample(range(size), size)
        flat = {me: FlatAllReduce(ranks[me].exchange, calls[me]) for me in order[:-1]}
        assert [flat[me].at_once() for me in order[:-1]] == [False] * (size - 1), "one is missing"
        assert all(torch.equal(calls[me].target, sources[me]) for me in order), "nothing was touched"
        flat[order[-1]] = FlatAllReduce(ranks[order[-1]].exchange, calls[order[-1]])
        left = choose.sample(order, size)
        if size > 2:  # the first rank adds up for all
            for me in left[: left.index(0)]:
                assert not flat[me].at_once()
                assert torch.equal(calls[me].target, sources[me]), "nothing was touched"
            left.remove(0)
            left.insert(0, 0)
        for me in left:
            if choose.random() < 0.5:
                assert flat[me].at_once()
            else:
                unread = [] if size == 2 or me == 0 else [(ranks[me].exchange.result, ranks[me].exchange._round)]
                assert list(flat[me].steps()) == unread, "at most a counter that is where it has to be"
        stepped = [make_call(rank, "all_reduce", sources[rank.me], False, op=op) for rank in others]
        in_any_order([Stepped(rank.steps(call)) for rank, call in zip(others, stepped, strict=True)], choose)
        for one, other in zip(calls, stepped, strict=True):
            assert torch.equal(one.target, other.target), (number, shape)
            assert torch.equal(one.target, calls[0].target), (number, shape)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [3, 4])
def test_flat_all_reduces_between_others_have_the_bits_of_the_sum_in_order(ranks_of, size, seed):
    """Small, staged and direct calls use the slots in turn, while a rank is as far ahead as it can be."""
    ranks = ranks_of(size)
    plan = random.Random(seed)
    numels = [plan.choice((1, SMALL, SMALL, SMALL, 1024, MIDDLE, LARGE)) for _ in range(60)]
    registered = [plan.random() < 0.5 for _ in numels]
    dtypes = [plan.choice((torch.float32, torch.bfloat16)) for _ in numels]
    sources = [
        [values_of(100 * number + me, numel, dtype) for me in range(size)]
        for number, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True))
    ]
    calls = [
        [
            make_call(rank, "all_reduce", mine[rank.me], is_registered, op="sum")
            for mine, is_registered in zip(sources, registered, strict=True)
        ]
        for rank in ranks
    ]
    stepped = [Stepped(*(rank.steps(call) for call in mine)) for rank, mine in zip(ranks, calls, strict=True)]
    favoured = random.Random(seed)
    while not all(rank.has_ended for rank in stepped):
        for _ in range(favoured.randrange(10)):  # one goes ahead as far as it can
            favoured.choice(stepped).goes_on_until_it_fails()
        able = [rank for rank in favoured.sample(stepped, size) if rank.go_on()]
        assert able or all(rank.has_ended for rank in stepped), "nobody can go on"
    for number, mine in enumerate(sources):
        total = expected("all_reduce", mine, 0)
        for me in range(size):
            assert torch.equal(calls[me][number].target, total), (number, me, numels[number])


@pytest.mark.parametrize("slowest", [0, 1, 2])
def test_windows_of_a_running_sum_are_not_written_over_before_all_have_read_them(ranks_of, slowest):
    """Two ranks are as far ahead as they can be, again and again, while the third does one step at a time."""
    ranks = ranks_of(3)
    numel = 3 * NUM_WINDOWS * (8 << 10) // 4
    sources = [values_of(me, numel) for me in range(3)]
    calls = [make_call(rank, "all_reduce", sources[rank.me], False, op="sum") for rank in ranks]
    stepped = [Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)]
    while not all(rank.has_ended for rank in stepped):
        for me in (0, 1, 2, 0, 1, 2):
            if me != slowest:
                assert stepped[me].goes_on_until_it_fails()
        stepped[slowest].go_on()
    assert all(torch.equal(call.target, expected("all_reduce", sources, 0)) for call in calls)


def test_both_ways_between_many(ranks_of):
    size = 4
    ranks = ranks_of(size)
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    targets = {pair: torch.zeros(70_000) for pair in pairs}
    stepped = []
    for a, b in pairs:
        values = torch.full((70_000,), 10.0 * a + b)
        stepped.append(Stepped(ranks[a].steps(Call("send", source=ranks[a].tensor(values, a < b), peer=b))))
        stepped.append(Stepped(ranks[b].steps(Call("recv", target=targets[a, b], peer=a))))
    in_any_order(stepped, random.Random(4))
    assert all(target.eq(10.0 * a + b).all() for (a, b), target in targets.items())


# Giving up.


def test_everybody_learns_that_one_gave_up(ranks_of):
    ranks = ranks_of(3)
    assert not any(rank.exchange.is_abandoned() for rank in ranks)
    ranks[1].exchange.give_up()
    for rank in ranks:
        with pytest.raises(Abandoned):
            rank.exchange.check()


GIVEN_UP_IN = [
    *[(kind, "default", LARGE) for kind in KINDS],
    *[("all_reduce", strategy, MIDDLE) for strategy in STRATEGIES],
]


@pytest.mark.parametrize(("kind", "strategy", "numel"), GIVEN_UP_IN)
def test_nobody_takes_what_a_rank_that_gave_up_has_overwritten(ranks_of, kind, strategy, numel):
    """Wherever in the call that was: the others' calls end with the right values, or not at all."""
    sources = [values_of(me, numel) for me in range(3)]
    options = {"op": "sum"} if "reduce" in kind else {"peer": 0} if kind == "broadcast" else {}
    for seed in range(30):
        choose = random.Random(seed)
        ranks = ranks_of(3)
        calls = [
            make_call(rank, kind, source, True, strategy=strategy, **options)
            for rank, source in zip(ranks, sources, strict=True)
        ]
        stepped = [Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)]
        for _ in range(choose.randrange(20)):
            choose.choice(stepped).go_on()
        if stepped[0].has_ended:
            continue
        ranks[0].exchange.give_up()
        calls[0].source.fill_(float("nan"))
        for me in choose.sample((1, 2), 2) * 2:
            if stepped[me].goes_on_until_it_fails() and stepped[me].has_ended:
                assert torch.allclose(calls[me].target, expected(kind, sources, me), atol=1e-3), (seed, me)


def test_nobody_receives_what_a_sender_that_gave_up_has_overwritten(ranks_of):
    one, other = ranks_of(2)
    source, target = one.tensor(torch.ones(LARGE), True), torch.zeros(LARGE)
    send = Stepped(one.steps(Call("send", source=source, peer=1)))
    send.go_on()
    one.exchange.give_up()
    source.fill_(float("nan"))
    with pytest.raises(Abandoned):
        in_any_order([Stepped(other.steps(Call("recv", target=target, peer=0)))], random.Random(1))


def test_nobody_receives_what_a_sender_that_gave_up_has_copied(ranks_of, monkeypatch):
    """It may have begun before it gave up, and its tensor is its user's again."""
    one, other = ranks_of(2)
    source, target = (rank.tensor(torch.ones(COPIED), True) for rank in (one, other))
    send = Stepped(one.steps(Call("send", source=source, peer=1)))
    receive = Stepped(other.steps(Call("recv", target=target, peer=0)))
    send.go_on()

    def help_and_give_up(pair, words, index, value):
        monkeypatch.undo()
        send.go_on()  # copies everything, for the receiver has begun nothing yet
        one.exchange.give_up()
        pair._claim(words, index, value)

    monkeypatch.setattr(shared_packets.Inbox, "_claim", help_and_give_up)
    assert not receive.goes_on_until_it_fails()


def test_a_reduction_stops_between_two_pieces(ranks_of, monkeypatch):
    """Once a rank gave up, not more than a piece is written into its buffer."""
    one, other = ranks_of(2)
    numel = 10 * PIECE // 4
    calls = [make_call(rank, "all_reduce", torch.ones(numel), True, op="sum") for rank in (one, other)]
    first, second = Stepped(one.steps(calls[0])), Stepped(other.steps(calls[1]))
    first.go_on()
    reduce, count = other.exchange.reduce, 0

    def give_up_at_the_third(*args: object) -> None:
        nonlocal count
        count += 1
        if count == 3:
            one.exchange.give_up()
        reduce(*args)

    monkeypatch.setattr(other.exchange, "reduce", give_up_at_the_third)
    with pytest.raises(Abandoned):
        in_any_order([second], random.Random(1))
    assert count == 3
    assert calls[0].target.eq(2).sum() == 3 * PIECE // 4


def test_views_of_known_shapes_are_kept_in_bounds(ranks_of):
    (rank, _) = ranks_of(2)
    for numel in range(1, 2000):
        rank.exchange.slots(0, numel, torch.float32)
    assert 0 < len(rank.exchange._views) <= 512


def num_views(rank: Rank) -> int:
    return sum(len(views) for pieces in rank.exchange._piece_views.values() for views in pieces)


@pytest.mark.parametrize("num_pieces", [1, 3, 100])
def test_views_of_pieces_are_kept_in_bounds(ranks_of, monkeypatch, num_pieces):
    """It is their number that counts, however many calls they belong to."""
    monkeypatch.setattr(exchange, "_MOST_PIECES", 1000)
    (rank, _) = ranks_of(2)
    one = torch.empty(1)
    most = 0
    for number in range(2500 // num_pieces):
        made = [[one, one] for _ in range(num_pieces)]
        assert rank.exchange.remembered((number,), lambda made=made: made) is made
        most = max(most, num_views(rank))
    assert most == 1000 // (2 * num_pieces) * 2 * num_pieces, "as many as fit, no more"


def test_the_next_call_begins_where_the_last_one_ended(ranks_of, monkeypatch):
    """That is still in the cache."""
    one, other = ranks_of(2)
    calls = [make_call(rank, "all_reduce", torch.ones(8 * PIECE // 4), True, op="sum") for rank in (one, other)]
    places, reduce = [], one.exchange.reduce

    def noted(out: torch.Tensor, *rest: Any) -> None:
        places.append(out.data_ptr())
        reduce(out, *rest)

    monkeypatch.setattr(one.exchange, "reduce", noted)
    for _ in range(3):
        in_any_order(
            [Stepped(rank.steps(call)) for rank, call in zip((one, other), calls, strict=True)], random.Random(1)
        )
    assert len(set(places[:4])) == 4
    assert places[4:8] == places[3::-1]
    assert places[8:] == places[:4]


def test_pieces_of_the_same_call_are_not_made_again(ranks_of):
    (rank, _) = ranks_of(2)
    made = [[torch.empty(1)] * 2]
    assert rank.exchange.remembered(("a", 1), lambda: made) is made
    assert rank.exchange.remembered(("a", 1), list) is made
    assert rank.exchange.remembered(("a", 2), list) == []


def test_a_call_of_many_pieces_is_kept_alone(ranks_of, monkeypatch):
    monkeypatch.setattr(exchange, "_MOST_PIECES", 10)
    (rank, _) = ranks_of(2)
    few, many = [[torch.empty(1)] * 2], [[torch.empty(1)] * 2 for _ in range(50)]
    rank.exchange.remembered(("few",), lambda: few)
    rank.exchange.remembered(("many",), lambda: many)
    assert rank.exchange._piece_views == {("many",): many}
    rank.exchange.remembered(("few",), lambda: few)
    assert rank.exchange._piece_views == {("few",): few}
    rank.exchange.remembered(("few again",), lambda: few)
    assert num_views(rank) == 4, "the many are not counted any more"


# Whole transports: a loop and a thread for each rank.


@dataclass
class FakePulse:
    def is_dead(self) -> bool:
        return False

    def seconds_still(self) -> float:
        return 0.0


Main = Callable[[Group, Arena], Coroutine[Any, Any, Any]]


class Threads:
    """Groups of ranks that each run their own main in an event loop of their own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arenas = [Arena(lay_out([size])[-1].stop, size) for _ in range(size)]
        pages = [Page(memoryview(bytearray(Page.size(size))), size) for _ in range(size)]
        self._members = [Member(Place(rank, Coords(rank, 0, 0)), pages[rank], FakePulse()) for rank in range(size)]
        self.exchanges: dict[int, Exchange] = {}
        self.ready = threading.Barrier(size, timeout=SECONDS)

    def transport(self, me: int) -> SharedMemoryTransport:
        mapped = [a if peer == me else open_peer(a.address_for_peers) for peer, a in enumerate(self.arenas)]
        return SharedMemoryTransport("world", self._members, mapped, me, lay_out([self.size])[0], self.size)

    def _group(self, me: int) -> Group:
        transport = self.transport(me)
        self.exchanges[me] = transport._exchange
        return Group(
            "world",
            range(self.size),
            me,
            transport,
            coords_of=lambda rank: Coords(rank, 0, 0),
            timeout=SECONDS,
            device=torch.device("cpu"),
            allocate=self.arenas[me].empty,
        )

    def run(self, main: Main) -> list[Any]:
        """What each rank's main returns."""
        outcomes: list[Future[Any]] = [Future() for _ in range(self.size)]

        def live(me: int) -> None:
            async def whole() -> Any:
                group = self._group(me)
                self.ready.wait()
                try:
                    return await main(group, self.arenas[me])
                finally:
                    await group.close(SECONDS)

            try:
                outcomes[me].set_result(asyncio.run(whole()))
            except BaseException as error:
                outcomes[me].set_exception(error)

        threads = [threading.Thread(target=live, args=(me,), daemon=True) for me in range(self.size)]
        for thread in threads:
            thread.start()
        results = [outcome.result(SECONDS) for outcome in outcomes]
        for thread in threads:
            thread.join(SECONDS)
        return results


@pytest.fixture
def threads_of() -> Iterator[Callable[[int], Threads]]:
    made: list[Threads] = []

    def threads_of(size: int) -> Threads:
        made.append(Threads(size))
        return made[-1]

    yield threads_of
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("parallel3d-world-")]:
        thread.join(SECONDS)
    for threads in made:
        for arena in threads.arenas:
            arena.close()


def test_tensors_of_inference_mode(threads_of):
    async def main(group: Group, _: Arena) -> None:
        for numel in (5, 5, 5, 5, 1 << 20):
            with torch.inference_mode():
                tensor = torch.ones(numel)
                await group.all_reduce(tensor, op="mean")
                await group.all_reduce(tensor)
                gathered = await group.all_gather(tensor)
                assert bool((gathered == 3).all())
            ordinary = torch.ones(numel, dtype=torch.bfloat16)
            await group.all_reduce(ordinary, op="mean")
            await group.all_reduce(tensor, op="mean")
            assert bool((tensor == 3).all())
            view = tensor.view(-1, 1).expand(numel, 1)[::2]
            assert bool((await group.all_reduce(view) == 9).all())

    threads_of(3).run(main)


def test_groups_of_threads(threads_of):
    async def main(group: Group, _: Arena) -> list[float]:
        found = []
        for numel in (1, 6, 50_000, 300_000):
            tensor = group.empty(numel).fill_(group.rank + 1.0)
            await group.all_reduce(tensor)
            found.append(tensor.unique().tolist())
            found.append((await group.all_gather(torch.tensor([numel + group.rank]))).tolist())
        works = [group.all_reduce(torch.ones(30_000)) for _ in range(20)]
        work_sums = [(await work)[0].item() for work in reversed(works)]
        tensor = torch.full((200_000,), float(group.rank))
        if group.rank == 0:
            await group.send(tensor, 2)
        elif group.rank == 2:
            await group.recv(tensor, 0)
        return [found, work_sums, tensor[0].item()]

    results = threads_of(3).run(main)
    sums = [part for numel in (1, 6, 50_000, 300_000) for part in ([6.0], [numel, numel + 1, numel + 2])]
    assert results == [[sums, [3.0] * 20, value] for value in (0, 1, 0)]


class Pair:
    """Two ranks' transports in one loop, and calls that are numbered as a group would."""

    def __init__(self, threads: Threads) -> None:
        self.transports = [threads.transport(me) for me in range(2)]
        self._numbers = [0, 0]

    def all_reduce(self, me: int, tensor: torch.Tensor, strategy: str = "default"):
        self._numbers[me] += 1
        terms = f"all_reduce of {tuple(tensor.shape)}"
        call = Call("all_reduce", tensor, tensor, "sum", number=self._numbers[me], terms=terms, strategy=strategy)
        return self.transports[me].start(call)


@pytest.fixture
def pair(threads_of) -> Iterator[Pair]:
    made = Pair(threads_of(2))
    yield made
    for transport in made.transports:
        transport.abort(GroupClosed("the test is over"))


async def until_ended(*tasks: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not all(task.has_ended() for task in tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert all(task.ended_well(0.0) for task in tasks), [task.exception() for task in tasks]


async def test_who_comes_last_is_done_at_once(pair):
    for number in range(300):  # more than the board has slots
        tensors = [torch.full((5,), me + 1.0) for me in range(2)]
        first = pair.all_reduce(number % 2, tensors[number % 2])
        assert not first.has_ended()
        last = pair.all_reduce(1 - number % 2, tensors[1 - number % 2])
        assert last is ENDED
        assert first.ended_well(0.0)
        assert [tensor.tolist() for tensor in tensors] == [[3.0] * 5] * 2


async def test_a_small_call_does_not_overtake_a_large_one(pair):
    large, small = ([torch.full((numel,), me + 1.0) for me in range(2)] for numel in (100_000, 3))
    tasks = [pair.all_reduce(0, large[0]), pair.all_reduce(0, small[0]), pair.all_reduce(0, small[0])]
    assert not any(task.has_ended() for task in tasks)
    tasks += [pair.all_reduce(1, large[1]), pair.all_reduce(1, small[1]), pair.all_reduce(1, small[1])]
    await until_ended(*tasks)
    assert all(tensor.eq(3).all() for tensor in large)
    assert all(tensor.eq(6).all() for tensor in small)


async def test_an_all_reduce_of_nothing_needs_nobody(pair):
    task = pair.all_reduce(0, torch.empty(0))
    assert task is not ENDED
    assert task.ended_well(0.0)
    assert pair.transports[1]._exchange.next_round == 1


async def test_small_adaptive_calls_are_done_at_once_and_nothing_is_measured_for_them(pair):
    tensors = [torch.ones(5) for _ in range(2)]
    for number in range(20):
        first, last = (pair.all_reduce(me, tensors[me].fill_(1), "adaptive") for me in (number % 2, 1 - number % 2))
        assert last is ENDED
        assert first.ended_well(0.0)
        assert [tensor.tolist() for tensor in tensors] == [[2.0] * 5] * 2
    assert not any(transport._adaptive.is_ready for transport in pair.transports)


def test_only_the_adaptive_call_that_measures_has_more_time(threads_of, monkeypatch, tmp_path):
    """Small ones go straight to default, whose deadline is what was given."""
    monkeypatch.setattr(shared_collectives, "FLAT", FLAT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    async def main(group: Group, _: Arena) -> list[tuple[int, float]]:
        found = []
        for num_bytes in (8, FLAT, FLAT + 1, FLAT + 1, FLAT):
            values = torch.ones(num_bytes, dtype=torch.uint8)
            await (work := group.all_reduce(values, strategy="adaptive", timeout=5.0))
            found.append((num_bytes, work.call.timeout))
        return found

    deadlines = [(8, 5.0), (FLAT, 5.0), (FLAT + 1, 15.0), (FLAT + 1, 5.0), (FLAT, 5.0)]
    assert threads_of(2).run(main) == [deadlines] * 2


def test_how_default_explains_itself(threads_of):
    async def main(group: Group, _: Arena) -> list[str]:
        return [
            str(group.explain(size, strategy))
            for size, strategy in ((FLAT, "default"), (FLAT + 1, "default"), (1, "ring"), (FLAT, "adaptive"))
        ]

    assert threads_of(2).run(main)[0] == [
        "default: shared memory's own way; one round through the staging slots",
        "default: shared memory's own way; each rank reduces its slice of registered buffers and writes it to all; "
        "other tensors are added up by running sums",
        "ring: asked for",
        "default: one round through the staging slots, and no strategy takes less",
    ]


@pytest.mark.parametrize("how", ["cancelled", "told by a peer"])
def test_memory_that_a_peer_may_still_write_is_not_handed_out(threads_of, monkeypatch, how):
    """Rank 0 cancels while rank 2 is about to write; what ranks 0 and 1 had in the call is nobody else's then."""
    threads = threads_of(3)
    numel = 3 * PIECE // 4
    at_it, may_write = threading.Event(), threading.Event()
    watched = 0 if how == "cancelled" else 1
    reduce = Reducer.__call__

    def reduce_later(self: Reducer, *args: Any) -> None:
        if self is threads.exchanges[2].reduce:
            at_it.set()
            assert may_write.wait(SECONDS)
        reduce(self, *args)

    monkeypatch.setattr(Reducer, "__call__", reduce_later)

    async def main(group: Group, arena: Arena) -> object:
        tensor = group.empty(numel).fill_(1)
        place, num_bytes = arena.offset_of(tensor), tensor.nbytes
        work = group.all_reduce(tensor)
        if group.rank == 0:
            waiting = asyncio.ensure_future(_await(work))
            await asyncio.to_thread(at_it.wait, SECONDS)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        while not work.done():  # noqa: ASYNC110  # an error that is raised would hold the call
            await asyncio.sleep(0)
        if group.rank != watched:
            return None
        del tensor, work
        gc.collect()
        others = [group.empty(numel).fill_(7) for _ in range(3)]
        places = [arena.offset_of(other) for other in others]
        may_write.set()
        return place, num_bytes, places

    place, num_bytes, places = threads.run(main)[watched]
    assert all(other + num_bytes <= place or other >= place + num_bytes for other in places)


async def _await(work) -> torch.Tensor:
    return await work


def test_small_and_large_calls_in_turn_keep_their_order(threads_of):
    async def main(group: Group, _: Arena) -> bool:
        sizes = [random.Random(number).choice((1, 1000, 300_000, 600_000)) for number in range(60)]
        tensors = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
        works = [group.all_reduce(tensor) for tensor in tensors]
        for number in random.Random(group.rank).sample(range(60), 60):
            await works[number]
            assert tensors[number].eq(2 * number).all()
        return True

    assert threads_of(2).run(main) == [True, True]


def test_the_flat_way_has_the_bits_of_the_other(ranks_of, monkeypatch):
    numel = 9000
    sources = [values_of(me, numel) for me in range(3)]
    results = []
    for flat in (FLAT, 0):
        monkeypatch.setattr(shared_collectives, "FLAT", flat)
        for registered in (True, False):
            ranks = ranks_of(3)
            calls = [
                make_call(rank, "all_reduce", source, registered, op="sum")
                for rank, source in zip(ranks, sources, strict=True)
            ]
            in_any_order([Stepped(rank.steps(call)) for rank, call in zip(ranks, calls, strict=True)], random.Random(1))
            results += [call.target for call in calls]
    assert all(torch.equal(result, results[0]) for result in results)
