"""Parts of one tensor that ranks put together again and again: their sum, a slice of it, or one after another.

Tensor-parallel layers meet here, from the engine thread, several times a layer. A rank computes its part straight into
registered memory, shows it, and may do something else until it needs what all parts make together:

    room = exchange.room((16, 128, 256), torch.float32)
    torch.mm(values, weight, out=room.view(-1, 256))
    exchange.post(Outcome.TOTAL)
    ...
    total = exchange.result()

Every rank makes the same calls in the same order, one exchange at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch

from process_groups.arena import no_memory
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import NUM_ROOMS
from process_groups.signals import Abandoned, Counter, Patience
from process_groups.strategies.arithmetic import wide_dtype
from process_groups.transport import Place
from runtime.errors import CommunicationError, DeadlineExceeded, GroupClosed, InvalidCall, Mismatch

if TYPE_CHECKING:
    from process_groups.group import Group

_LOOK = 0.05  # seconds between looks whether the peers are still there
_GRACE = 5.0  # seconds: the group's own calls end in time, and say more
_MOST_SHAPES = 64  # whose views are kept
_PLACE_BITS = 44  # of a word that says where a room lies: 16 TiB, as much as all arenas together may have


class Outcome(StrEnum):
    """What the parts make together, in memory of its own. Sums are taken in rank order on every rank."""

    TOTAL = "the sum of"
    SLICE = "a slice of the sum of"
    """This rank's, along a dimension."""
    JOINED = "a row of"
    """One after another along a dimension, in rank order."""


@dataclass(slots=True)
class Moved:
    """All exchanges with one outcome together."""

    calls: int = 0
    num_bytes: int = 0
    """As collective benchmarks count: of the whole tensor, also where a rank gets a slice of it."""
    seconds: float = 0.0
    """From each part's `post` to its result."""

    def add(self, num_bytes: int, since: float) -> None:
        self.calls += 1
        self.num_bytes += num_bytes
        self.seconds += time.monotonic() - since


def nothing_moved() -> dict[Outcome, Moved]:
    return {outcome: Moved() for outcome in Outcome}


class TensorExchange(Protocol):
    """For one thread at a time."""

    rank: int
    size: int
    waited: float
    """Seconds that this rank has waited for others."""
    moved: dict[Outcome, Moved]
    """So far."""
    is_told_by_group: bool
    """Whether its exchanges are calls of its group, which notes them itself."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory to write this rank's part into; its own until `post`."""

    def post(self, outcome: Outcome, dim: int = 0) -> None:
        """The part is written; never waits."""

    def result(self) -> torch.Tensor:
        """What was asked for at `post`; waits for the other ranks."""


def slice_of(shape: Sequence[int], dim: int, rank: int, size: int) -> tuple[int, int]:
    """Where a rank's slice along a dimension begins, and how long it is."""
    length, over = divmod(shape[dim], size)
    if over:
        raise InvalidCall(f"{tuple(shape)} can't be cut into {size} equal slices along dimension {dim}.")
    return rank * length, length


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In rank order; rounded once where several 16-bit floats are added."""
    if len(parts) == 2:
        return torch.add(parts[0], parts[1])
    dtype = parts[0].dtype
    wide = wide_dtype(dtype, "sum")
    total = torch.add(parts[0], parts[1]) if wide is dtype else parts[0].to(wide).add_(parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total.to(dtype)


class _Plan:
    """One outcome of the parts in a room: what says so in shared memory, and the parts as far as they are found."""

    __slots__ = ("parts", "seen", "word")

    def __init__(self, word: int, parts: list[torch.Tensor], me: int) -> None:
        self.word, self.parts = word, parts
        self.seen = [word if rank == me else -1 for rank in range(len(parts))]
        """The words for which `parts` are found."""


class _Room:
    """Memory for parts of one shape."""

    __slots__ = ("place", "plans", "tensor")

    def __init__(self, tensor: torch.Tensor, place: int) -> None:
        self.tensor, self.place = tensor, place
        self.plans: dict[tuple[Outcome, int], _Plan] = {}


@dataclass(frozen=True, slots=True)
class _Peer:
    rank: int
    place: Place
    counter: Counter
    line: memoryview
    """Words: how many parts were posted; where the latest lie; how many results were taken."""


class SharedTensorExchange:
    """Through shared memory: each rank reads the parts where the others have written them.

    One wait an exchange is enough. There are two rooms in turn: when this rank writes its n-th part, it has seen every
    peer post the one before, and so done with the one before that, which lay in the same room.
    """

    is_told_by_group = False

    def __init__(
        self,
        exchange: Exchange,
        group_name: str,
        places: Sequence[Place],
        patience: Patience,
        timeout: float,
        trouble: Callable[[], CommunicationError | None],
        give_up: Callable[[CommunicationError], object],
    ) -> None:
        """trouble: why nothing will come any more. give_up: closes the group on all ranks; from any thread."""
        self.rank, self.size, self.waited, self.moved = exchange.me, exchange.size, 0.0, nothing_moved()
        self._posted_at = 0.0
        self._exchange, self._group_name, self._places = exchange, group_name, places
        self._patience, self._timeout, self._trouble, self._give_up = patience, timeout, trouble, give_up
        offset = exchange.layout.posted
        self._posted = exchange.counter_of_all(self.rank, offset)
        self._line = exchange.words(self.rank, offset, 2 + NUM_ROOMS)
        self._peers = [
            _Peer(rank, place, exchange.counter_of_all(rank, offset), exchange.words(rank, offset, 2 + NUM_ROOMS))
            for rank, place in enumerate(places)
            if rank != self.rank
        ]
        self._number = 0
        self._memory: list[torch.Tensor | None] = [None] * NUM_ROOMS
        self._rooms: list[dict[tuple[Sequence[int], torch.dtype], _Room]] = [{} for _ in range(NUM_ROOMS)]
        self._room: _Room | None = None
        self._plan: _Plan | None = None
        self._asked = Outcome.TOTAL, 0
        self._has_failed = False

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._plan is None, "the result of the last exchange was not taken"
        rooms = self._rooms[(self._number + 1) % NUM_ROOMS]
        room = rooms.get((shape, dtype))
        if room is None:
            room = self._make_room(tuple(shape), dtype)
        self._room = room
        return room.tensor

    def _make_room(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Room:
        turn = (self._number + 1) % NUM_ROOMS
        num_bytes, rooms, memory = prod(shape) * dtype.itemsize, self._rooms[turn], self._memory[turn]
        if memory is None or memory.nbytes < num_bytes:
            rooms.clear()  # nobody reads there any more, so the smaller memory may go
            self._memory[turn] = memory = None
            with torch.inference_mode(False):  # it is used by later exchanges too
                memory = self._exchange.own.empty((max(1, num_bytes),), torch.uint8)
            if memory is None:
                raise no_memory("a part to exchange", num_bytes)
            self._memory[turn] = memory
        elif len(rooms) >= _MOST_SHAPES:
            rooms.clear()
        place = self._exchange.own.offset_of(memory)
        assert place is not None
        with torch.inference_mode(False):
            room = _Room(memory[:num_bytes].view(dtype).view(shape), place)
        rooms[shape, dtype] = room
        return room

    def post(self, outcome: Outcome, dim: int = 0) -> None:
        room, asked = self._room, (outcome, dim)
        assert room is not None, "there is nothing to post"
        plan = room.plans.get(asked)
        if plan is None:
            plan = room.plans[asked] = self._make_plan(room, outcome, dim)
        self._plan, self._asked = plan, asked
        number = self._number = self._number + 1
        self._line[1 + number % NUM_ROOMS] = plan.word
        self._posted_at = time.monotonic()
        self._posted.store(number)

    def _make_plan(self, room: _Room, outcome: Outcome, dim: int) -> _Plan:
        terms = f"{outcome} {dim} {room.tensor.dtype} {tuple(room.tensor.shape)}"
        word = room.place | (zlib.crc32(terms.encode()) >> (32 - 64 + _PLACE_BITS)) << _PLACE_BITS
        return _Plan(word, [self._part(room.tensor, outcome, dim)] * self.size, self.rank)

    def _part(self, tensor: torch.Tensor, outcome: Outcome, dim: int) -> torch.Tensor:
        """What of a rank's part goes into this rank's result."""
        if outcome is not Outcome.SLICE:
            return tensor
        with torch.inference_mode(False):
            return tensor.narrow(dim, *slice_of(tensor.shape, dim, self.rank, self.size))

    def result(self) -> torch.Tensor:
        try:
            return self._result()
        except CommunicationError as error:
            self._has_failed = True
            self._give_up(error)  # others wait for this rank as well, and shall know why
            raise

    def _result(self) -> torch.Tensor:
        plan, number = self._plan, self._number
        assert plan is not None, "nothing was posted"
        where, seen = 1 + number % NUM_ROOMS, plan.seen
        for peer in self._peers:
            line = peer.line
            if line[0] < number:
                self._wait(peer, number)
            if line[where] != seen[peer.rank]:
                self._find(plan, peer, line[where])
        outcome, dim = self._asked
        made = torch.cat(plan.parts, dim) if outcome is Outcome.JOINED else _sum(plan.parts)
        whole = made.nbytes * self.size if outcome is Outcome.SLICE else made.nbytes
        self.moved[outcome].add(whole, self._posted_at)
        self._line[1 + NUM_ROOMS] = number
        self._plan = self._room = None
        if self._exchange.is_abandoned():  # what a rank that gave up has in its memory may be anything
            raise self._given_up()
        return made

    def _find(self, plan: _Plan, peer: _Peer, word: int) -> None:
        room, (outcome, dim) = self._room, self._asked
        assert room is not None
        if word >> _PLACE_BITS != plan.word >> _PLACE_BITS:
            raise self._mismatch(peer)
        arena, shape = self._exchange.arenas[peer.rank], room.tensor.shape
        assert arena is not None
        place = word & ((1 << _PLACE_BITS) - 1)
        with torch.inference_mode(False):
            found = arena.tensor(place, shape.numel(), room.tensor.dtype).view(shape)
        plan.parts[peer.rank], plan.seen[peer.rank] = self._part(found, outcome, dim), word

    def _wait(self, peer: _Peer, number: int) -> None:
        start, is_abandoned = time.monotonic(), self._exchange.is_abandoned
        deadline = start + self._timeout
        try:
            while not peer.counter.reaches(
                number, min(deadline, time.monotonic() + _LOOK), self._patience, is_abandoned
            ):
                if (trouble := self._trouble()) is not None:
                    raise trouble
                if time.monotonic() >= deadline:
                    raise self._too_late(peer, number)
        except Abandoned:
            raise self._given_up() from None
        finally:
            self.waited += time.monotonic() - start

    def describe(self) -> str:
        """The exchange under way, as messages show it."""
        assert self._room is not None
        tensor = self._room.tensor
        return f"{self._asked[0]} parts of {str(tensor.dtype)[6:]} {tuple(tensor.shape)}"

    def _mismatch(self, peer: _Peer) -> Mismatch:
        me, what = self._places[self.rank], self.describe()
        return Mismatch(
            f"exchange number {self._number} on group {self._group_name}: {me} makes {what}, but {peer.place} makes "
            "something else.",
            rank=peer.place.rank,
            coords=peer.place.coords,
            action=what,
        )

    def _too_late(self, peer: _Peer, number: int) -> DeadlineExceeded:
        what = self.describe()
        return DeadlineExceeded(
            f"{what} on group {self._group_name} did not end within {self._timeout:g} s: {peer.place} has not come to "
            f"it; of {number} exchanges it has posted {peer.line[0]}.",
            rank=peer.place.rank,
            coords=peer.place.coords,
            action=what,
        )

    def _given_up(self) -> CommunicationError:
        return self._trouble() or GroupClosed(f"group {self._group_name} was given up")

    def is_read_by(self, rank: int) -> bool:
        """Whether this peer has no need of this rank's memory any more. Where an exchange failed, it fails for all."""
        if self._has_failed:
            return True
        line = next(peer.line for peer in self._peers if peer.rank == rank)
        return line[1 + NUM_ROOMS] >= self._number


class CallTensorExchange:
    """Through a group's collectives, which its event loop makes; where no memory is shared."""

    is_told_by_group = True

    def __init__(self, group: Group, loop: asyncio.AbstractEventLoop) -> None:
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
        if outcome is Outcome.SLICE:
            slice_of(part.shape, dim, self.rank, self.size)
        self._under_way = asyncio.run_coroutine_threadsafe(self._carry_out(part, outcome, dim), self._loop)

    async def _carry_out(self, part: torch.Tensor, outcome: Outcome, dim: int) -> torch.Tensor:
        start = time.monotonic()
        found = await self._call(part, outcome, dim)
        self.moved[outcome].add(max(part.nbytes, found.nbytes), start)
        return found

    async def _call(self, part: torch.Tensor, outcome: Outcome, dim: int) -> torch.Tensor:
        group = self._group
        if outcome is Outcome.TOTAL:
            return await group.all_reduce(part)
        ahead = part.movedim(dim, 0).contiguous()  # collectives cut and join along the first dimension
        found = await (group.reduce_scatter(ahead) if outcome is Outcome.SLICE else group.all_gather(ahead))
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
            raise DeadlineExceeded("the event loop did not carry an exchange out in time") from None
        except concurrent.futures.CancelledError:
            raise GroupClosed(f"an exchange on group {self._group.name} was cancelled") from None
        finally:
            self.waited += time.monotonic() - start
