"""Writing into memory that another rank reads next: through the cache, or round it, as suits where the cores are.

Where two cores share a cache, one finds there what the other has written. Where they don't, writing anew what the other
one has read takes ten times as long as writing round the cache. A virtual machine's cores move, so every now and then a
bit is written the way that is not used.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

import torch

from process_groups.shared_memory.streaming import CAN_STREAM, stream
from process_groups.torch_internals import has_no_memory

WORTH_STREAMING = 16 << 10  # bytes: fewer are written in a microsecond all the same
_FAR, _STILL_FAR = 2.8, 6.0  # times as long through the cache as round it; a way takes longer when it is but tried
_TRIED = 64 << 10  # bytes that are written the other way; through the cache that takes 30 us where the reader is far
_WARM_UP = 4 << 10  # bytes of these that are not timed: what has not run for a while takes 10 us to begin
_LINE = 64  # bytes of a cache line: what goes round the cache begins with one
_TRY_EVERY = 0.02  # seconds
_LATEST = 3  # writes of each way whose median counts: one that was disturbed does not matter
assert min(_TRIED, WORTH_STREAMING // 2) > _WARM_UP  # so that something is timed


class Writer:
    """For one reader, or for several that are about as far away; for one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_far = False
        """Whether what this rank writes should go round the cache."""
        self._clock, self._next_try = clock, clock() + _TRY_EVERY if CAN_STREAM else math.inf
        self._per_byte = {streams: deque[float](maxlen=_LATEST) for streams in (False, True)}

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor to a contiguous one of the same dtype and shape. torch may not learn that it has changed."""
        if source.nbytes < WORTH_STREAMING or not _lies_as_it_is_seen(source):
            target.copy_(source)
            return
        if self._clock() < self._next_try:
            self._write(target, source, self.is_far)
            return
        target, source, itemsize = target.view(-1), source.view(-1), source.element_size()
        timed, rest = _WARM_UP // itemsize, min(_TRIED, source.nbytes // 2) // _LINE * _LINE // itemsize
        _copy(target[:timed], source[:timed], not self.is_far)
        self._write(target[timed:rest], source[timed:rest], not self.is_far)
        self._write(target[rest:], source[rest:], self.is_far)
        self._compare()
        self._next_try = self._clock() + _TRY_EVERY

    def _write(self, target: torch.Tensor, source: torch.Tensor, streams: bool) -> None:
        began = self._clock()
        _copy(target, source, streams)
        self._per_byte[streams].append((self._clock() - began) / source.nbytes)

    def _compare(self) -> None:
        through, around = self._per_byte[False], self._per_byte[True]
        if len(through) == len(around) == _LATEST:
            self.is_far = median(through) > (_STILL_FAR if self.is_far else _FAR) * median(around)


def _copy(target: torch.Tensor, source: torch.Tensor, streams: bool) -> None:
    if streams:
        stream(target, source)
    else:
        target.copy_(source)


def _lies_as_it_is_seen(tensor: torch.Tensor) -> bool:
    is_plain = not (tensor.is_conj() or tensor.is_neg() or has_no_memory(tensor))
    return is_plain and tensor.is_cpu and tensor.is_contiguous()
