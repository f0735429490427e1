"""Carries a strategy's program out in one rank, over links to its peers: shared memory, or a network."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Protocol

import torch

from process_groups.call_queue import Steps, Wait
from process_groups.shared_memory.exchange import Exchange
from process_groups.strategies.arithmetic import combine, finish, wide_dtype
from process_groups.strategies.program import Program, Transfer
from process_groups.transport import Call

BLOCK = 4 << 20  # bytes that a program is run on at once; a tensor that is not registered is copied in blocks


class Link(Protocol):
    """A peer, as the transfers of a program meet it."""

    def begin(self, mine: torch.Tensor, timeout: float) -> None:
        """A new block: what is sent and received are ranges of it."""

    def send(self, transfer: Transfer) -> None:
        """Never waits. The range stays as it is until the peer has read it, for that is how programs are."""

    def expect(self, transfer: Transfer) -> None:
        """A receive will come in this step."""

    def receive(self, transfer: Transfer) -> Generator[Wait, None, torch.Tensor]:
        """The peer's values; they stay until the block is over."""

    def end(self) -> None:
        """Wait until what was sent needs this rank's memory no more, where the peer does not read in place."""


class SharedLink:
    """A peer on this host. A send says that the range is ready; the peer reads it in place."""

    def __init__(self, exchange: Exchange, peer: int) -> None:
        layout, arena = exchange.layout, exchange.arenas[peer]
        assert arena is not None
        self._exchange, self._peer, self._arena = exchange, peer, arena
        self._mine = exchange.counter(exchange.me, layout.announced(peer), peer)
        self._theirs = exchange.counter(peer, layout.announced(exchange.me), peer)
        self._num_sent = self._num_received = 0
        self._values: torch.Tensor | None = None

    def begin(self, mine: torch.Tensor, timeout: float) -> None:
        self._like, self._values = mine, None

    def send(self, transfer: Transfer) -> None:
        self._num_sent += 1
        self._mine.store(self._num_sent)

    def expect(self, transfer: Transfer) -> None:
        pass

    def receive(self, transfer: Transfer) -> Generator[Wait, None, torch.Tensor]:
        self._num_received += 1
        if self._theirs.value < self._num_received:
            yield self._theirs, self._num_received
        if self._values is None:  # only now is it certain where the peer's block lies
            offset = self._exchange.offer_of(self._peer, self._exchange.next_round)
            assert offset is not None
            self._values = self._arena.tensor(offset, self._like.numel(), self._like.dtype)
        return self._values[transfer.start : transfer.stop]

    def end(self) -> None:
        pass


def all_reduce_steps(
    call: Call,
    program_of: Callable[[int], Program],
    links: Mapping[int, Link],
    exchange: Exchange | None,
    num_ranks: int,
) -> Steps:
    """This rank's part in an all-reduce; `program_of` gives its program for a number of elements."""
    assert call.target is not None
    assert call.op is not None
    target, op = call.target.view(-1), call.op
    dtype = wide_dtype(target.dtype, op)
    step = BLOCK // dtype.itemsize
    for start in range(0, target.numel(), step):
        part = target[start : start + step]
        mine = _place(part, dtype, exchange)
        if mine is not part:
            mine.copy_(part)
        if exchange is not None:
            exchange.show(mine)
        for link in links.values():
            link.begin(mine, call.timeout)
        yield from _run(program_of(mine.numel()), mine, links, op)
        for link in links.values():
            link.end()
        if exchange is not None:
            exchange.check()  # what a rank that gave up has in its buffer may be anything
            yield from exchange.everybody(exchange.arrive())  # until all have read what this rank showed
        finish(mine, op, num_ranks)
        if mine is not part:
            part.copy_(mine)


def _place(part: torch.Tensor, dtype: torch.dtype, exchange: Exchange | None) -> torch.Tensor:
    """Where the block is worked on: in the tensor itself if peers can reach it there and its type is wide enough."""
    if dtype == part.dtype and (exchange is None or exchange.own.offset_of(part) is not None):
        return part
    if exchange is None:
        return torch.empty(part.numel(), dtype=dtype)
    return exchange.work_space(BLOCK)[: part.numel() * dtype.itemsize].view(dtype)


def _run(program: Program, mine: torch.Tensor, links: Mapping[int, Link], op: str) -> Steps:
    for step in program:
        for transfer in (*step.reduces, *step.replaces):
            links[transfer.peer].expect(transfer)
        for transfer in step.sends:
            links[transfer.peer].send(transfer)
        for transfer in step.reduces:
            theirs = yield from links[transfer.peer].receive(transfer)
            combine(mine[transfer.start : transfer.stop], theirs, op)
        for transfer in step.replaces:
            theirs = yield from links[transfer.peer].receive(transfer)
            mine[transfer.start : transfer.stop].copy_(theirs)
