"""The sampler: which samples a replica takes in a step, as a pure function of the step."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InvalidCall

# Four rounds make the order hard to tell from chance; the others do so for small datasets.
_NUM_ROUNDS = 8


@dataclass(frozen=True)
class Sampler:
    """Goes over the data again and again without a gap: step k takes batch_size samples from k * batch_size on.

    seed 0, 5 samples, batches of 2:

    step   | 0   | 1   | 2   | 3   | 4
    pass 0 | 2 1 | 3 0 | 4
    pass 1 |           |   2 | 4 3 | 1 0

    A step's samples are the same for every dp; replica r takes the r-th part of them. There is no state, so a run can
    continue from any step.
    """

    num_samples: int
    batch_size: int
    """Samples of one step over all replicas."""
    dp: int = 1
    dp_rank: int = 0
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples < 2**62:
            raise InvalidCall(f"num_samples = {self.num_samples}: give at least 1.")
        if self.batch_size < 1 or self.dp < 1 or self.batch_size % self.dp:
            raise InvalidCall(f"batch_size = {self.batch_size}: give a positive multiple of dp({self.dp}).")
        if not 0 <= self.dp_rank < self.dp:
            raise InvalidCall(f"dp_rank = {self.dp_rank}: there are {self.dp} replicas, 0 to {self.dp - 1}.")

    def indices(self, step: int) -> list[int]:
        """The indices of this replica's samples of a step, in order."""
        if step < 0:
            raise InvalidCall(f"step = {step}: steps count from 0.")
        share = self.batch_size // self.dp
        start = step * self.batch_size + self.dp_rank * share
        indices: list[int] = []
        while len(indices) < share:
            which, place = divmod(start + len(indices), self.num_samples)
            stop = min(place + share - len(indices), self.num_samples)
            indices += self._part_of_pass(which, place, stop)
        return indices

    def _part_of_pass(self, which: int, start: int, stop: int) -> list[int]:
        if not self.shuffle:
            return list(range(start, stop))
        order = Permutation(self.num_samples, f"{self.seed}:{which}")
        part: list[int] = order(np.arange(start, stop, dtype=np.uint64)).tolist()
        return part


class Permutation:
    """A permutation of 0..size-1 drawn from the key, whose elements are computed one by one: a billion samples need no
    memory. The same with every version of numpy.

    A number below size is two digits (high, low) to the smallest base `side` with side * side >= size. A round adds a
    hash of one digit to the other, which can be undone, so all rounds together are one-to-one (a Feistel network).
    Numbers that become size or larger go through the rounds again, until they are below.
    """

    def __init__(self, size: int, key: str) -> None:
        assert 1 <= size < 2**62, "products of two digits must fit 64 bits"
        self._size, self._side = np.uint64(size), np.uint64(math.isqrt(size - 1) + 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The elements at these places of the permutation."""
        numbers = self._through_rounds(places)
        while (outside := numbers >= self._size).any():
            numbers[outside] = self._through_rounds(numbers[outside])
        return numbers

    def _through_rounds(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = numbers // self._side, numbers % self._side
        for key in self._keys:
            high, low = low, (high + _hashed(low ^ key) % self._side) % self._side
        mixed: NDArray[np.uint64] = high * self._side + low
        return mixed


def _hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The last steps of splitmix64; products wrap at 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
