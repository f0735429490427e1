"""Which samples a replica takes in a step: a pure function of the step's number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallel3d.data.permutation import Permutation
from runtime.errors import InvalidCall


@dataclass(frozen=True)
class Sampler:
    """Passes over the data, one after the other without a gap: step k takes the samples from k * batch_size on.

    seed 0, 5 samples, batches of 2:

    step   | 0   | 1   | 2   | 3   | 4
    pass 0 | 2 1 | 3 0 | 4
    pass 1 |           |   2 | 4 3 | 1 0

    A step's samples are the same for every dp; replica r takes the r-th part of them. Nothing is remembered between
    steps, so a run goes on from any of them.
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
            raise InvalidCall(f"A sampler of {self.num_samples} samples; there must be at least one.")
        if self.batch_size < 1 or self.dp < 1 or self.batch_size % self.dp:
            raise InvalidCall(f"A batch of {self.batch_size} samples cannot be shared by {self.dp} replicas.")
        if not 0 <= self.dp_rank < self.dp:
            raise InvalidCall(f"Replica {self.dp_rank} of {self.dp}; they are counted from 0.")

    def indices(self, step: int) -> list[int]:
        """This replica's samples of the step, in order."""
        if step < 0:
            raise InvalidCall(f"Step {step}; they are counted from 0.")
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
