"""Collectives of an engine thread: each rank computes its part into given memory, all get what the parts make together.

Tensor-parallel layers do this several times a layer. Between `post` and `result` a rank may do other work:

    room = exchange.room((16, 128, 256), torch.float32)
    torch.mm(values, weight, out=room.view(-1, 256))
    exchange.post(Outcome.ALL_REDUCE)
    ...
    total = exchange.result()

Every rank makes the same exchanges in the same order, one at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from process_groups.work import Work
from runtime.errors import DeadlineExceeded, GroupClosed, InvalidCall

_GRACE = 5.0  # seconds: the group's own calls meet their deadline first, and their errors say more


class Outcome(StrEnum):
    """What an exchange makes of the ranks' parts, in memory of its own. Sums are taken in rank order on every rank."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    """This rank's slice of the sum, along a dimension."""
    ALL_GATHER = "all_gather"
    """The parts one after another along a dimension, in rank order."""


@dataclass(slots=True)
class Moved:
    """Totals over all exchanges with one outcome."""

    calls: int = 0
    num_bytes: int = 0
    """Of the whole tensor, as collective benchmarks count, also where a rank gets a slice of it."""
    seconds: float = 0.0
    """From each part's `post` to its result."""

    def add(self, num_bytes: int, since: float) -> None:
        self.calls += 1
        self.num_bytes += num_bytes
        self.seconds += time.monotonic() - since


def nothing_moved() -> dict[Outcome, Moved]:
    return {outcome: Moved() for outcome in Outcome}


class TensorExchange(Protocol):
    """Exchanges with all ranks of a group, one at a time; for one thread at a time."""

    rank: int
    size: int
    waited: float
    """Seconds that this rank has waited for others, so far."""
    moved: dict[Outcome, Moved]
    is_recorded_by_group: bool
    """Whether its exchanges are calls of its group, which records them itself."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory to write this rank's part into, before `post`."""

    def post(self, outcome: Outcome, dim: int = 0) -> None:
        """Publish the part, once it is written; never waits."""

    def result(self) -> torch.Tensor:
        """What was asked for at `post`; waits for the other ranks."""


class Collectives(Protocol):
    """The part of a group that an exchange over its calls uses."""

    name: str
    rank: int
    size: int
    device: torch.device
    timeout: float

    def all_reduce(self, tensor: torch.Tensor) -> Work: ...
    def reduce_scatter(self, tensor: torch.Tensor) -> Work: ...
    def all_gather(self, tensor: torch.Tensor) -> Work: ...


def slice_of(shape: Sequence[int], dim: int, rank: int, size: int) -> tuple[int, int]:
    """Where a rank's slice along a dimension begins, and how long it is."""
    length, over = divmod(shape[dim], size)
    if over:
        raise InvalidCall(f"{tuple(shape)} can't be cut into {size} equal slices along dimension {dim}.")
    return rank * length, length


class CallTensorExchange:
    """An exchange over a group's collectives, which its event loop makes: for transports that share no memory."""

    is_recorded_by_group = True

    def __init__(self, group: Collectives, loop: asyncio.AbstractEventLoop) -> None:
        self.rank, self.size, self.waited, self.moved = group.rank, group.size, 0.0, nothing_moved()
        self._group, self._loop = group, loop
        self._room: torch.Tensor | None = None
        self._under_way: concurrent.futures.Future[torch.Tensor] | None = None

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._under_way is None, "the result of the last exchange was not taken"
        self._room = torch.empty(tuple(shape), dtype=dtype, device=self._group.device)
        return self._room

    def post(self, outcome: Outcome, dim: int = 0) -> None:
        part, self._room = self._room, None
        assert part is not None, "there is nothing to post"
        if outcome is Outcome.REDUCE_SCATTER:
            slice_of(part.shape, dim, self.rank, self.size)
        self._under_way = asyncio.run_coroutine_threadsafe(self._carry_out(part, outcome, dim), self._loop)

    async def _carry_out(self, part: torch.Tensor, outcome: Outcome, dim: int) -> torch.Tensor:
        start = time.monotonic()
        found = await self._call(part, outcome, dim)
        self.moved[outcome].add(max(part.nbytes, found.nbytes), start)
        return found

    async def _call(self, part: torch.Tensor, outcome: Outcome, dim: int) -> torch.Tensor:
        group = self._group
        if outcome is Outcome.ALL_REDUCE:
            return await group.all_reduce(part)
        ahead = part.movedim(dim, 0).contiguous()  # collectives work along the first dimension
        found = await (group.reduce_scatter(ahead) if outcome is Outcome.REDUCE_SCATTER else group.all_gather(ahead))
        return found.movedim(0, dim).contiguous()

    def result(self) -> torch.Tensor:
        under_way, self._under_way = self._under_way, None
        assert under_way is not None, "nothing was posted"
        start = time.monotonic()
        try:
            return under_way.result(self._group.timeout + _GRACE)
        except concurrent.futures.TimeoutError as late:
            if isinstance(late, DeadlineExceeded):
                raise
            raise DeadlineExceeded("the event loop did not carry out a tensor exchange in time") from None
        except concurrent.futures.CancelledError:
            raise GroupClosed(f"a tensor exchange on group {self._group.name} was cancelled") from None
        finally:
            self.waited += time.monotonic() - start
