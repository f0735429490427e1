"""Tensor exchanges through shared memory: each rank reads the parts where the others have written them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from process_groups.arena import no_memory
from process_groups.call import Place
from process_groups.counters import Abandoned, Counter, Patience
from process_groups.reduction import wide_dtype
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import NUM_ROOMS
from process_groups.tensor_exchange import Outcome, nothing_moved, slice_of
from runtime.errors import CommunicationError, DeadlineExceeded, GroupClosed, Mismatch

_LOOK = 0.05  # seconds between looks whether the peers are still there
_MOST_SHAPES = 64  # whose views are kept
_PLACE_BITS = 44  # of a word that says where a room lies: 16 TiB, as much as all arenas together may have


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

    is_recorded_by_group = False

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
        self._asked = Outcome.ALL_REDUCE, 0
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
        if outcome is not Outcome.REDUCE_SCATTER:
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
        made = torch.cat(plan.parts, dim) if outcome is Outcome.ALL_GATHER else _sum(plan.parts)
        whole = made.nbytes * self.size if outcome is Outcome.REDUCE_SCATTER else made.nbytes
        self.moved[outcome].add(whole, self._posted_at)
        self._line[1 + NUM_ROOMS] = number
        self._plan = self._room = None
        if self._exchange.is_abandoned():  # what a rank that aborted has in its memory may be anything
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
        return f"{self._asked[0]} of {str(tensor.dtype)[6:]} {tuple(tensor.shape)}"

    def _mismatch(self, peer: _Peer) -> Mismatch:
        me, what = self._places[self.rank], self.describe()
        return Mismatch(
            f"exchange number {self._number} on group {self._group_name}: {me} calls {what}, but {peer.place} calls "
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
        return self._trouble() or GroupClosed(f"group {self._group_name} was aborted")

    def is_read_by(self, rank: int) -> bool:
        """Whether this peer has no need of this rank's memory any more. Where an exchange failed, it fails for all."""
        if self._has_failed:
            return True
        line = next(peer.line for peer in self._peers if peer.rank == rank)
        return line[1 + NUM_ROOMS] >= self._number
