"""A peer on another host, as the transfers of a strategy's program meet it: sends and receives of torch's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from datetime import timedelta

import torch

from process_groups.call import Call
from process_groups.call_queue import Wait
from process_groups.strategies.program import Transfer
from process_groups.torch_internals import BACKSTOP, TorchWork

_FIRST_TAG, _NUM_TAGS = 1 << 30, 1 << 29  # far above the tags of the user's own sends

HandOver = Callable[[Call, int], TorchWork]
"""Issues a send or receive with a tag."""


class NetworkLink:
    """Waits in its thread; a group that is aborted cuts the sockets, which ends every wait."""

    def __init__(self, peer: int, hand_over: HandOver) -> None:
        self._peer, self._hand_over = peer, hand_over
        self._num_sent = self._num_expected = 0
        self._sends: list[TorchWork] = []
        self._expected: deque[tuple[torch.Tensor, TorchWork]] = deque()

    def begin(self, mine: torch.Tensor, timeout: float) -> None:
        self._mine, self._timeout = mine, timeout
        self._limit = timedelta(seconds=timeout + BACKSTOP)

    def send(self, transfer: Transfer) -> None:
        values = self._mine[transfer.start : transfer.stop]
        call = Call("send", values, peer=self._peer, timeout=self._timeout)
        self._sends.append(self._hand_over(call, _FIRST_TAG + self._num_sent % _NUM_TAGS))
        self._num_sent += 1

    def expect(self, transfer: Transfer) -> None:
        values = torch.empty(transfer.stop - transfer.start, dtype=self._mine.dtype)
        call = Call("recv", target=values, peer=self._peer, timeout=self._timeout)
        self._expected.append((values, self._hand_over(call, _FIRST_TAG + self._num_expected % _NUM_TAGS)))
        self._num_expected += 1

    def receive(self, transfer: Transfer) -> Generator[Wait, None, torch.Tensor]:
        values, work = self._expected.popleft()
        work.wait(self._limit)
        return values
        yield  # it is a generator, as for peers in shared memory

    def end(self) -> None:
        for work in self._sends:
            work.wait(self._limit)
        self._sends.clear()
