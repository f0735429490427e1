"""One group's shared memory as one of its ranks sees it: rounds that all arrive at, slots, offers, packets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from process_groups.arena import Arena, Mapping
from process_groups.lane import Steps
from process_groups.reduction import Reducer
from process_groups.shared_layout import GroupLayout
from process_groups.signals import Abandoned, Counter
from process_groups.transport import Call

_MOST_KNOWN = 512  # shapes whose views are kept: making them would cost more than a small call's own work


class Exchange:
    """Arenas stand in the order of group ranks. Everything here happens in one thread at a time."""

    def __init__(self, arenas: Sequence[Mapping], me: int, layout: GroupLayout) -> None:
        own = arenas[me]
        assert isinstance(own, Arena)
        self.arenas, self.own, self.me, self.size, self.layout = arenas, own, me, len(arenas), layout
        self.reduce = Reducer()
        self._round = 0
        self._progress = Counter(own, layout.progress)
        peers = [peer for peer in range(len(arenas)) if peer != me]
        self._progress_of = [Counter(arenas[peer], layout.progress) for peer in peers]
        self._abort = own.memory[layout.abort : layout.abort + 8].cast("Q")
        self._aborts = [arenas[peer].memory[layout.abort : layout.abort + 8].cast("Q") for peer in peers]
        self._is_given_up = False
        self._offers = [[_word(arena, layout.offer(parity)) for arena in arenas] for parity in (0, 1)]
        self._views: dict[tuple[int, torch.dtype], list[list[torch.Tensor]]] = {}
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
            if counter.value < round_number:
                yield counter, round_number

    # Giving up.

    def give_up(self) -> None:
        """Let nobody write into this rank's buffers any more, and wake whoever waits, here or there."""
        self._is_given_up = True
        self._abort[0] = 1
        for counter in (self._progress, *self._progress_of):
            counter.wake()

    def is_abandoned(self) -> bool:
        return self._is_given_up or any(abort[0] for abort in self._aborts)

    def check(self) -> None:
        """Between two pieces: a rank that gave up may use its buffers for something else."""
        if self.is_abandoned():
            raise Abandoned

    # Memory.

    def slots(self, round_number: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The beginning of every rank's staging slot of that round."""
        key = (numel, dtype)
        views = self._views.get(key)
        if views is None:
            _keep_small(self._views)
            views = self._views[key] = [
                [arena.tensor(self.layout.slot(slot), numel, dtype) for arena in self.arenas] for slot in range(3)
            ]
        return views[round_number % 3]

    def offer(self, tensor: torch.Tensor | None) -> int:
        """Arrive at the next round, showing where this rank's tensor lies if it is registered."""
        offset = None if tensor is None else self.own.offset_of(tensor)
        self._offers[self.next_round % 2][self.me][0] = 0 if offset is None else offset + 1
        return self.arrive()

    def offers(self, round_number: int) -> list[int] | None:
        """Where all ranks' tensors lie; None when one of them is not registered."""
        found = [word[0] - 1 for word in self._offers[round_number % 2]]
        return None if -1 in found else found

    def offer_of(self, peer: int, round_number: int) -> int | None:
        word: int = self._offers[round_number % 2][peer][0]
        return word - 1 if word else None

    def remembered(
        self, key: tuple[object, ...], make: Callable[[], list[list[torch.Tensor]]]
    ) -> list[list[torch.Tensor]]:
        """Views that the same call needed last time."""
        views = self._piece_views.get(key)
        if views is None:
            _keep_small(self._piece_views)
            views = self._piece_views[key] = make()
        return views


def is_short(call: Call, limit: int) -> bool:
    """Whether this rank's part takes so little time that the event loop can do it."""
    tensor = call.target if call.target is not None else call.source
    return tensor is None or tensor.nbytes <= limit


def _keep_small(known: dict[object, object] | dict[tuple[int, torch.dtype], list[list[torch.Tensor]]]) -> None:
    if len(known) >= _MOST_KNOWN:
        known.clear()


def _word(arena: Mapping, offset: int) -> memoryview:
    return arena.memory[offset : offset + 8].cast("Q")
