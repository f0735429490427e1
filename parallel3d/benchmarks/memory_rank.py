"""The memory limit: the memory traffic of an all-reduce as plain `add_` and `copy_` on all cores, unsynchronized.

A direct all-reduce of S bytes among N ranks cuts the tensor into N slices. The owner of a slice adds the other N-1
tensors' slices to its own and copies the result into them:

    slice 0    slice 1    slice 2        N = 3: tensor 0 owns slice 0, and so on
    ┌────────┬──────────┬──────────┐
    │ 0+=1,2 │  ◀─────  │  ◀─────  │     tensor 0
    │ ◀───── │  1+=0,2  │  ◀─────  │     tensor 1
    │ ◀───── │  ◀─────  │  2+=0,1  │     tensor 2
    └────────┴──────────┴──────────┘

In total that is N·(N-1) `add_` and as many `copy_`, of S/N bytes each. P processes, one per usable core and with one
torch thread each, do this for 1/P of every tensor. They use the piece size of our own all-reduce, so a piece stays in
the cache between adding and copying. All tensors together are N·S bytes, as in the all-reduce itself.
Below about 64 KiB this measures the overhead of calling `add_` and `copy_`; C code may be faster.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist

from parallel3d.benchmarks.gloo_rank import join_gloo
from parallel3d.benchmarks.plan import torch_dtype
from parallel3d.benchmarks.worker import Command, check_sum, end_quietly_on_interrupt, fill, serve, stdout_to_stderr
from process_groups.reduction import piece_bytes


def cut(length: int, parts: int) -> list[range]:
    """Split `length` elements into `parts` ranges; the first ones are one longer if it does not divide evenly."""
    short, longer = divmod(length, parts)
    starts = [part * short + min(part, longer) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]


class MemoryRank:
    """One core's share of an all-reduce among `num_tensors` ranks."""

    def __init__(self, num_tensors: int, rank: int, num_cores: int) -> None:
        self.rank, self._num_cores, self._num_tensors = rank, num_cores, num_tensors
        self.tensors: list[torch.Tensor] = []
        self._pieces: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def prepare(self, command: Command) -> None:
        dtype = torch_dtype(command.dtype)
        self.rest()  # free the old tensors before allocating new ones
        mine = cut(command.num_bytes // dtype.itemsize, self._num_cores)[self.rank]
        self.tensors = [torch.zeros(len(mine), dtype=dtype) for _ in range(self._num_tensors)]
        step = piece_bytes(self._num_tensors) // dtype.itemsize
        for owner, part in enumerate(cut(len(mine), self._num_tensors)):
            for start in range(part.start, part.stop, step):
                views = [tensor[start : min(start + step, part.stop)] for tensor in self.tensors]
                self._pieces.append((views.pop(owner), views))

    def check(self) -> None:
        make = partial(torch.tensor, dtype=self.tensors[0].dtype)
        for number, tensor in enumerate(self.tensors):
            fill(tensor, number, make)
        self.call()
        for tensor in self.tensors:
            check_sum(tensor, range(self._num_tensors), make, "a plain sum")
            tensor.zero_()

    def call(self) -> None:
        for own, others in self._pieces:
            for other in others:
                own.add_(other)
            for other in others:
                other.copy_(own)

    def barrier(self) -> None:
        dist.barrier()

    def rest(self) -> None:
        self._pieces = []
        self.tensors = []


if __name__ == "__main__":
    stdout_to_stderr()
    end_quietly_on_interrupt()
    join_gloo()
    serve(MemoryRank(int(sys.argv[3]), dist.get_rank(), dist.get_world_size()), *sys.argv[1:3])
    dist.destroy_process_group()
