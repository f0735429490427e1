"""The memory limit: what an all-reduce's bytes cost as plain `add_` and `copy_`, on all cores, without any waiting.

A direct all-reduce of S bytes among N ranks cuts the tensor into N slices. The owner of a slice adds the other N-1
tensors' slices to its own and copies the result into them:

    slice 0    slice 1    slice 2        N = 3: tensor 0 owns slice 0, and so on
    ┌────────┬──────────┬──────────┐
    │ 0+=1,2 │  ◀─────  │  ◀─────  │     tensor 0
    │ ◀───── │  1+=0,2  │  ◀─────  │     tensor 1
    │ ◀───── │  ◀─────  │  2+=0,1  │     tensor 2
    └────────┴──────────┴──────────┘

On the host that is N·(N-1) times `add_` and as often `copy_`, of S/N bytes each. One process for each usable core, with
one torch thread, does its share: the same for its part of the tensors, 1/P of each, in pieces like ours, that stay
in the cache between the adding and the copying. All tensors together are N·S bytes, as in the all-reduce itself.
Below some 64 KiB this measures what the calls of `add_` and `copy_` cost, and C code may well be faster.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist

from parallel3d.benchmarks.gloo_rank import join_gloo
from parallel3d.benchmarks.known_values import check_sum, fill
from parallel3d.benchmarks.plan import torch_dtype
from parallel3d.benchmarks.wire import Command, end_quietly_on_interrupt, serve, stdout_to_stderr
from process_groups.reduction import piece_bytes


def cut(length: int, parts: int) -> list[range]:
    """`length` elements in so many parts, the first of them one longer where it does not come out even."""
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
        self.rest()  # freed before the next ones are made
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
