"""A peer on this host, as the transfers of a strategy's program use it."""

from __future__ import annotations

from collections.abc import Generator

import torch

from process_groups.call_queue import Wait
from process_groups.shared_memory.exchange import Exchange
from process_groups.strategies.program import Transfer


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
