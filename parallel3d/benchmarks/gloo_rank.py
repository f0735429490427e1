"""A benchmark rank that makes the blocking calls of torch.distributed with gloo."""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
import torch.distributed as dist

from parallel3d.benchmarks.plan import torch_dtype
from parallel3d.benchmarks.worker import Command, check_sum, end_quietly_on_interrupt, fill, serve, stdout_to_stderr
from runtime.launch.fork_server import STORE_FD


def join_gloo() -> None:
    """Join the gloo group of this launch through the launcher's file store, which needs no port."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"/proc/self/fd/{os.environ[STORE_FD]}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


class GlooRank:
    """All-reduces, or round trips between ranks 0 and 1."""

    def __init__(self) -> None:
        self.rank, self._size = dist.get_rank(), dist.get_world_size()
        self._tensor = torch.empty(0)
        self._kind = "all_reduce"

    def prepare(self, command: Command) -> None:
        dtype = torch_dtype(command.dtype)
        self.rest()  # free the old tensor before allocating the new one
        self._tensor = torch.zeros(command.num_bytes // dtype.itemsize, dtype=dtype)
        self._kind = command.kind

    def check(self) -> None:
        make = partial(torch.tensor, dtype=self._tensor.dtype)
        if self._kind == "all_reduce":
            fill(self._tensor, self.rank, make)
            dist.all_reduce(self._tensor)
            check_sum(self._tensor, range(self._size), make, f"an all-reduce of {self._tensor.nbytes} bytes")
        elif self.rank == 0:
            fill(self._tensor, 0, make)
            dist.send(self._tensor, 1)
        elif self.rank == 1:
            dist.recv(self._tensor, 0)
            check_sum(self._tensor, range(1), make, f"a send of {self._tensor.nbytes} bytes")
        self._tensor.zero_()

    def call(self) -> None:
        if self._kind == "all_reduce":
            dist.all_reduce(self._tensor)
        elif self.rank == 0:
            dist.send(self._tensor, 1)
            dist.recv(self._tensor, 1)
        elif self.rank == 1:
            dist.recv(self._tensor, 0)
            dist.send(self._tensor, 0)

    def barrier(self) -> None:
        dist.barrier()

    def rest(self) -> None:
        self._tensor = torch.empty(0)


if __name__ == "__main__":
    stdout_to_stderr()
    end_quietly_on_interrupt()
    join_gloo()
    serve(GlooRank(), *sys.argv[1:])
    dist.destroy_process_group()
