"""A shuffled order whose places are computed one by one, so that a billion samples need no memory."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

# Four make the order hard to tell from chance; the rest makes small sets as good.
_NUM_ROUNDS = 8


class Permutation:
    """A one-to-one map of 0..size-1 onto itself, drawn from the key; the same with every version of numpy.

    A number below size is two digits (high, low) to the base `side`, the first with side * side >= size. A round adds a
    hash of one digit to the other, which can be undone, so that all rounds together are one-to-one too. What lands on
    size or above goes through the rounds again, until it lands below.
    """

    def __init__(self, size: int, key: str) -> None:
        assert 1 <= size < 2**62, "products of two digits fit 64 bits"
        self._size, self._side = np.uint64(size), np.uint64(math.isqrt(size - 1) + 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The numbers at these places of the order."""
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
    """The last steps of splitmix64; products wrap around at 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
