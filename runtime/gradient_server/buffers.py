"""The memory of sums and averages: allocated once, reused in every step, within a limit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy

from runtime.gradient_server.arithmetic import Array
from runtime.gradient_server.wire.messages import Dtype

Key: TypeAlias = tuple[str, int]
"""What is summed separately: `whole`, or a `block`, `component` or `part` with its number."""

_SUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What must be the same in all workers' gradients of a key."""

    count: int
    dtype: Dtype = Dtype.FLOAT32
    sizes: tuple[int, ...] = ()
    """Sizes of a block's tensors."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums and the average."""
        return self.count * (_SUM_BYTES + self.dtype.num_bytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one key. It is never cleared: the first worker to reach an element assigns it."""

    shape: Shape
    sums: Array
    result: Array


class OverLimit(Exception):
    """The memory limit does not allow this allocation."""


class Buffers:
    """One `Memory` per key. The shapes of the first completed step hold for all later steps."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = usable_memory() if limit_bytes is None else limit_bytes
        self.num_bytes = 0
        self._memories: dict[Key, Memory] = {}
        self._settled: dict[Key, Shape] = {}

    def settled(self, key: Key) -> Shape | None:
        """The shape that every gradient of this key must have; None before the first completed step."""
        return self._settled.get(key)

    def num_settled(self, kind: str) -> int:
        """How many keys of this kind every step must have; 0 before the first completed step."""
        return sum(each == kind for each, _ in self._settled)

    def settle(self, keys: Iterable[Key]) -> None:
        """A step was completed with these keys: fix their shapes."""
        self._settled |= {key: self._memories[key].shape for key in keys}

    def take(self, key: Key, shape: Shape) -> Memory:
        """The memory of a key; that of the previous step if the shape is the same."""
        memory = self._memories.get(key)
        if memory is None or (memory.shape.count, memory.shape.dtype) != (shape.count, shape.dtype):
            memory = self._allocate(key, shape)
        elif memory.shape != shape:
            memory = Memory(shape, memory.sums, memory.result)
        self._memories[key] = memory
        return memory

    def _allocate(self, key: Key, shape: Shape) -> Memory:
        self.forget(key)
        if self.num_bytes + shape.num_bytes > self.limit_bytes:
            raise OverLimit(f"{self.num_bytes + shape.num_bytes} bytes of at most {self.limit_bytes}")
        try:
            memory = Memory(shape, numpy.empty(shape.count), numpy.empty(shape.count, shape.dtype.numpy))
        except MemoryError:
            raise OverLimit(f"{shape.num_bytes} bytes") from None
        self.num_bytes += shape.num_bytes
        return memory

    def forget(self, key: Key) -> None:
        memory = self._memories.pop(key, None)
        self.num_bytes -= memory.shape.num_bytes if memory is not None else 0

    def forget_unsettled(self) -> None:
        """Free the memory of keys that only a dropped attempt had."""
        for key in self._memories.keys() - self._settled.keys():
            self.forget(key)


def usable_memory() -> int:
    """Three quarters of the machine's memory, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
