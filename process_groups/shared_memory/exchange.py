"""One group's shared memory as one of its ranks sees it: rounds that all arrive at, slots, offers, packets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from process_groups.arena import PAGE, Arena, Mapping, join, no_memory
from process_groups.call_queue import Steps
from process_groups.counters import Abandoned, Counter, Sleepers
from process_groups.reduction import Reducer
from process_groups.shared_memory.layout import NUM_SLOTS, GroupLayout
from process_groups.shared_memory.writer import Writer

_MOST_KNOWN = 512  # shapes whose views are kept: making them would cost more than a small call's own work
_MOST_JOINED = 64  # shared results that stay mapped, a mapping for each rank
_MOST_PIECES = 8192  # views of pieces that are kept, about 5 MiB


class Exchange:
    """Arenas stand in the order of group ranks, None for ranks of other hosts. One thread at a time."""

    def __init__(self, arenas: Sequence[Mapping | None], me: int, layout: GroupLayout) -> None:
        own = arenas[me]
        assert isinstance(own, Arena)
        self.arenas, self.own, self.me, self.size, self.layout = arenas, own, me, len(arenas), layout
        self.reduce = Reducer()
        self._round = 0
        peers = [arena for peer, arena in enumerate(arenas) if arena is not None and peer != me]
        self._sleepers = Sleepers(_word(own, layout.sleeping), [_word(arena, layout.sleeping) for arena in peers])
        self._progress = Counter(own, layout.progress, self._sleepers)
        self._progress_of = [Counter(arena, layout.progress, self._sleepers) for arena in peers]
        first = arenas[0]
        self.result = Counter(first, layout.result, self._sleepers) if first is not None else None
        """The rounds whose result the first rank has put into its slot; None where that is on another host."""
        self.num_windows = 0
        """Of running sums, in all calls so far."""
        here = [arena for arena in arenas if arena is not None]
        self.windows_added = [Counter(arena, layout.windows_added, self._sleepers) for arena in here]
        self._abort = _word(own, layout.abort)
        self._aborts = [_word(arena, layout.abort) for arena in peers]
        self._is_given_up = False
        self._offers = [
            [None if arena is None else _word(arena, layout.offer(parity)) for arena in arenas] for parity in (0, 1)
        ]
        self.writer = Writer()
        """Into this group's shared memory, for collectives."""
        self._slot_starts = [layout.slot(slot) for slot in range(NUM_SLOTS)]
        self._joined: dict[tuple[object, ...], torch.Tensor] = {}
        self._work_space: torch.Tensor | None = None
        self._views: dict[tuple[int, torch.dtype], list[list[torch.Tensor]]] = {}
        self._num_piece_views = 0
        self._piece_views: dict[tuple[object, ...], list[list[torch.Tensor]]] = {}

    # Rounds.

    def arrive(self) -> int:
        """Show the peers that this rank has come to the next round; its number."""
        self._round += 1
        self._progress.store(self._round)
        return self._round

    @property
    def next_round(self) -> int:
        return self._round + 1

    def everybody(self, round_number: int) -> Steps:
        """Wait until each peer has arrived."""
        for counter in self._progress_of:
            if counter.words[0] < round_number:
                yield counter, round_number

    def has_everybody(self, round_number: int) -> bool:
        """Whether each peer has arrived."""
        for counter in self._progress_of:  # noqa: SIM110  # `all` would cost half a microsecond more
            if counter.words[0] < round_number:
                return False
        return True

    def counter(self, owner: int, offset: int, peer: int) -> Counter:
        """One of this rank's counters that only a peer waits for, or of that peer's that only this rank waits for."""
        arena, theirs = self.arenas[owner], self.arenas[peer]
        assert arena is not None
        assert theirs is not None
        return Counter(arena, offset, self._sleepers.only(_word(theirs, self.layout.sleeping)))

    def counter_of_all(self, owner: int, offset: int) -> Counter:
        """One of a rank's counters that all others may wait for."""
        arena = self.arenas[owner]
        assert arena is not None
        return Counter(arena, offset, self._sleepers)

    def words(self, owner: int, offset: int, num_words: int) -> memoryview:
        """Some 64-bit words of a rank's arena."""
        arena = self.arenas[owner]
        assert arena is not None
        return _words(arena, offset, num_words)

    # Giving up.

    def give_up(self) -> None:
        """Stop all writes into this rank's buffers, and wake all waiting threads, here and on peers."""
        self._is_given_up = True
        self._abort[0] = 1
        for counter in (self._progress, *self._progress_of, self.result, *self.windows_added):
            if counter is not None:
                counter.wake()

    def is_abandoned(self) -> bool:
        for abort in self._aborts:  # `any` would cost more than all the rest
            if abort[0]:
                return True
        return self._is_given_up

    def check(self) -> None:
        """Between two pieces: a rank that aborted may use its buffers for something else."""
        if self.is_abandoned():
            raise Abandoned

    # Memory.

    def slots(self, round_number: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The beginning of every rank's staging slot of that round."""
        key = (numel, dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_KNOWN:
                self._views.clear()
            views = self._views[key] = [
                [arena.tensor(self.layout.slot(slot), numel, dtype) for arena in self.arenas if arena is not None]
                for slot in range(NUM_SLOTS)
            ]
        return views[round_number % NUM_SLOTS]

    def own_slot(self, round_number: int, num_bytes: int) -> memoryview:
        """The beginning of this rank's slot."""
        start = self._slot_starts[round_number % NUM_SLOTS]
        return self.own.memory[start : start + num_bytes]

    def window(self, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The beginning of a window of a running sum."""
        first = self.arenas[0]
        assert first is not None
        return first.tensor(self.layout.window(number), numel, dtype)

    def show(self, tensor: torch.Tensor) -> None:
        """Tell the peers where this rank's tensor of the next round lies, if it is registered."""
        offset = self.own.offset_of(tensor)
        word = self._offers[self.next_round % 2][self.me]
        assert word is not None
        word[0] = 0 if offset is None else offset + 1

    def offer_of(self, peer: int, round_number: int) -> int | None:
        """Where a peer's tensor of that round lies."""
        word = self._offers[round_number % 2][peer]
        return word[0] - 1 if word is not None and word[0] else None

    def offers(self, round_number: int) -> list[int] | None:
        """Where all ranks' tensors of that round lie; None when one of them is not registered."""
        found = [offset for peer in range(self.size) if (offset := self.offer_of(peer, round_number)) is not None]
        return found if len(found) == self.size else None

    def joined(self, offsets: Sequence[int], cuts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A slice of each rank's buffer as one tensor: rank r's from cut r to cut r + 1."""
        key = (*offsets, *cuts, dtype)
        found = self._joined.get(key)
        if found is None:
            if len(self._joined) >= _MOST_JOINED:
                self._joined.clear()
            ends = [cut * dtype.itemsize for cut in cuts]
            whole = [
                (arena, (offset + a) // PAGE * PAGE, -(-(offset + b) // PAGE) * PAGE)
                for arena, offset, a, b in zip(self.arenas, offsets, ends, ends[1:], strict=False)
                if arena is not None and a < b
            ]
            start = offsets[0] % PAGE
            found = self._joined[key] = join(whole)[start : start + ends[-1]].view(dtype)
        return found

    def work_space(self, num_bytes: int) -> torch.Tensor:
        """Registered bytes for one call at a time."""
        if self._work_space is None:
            with torch.inference_mode(False):  # it is used by later calls too
                self._work_space = self.own.empty((num_bytes,), torch.uint8)
            if self._work_space is None:
                raise no_memory("a work space", num_bytes)
        return self._work_space

    def place(self, part: torch.Tensor, dtype: torch.dtype, most_bytes: int) -> torch.Tensor:
        """Where a block of a strategy's all-reduce is worked on: in the tensor itself if it is registered and has this
        dtype, else in the work space."""
        if dtype == part.dtype and self.own.offset_of(part) is not None:
            return part
        return self.work_space(most_bytes)[: part.numel() * dtype.itemsize].view(dtype)

    def remembered(
        self, key: tuple[object, ...], make: Callable[[], list[list[torch.Tensor]]]
    ) -> list[list[torch.Tensor]]:
        """Views that the same call needed last time."""
        views = self._piece_views.get(key)
        if views is None:
            views = make()
            self._num_piece_views += len(views) * self.size
            if self._num_piece_views > _MOST_PIECES:
                self._piece_views.clear()
                self._num_piece_views = len(views) * self.size
            self._piece_views[key] = views
        return views


def _word(arena: Mapping, offset: int) -> memoryview:
    return _words(arena, offset, 1)


def _words(arena: Mapping, offset: int, num_words: int) -> memoryview:
    return arena.memory[offset : offset + 8 * num_words].cast("Q")
