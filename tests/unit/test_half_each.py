"""All-reduces of two ranks that read each other's own memory; both are in this process, stepped in any order."""

from __future__ import annotations

import errno
import math
import os
import random
from itertools import product
from typing import Any

import pytest
import torch

from process_groups import exchange, half_each
from process_groups.arena import Arena, open_peer
from process_groups.exchange import Exchange
from process_groups.peer_memory import read_into
from process_groups.reduction import PIECE
from process_groups.shared_collectives import steps_of
from process_groups.shared_layout import lay_out
from process_groups.signals import Abandoned, Patience
from process_groups.transport import Call
from runtime.errors import CommunicationError
from tests.unit.test_shared_memory import Stepped, in_any_order, values_of

NUMEL = 5 * PIECE // 4 + 3  # of float32: halves of three pieces, the last of which is short


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(half_each, "_WORTH_READING", 4 * NUMEL // 2)
    monkeypatch.setattr(half_each, "_READ_AT_ONCE", PIECE)
    layout = lay_out([2])[0]
    arenas = [Arena(layout.stop, 2) for _ in range(2)]
    mapped = [[a if peer == me else open_peer(a.address_for_peers) for peer, a in enumerate(arenas)] for me in range(2)]
    exchanges = [Exchange(mapped[me], me, layout) for me in range(2)]
    monkeypatch.setattr(exchanges[0].relay_or_half_each, "is_second", lambda num_bytes: True)
    yield exchanges
    for arena in arenas:
        arena.close()


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, int]]:
    """Of ranks that read a peer's memory: where, and how many bytes."""
    found = []

    def counted(target: torch.Tensor, pid: int, address: int) -> None:
        found.append((address, target.nbytes))
        read_into(target, pid, address)

    monkeypatch.setattr(exchange, "read_into", counted)
    return found


def begin(pair: list[Exchange], tensors: list[torch.Tensor], op: str = "sum") -> list[Stepped]:
    return [Stepped(steps_of(each, Call("all_reduce", t, t, op=op))) for each, t in zip(pair, tensors, strict=True)]


def reduced(pair: list[Exchange], tensors: list[torch.Tensor], op: str = "sum", seed: int = 0) -> list[torch.Tensor]:
    tensors = [tensor.clone() for tensor in tensors]
    in_any_order(begin(pair, tensors, op), random.Random(seed))
    return tensors


def get_ready(pair: list[Exchange]) -> None:
    """In their first large call they learn that they can read each other's memory."""
    reduced(pair, [torch.ones(NUMEL)] * 2)


FLOATS, INTEGERS = (torch.float32, torch.float64, torch.bfloat16, torch.float16), (torch.int32, torch.int64)
SORTS = [*product(FLOATS, ("sum", "mean", "min", "max")), *product(INTEGERS, ("sum", "min", "max"))]


@pytest.mark.parametrize(("dtype", "op"), SORTS)
def test_the_bits_are_those_of_running_sums(pair, reads, dtype, op):
    values = [values_of(me, NUMEL, dtype) for me in range(2)]
    by_relay = reduced(pair, values, op)
    assert [num_bytes for _, num_bytes in reads] == [16, 16], "only who they are"
    reads.clear()
    for seed in range(5):
        by_halves = reduced(pair, values, op, seed)
        assert sum(num_bytes for _, num_bytes in reads) == 2 * values[0].nbytes
        reads.clear()
        for one, other in zip(by_relay, by_halves, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("signs", [(1.0, -1.0), (-1.0, 1.0)])
def test_values_are_combined_in_the_order_of_ranks(pair, reads, op, signs):
    """Which shows in the sign of a zero, but for the last few of a piece: torch combines those one by one, and then the
    other zero is taken."""
    zeros = [torch.zeros(NUMEL) * sign for sign in signs]
    by_relay, by_halves = reduced(pair, zeros, op), reduced(pair, zeros, op)
    assert len(reads) > 2
    for one, other in zip(by_relay, by_halves, strict=True):
        for start in (0, NUMEL // 2):
            assert torch.equal(one[start:][:1000].signbit(), other[start:][:1000].signbit())


def test_the_first_rank_decides_by_what_took_less_time(pair, reads, monkeypatch):
    get_ready(pair)
    told = []
    monkeypatch.setattr(pair[0].relay_or_half_each, "took", lambda *call: told.append(call))
    for is_second in (True, False):
        reads.clear()
        monkeypatch.setattr(pair[0].relay_or_half_each, "is_second", lambda num_bytes, now=is_second: now)
        reduced(pair, [torch.ones(NUMEL)] * 2)
        assert bool(reads) == is_second
        num_bytes, was_second, seconds = told.pop()
        assert (num_bytes, was_second) == (4 * NUMEL, is_second)
        assert seconds > 0


def test_only_what_is_large_is_read(pair, reads):
    get_ready(pair)
    reads.clear()
    values = [values_of(me, NUMEL // 2 - 1) for me in range(2)]
    for found in reduced(pair, values):
        assert torch.equal(found, values[0] + values[1])
    assert not reads


@pytest.mark.parametrize("registered", [0, 1])
def test_one_may_be_registered(pair, reads, registered):
    get_ready(pair)
    reads.clear()
    values = [values_of(me, NUMEL) for me in range(2)]
    tensors = [tensor.clone() for tensor in values]
    tensors[registered] = pair[registered].own.empty((NUMEL,), torch.float32).copy_(values[registered])
    in_any_order(begin(pair, tensors), random.Random(1))
    assert reads
    for found in tensors:
        assert torch.equal(found, values[0] + values[1])


def test_where_only_one_may_read_neither_does(pair, reads, monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(pair[1], "read", refused)
    values = [values_of(me, NUMEL) for me in range(2)]
    for _ in range(3):
        for found in reduced(pair, values):
            assert torch.equal(found, values[0] + values[1])
    assert reads == [(pair[1].own.address, 16)], "rank 0 tries once, and keeps to running sums like rank 1"


def test_another_process_of_the_same_number_is_not_taken_for_the_peer(pair, monkeypatch):
    """Where numbers of processes mean something else here: what is read is not the peer's."""
    monkeypatch.setattr(exchange, "read_into", lambda target, pid, address: target.fill_(7))
    values = [values_of(me, NUMEL) for me in range(2)]
    for _ in range(2):
        for found in reduced(pair, values):
            assert torch.equal(found, values[0] + values[1])


@pytest.mark.parametrize("seed", range(8))
def test_calls_in_a_row_do_not_mix(pair, reads, monkeypatch, seed):
    """Though the ways take different numbers of rounds."""
    choose, tensors, expected = random.Random(seed), ([], []), []
    monkeypatch.setattr(pair[0].relay_or_half_each, "is_second", lambda num_bytes: choose.random() < 0.7)
    for number in range(12):
        numel = choose.choice((10, NUMEL // 4, NUMEL, NUMEL + 1))
        registered = choose.random() < 0.3
        values = [values_of(2 * number + me, numel) for me in range(2)]
        expected.append(values[0] + values[1])
        for me in range(2):
            own = pair[me].own.empty((numel,), torch.float32) if registered else torch.empty(numel)
            tensors[me].append(own.copy_(values[me]))
    calls = [[steps_of(pair[me], Call("all_reduce", t, t, op="sum")) for t in tensors[me]] for me in range(2)]
    in_any_order([Stepped(*calls[me]) for me in range(2)], choose)
    assert reads
    for me in range(2):
        for found, wanted in zip(tensors[me], expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_nobody_takes_what_the_other_rank_overwrites_afterwards(pair, num_steps):
    """Whether its call has ended, or it gave it up."""
    get_ready(pair)
    values = [values_of(me, NUMEL) for me in range(2)]
    tensors = [tensor.clone() for tensor in values]
    stepped = begin(pair, tensors)
    for turn in range(num_steps):
        stepped[turn % 2].go_on()
    if not stepped[0].has_ended:
        pair[0].give_up()
    tensors[0].fill_(float("nan"))
    if stepped[1].goes_on_until_it_fails() and stepped[1].has_ended:
        assert torch.equal(tensors[1], values[0] + values[1])


NUM_READS = 6
"""Of each rank: three pieces of its own half, and three of the other."""


@pytest.mark.parametrize("first_failure", range(NUM_READS))
@pytest.mark.parametrize("failure", [ProcessLookupError, PermissionError])
def test_a_read_that_fails(pair, monkeypatch, first_failure, failure):
    """Of a rank that has ended, the loss is waited for; of another it is an error."""
    get_ready(pair)
    num_reads, read = 0, pair[0].read

    def fails(*args: Any) -> None:
        nonlocal num_reads
        num_reads += 1
        if num_reads > first_failure:
            raise failure(0, "no more")
        read(*args)

    monkeypatch.setattr(pair[0], "read", fails)
    stepped = begin(pair, [torch.ones(NUMEL) for _ in range(2)])

    def go_on() -> None:
        while stepped[0].go_on() | stepped[1].go_on():
            pass

    if failure is PermissionError:
        with pytest.raises(CommunicationError, match="not any more \\(no more\\)"):
            go_on()
    else:
        go_on()
        counter, value = stepped[0].waits_for
        pair[1].give_up()
        with pytest.raises(Abandoned):
            counter.reaches(value, math.inf, Patience(0, 0), pair[0].is_abandoned)
    assert num_reads == first_failure + 1


def test_a_read_that_fails_as_the_other_rank_gave_up_is_no_error_of_its_own(pair, monkeypatch):
    get_ready(pair)

    def gone(*_: object) -> None:
        pair[1].give_up()
        raise OSError(errno.EFAULT, "Bad address")

    monkeypatch.setattr(pair[0], "read", gone)
    stepped = begin(pair, [torch.ones(NUMEL) for _ in range(2)])
    assert stepped[0].go_on()
    assert stepped[1].go_on()
    with pytest.raises(Abandoned):
        stepped[0].go_on()


def test_what_can_not_be_read():
    source, target = torch.ones(4), torch.zeros(4)
    read_into(target, os.getpid(), source.data_ptr())
    assert target.tolist() == [1, 1, 1, 1]
    with pytest.raises(OSError, match="Bad address"):
        read_into(target, os.getpid(), 0)
    with pytest.raises(ProcessLookupError):
        read_into(target, 2**22 + 1, target.data_ptr())
