"""Carries a strategy's program out in one rank, over links to its peers: shared memory, or a network."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Protocol

import torch

from process_groups.call import Call
from process_groups.call_queue import Steps, Wait
from process_groups.reduction import combine, finish, wide_dtype
from process_groups.strategies.program import Program, Transfer

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


class SharedBlocks(Protocol):
    """Memory that the ranks of this host share: where programs run on blocks that peers read in place."""

    def place(self, part: torch.Tensor, dtype: torch.dtype, most_bytes: int) -> torch.Tensor:
        """Where a block is worked on: in the tensor itself if peers can read it there in this dtype, else a copy's
        place."""

    def show(self, tensor: torch.Tensor) -> None:
        """Publish where this rank's block lies."""

    def check(self) -> None:
        """Raise Abandoned if the group was aborted: a rank that aborted may use its buffer for something else."""

    def arrive(self) -> int:
        """This rank is done with the block; the number of the round."""

    def everybody(self, round_number: int) -> Steps:
        """Wait until every rank is done with the block."""


def all_reduce_steps(
    call: Call,
    program_of: Callable[[int], Program],
    links: Mapping[int, Link],
    shared: SharedBlocks | None,
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
        mine = _unshared(part, dtype) if shared is None else shared.place(part, dtype, BLOCK)
        if mine is not part:
            mine.copy_(part)
        if shared is not None:
            shared.show(mine)
        for link in links.values():
            link.begin(mine, call.timeout)
        yield from _run(program_of(mine.numel()), mine, links, op)
        for link in links.values():
            link.end()
        if shared is not None:
            shared.check()
            yield from shared.everybody(shared.arrive())  # until all have read what this rank showed
        finish(mine, op, num_ranks)
        if mine is not part:
            part.copy_(mine)


def _unshared(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part if dtype == part.dtype else torch.empty(part.numel(), dtype=dtype)


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
