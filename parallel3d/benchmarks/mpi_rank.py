"""A benchmark rank under mpirun: mpi4py's in-place Allreduce on numpy arrays. Doesn't import torch, which is slow."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import numpy as np
from mpi4py import MPI

from parallel3d.benchmarks.worker import Command, check_sum, end_quietly_on_interrupt, fill, serve, stdout_to_stderr
from runtime.launch.processes import die_with_parent


class MpiRank:
    """All-reduces among all ranks."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self._array = np.zeros(0)

    def prepare(self, command: Command) -> None:
        dtype = np.dtype(command.dtype)
        self.rest()  # free the old array before allocating the new one
        self._array = np.zeros(command.num_bytes // dtype.itemsize, dtype=dtype)
        self._array.fill(0)  # touches every page

    def check(self) -> None:
        make = partial(np.array, dtype=self._array.dtype)
        fill(self._array, self.rank, make)
        self.call()
        ranks = range(self._world.Get_size())
        check_sum(self._array, ranks, make, f"an all-reduce of {self._array.nbytes} bytes")
        self._array.fill(0)

    def call(self) -> None:
        self._world.Allreduce(MPI.IN_PLACE, self._array)

    def barrier(self) -> None:
        self._world.Barrier()

    def rest(self) -> None:
        self._array = np.zeros(0)


if __name__ == "__main__":
    stdout_to_stderr()
    end_quietly_on_interrupt()
    die_with_parent(os.getppid(), signal.SIGKILL)  # a killed mpirun leaves its ranks running
    serve(MpiRank(), *sys.argv[1:])
