"""A benchmark rank of parallel3d: all-reduces and sends on a mesh, awaited as in user code."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import partial

import torch

import parallel3d
from parallel3d.benchmarks.plan import torch_dtype
from parallel3d.benchmarks.worker import Command, check_sum, fill, stdout_to_stderr, to_line

_CALL_SECONDS = 120.0  # the deadline of one call


class OurRank:
    """Runs commands on one group; keeps tensors until the command `rest`."""

    def __init__(self, group: parallel3d.Group) -> None:
        self._group = group
        self._tensors: dict[tuple[int, str, bool], torch.Tensor] = {}

    async def perform(self, command: Command) -> float:
        """Seconds per all-reduce, or per one-way message; 0 for `rest`."""
        if command.kind == "rest":
            self._tensors.clear()
            return 0.0
        tensor = self._tensor_for(command)
        if command.kind == "send":
            return await self._time_sends(tensor, command)
        return await self._time_all_reduces(tensor, command)

    def _tensor_for(self, command: Command) -> torch.Tensor:
        wanted = (command.num_bytes, command.dtype, command.registered)
        if wanted not in self._tensors:
            dtype = torch_dtype(command.dtype)
            make = self._group.empty if command.registered else torch.empty
            self._tensors[wanted] = make(command.num_bytes // dtype.itemsize, dtype=dtype).zero_()
        return self._tensors[wanted]  # always zeros: sums of zeros are zeros, and a check zeroes it

    async def _time_all_reduces(self, tensor: torch.Tensor, command: Command) -> float:
        group = self._group
        reduce = partial(group.all_reduce, tensor, strategy=command.strategy, shared=command.shared)
        if command.check:
            make = partial(torch.tensor, dtype=tensor.dtype)
            fill(tensor, group.rank, make)
            check_sum(await reduce(), range(group.size), make, f"an all-reduce of {command.num_bytes} bytes")
            if command.shared:
                await group.barrier()  # other ranks may still read this rank's slice
            tensor.zero_()
        for _ in range(command.warm_up):
            await reduce()
        await group.barrier()
        start = time.perf_counter()
        for _ in range(command.repeats):
            await reduce()
        return (time.perf_counter() - start) / command.num_timed

    async def _time_sends(self, tensor: torch.Tensor, command: Command) -> float:
        group = self._group
        await group.barrier()
        if group.rank > 1:
            return 0.0
        peer = 1 - group.rank
        if command.check:
            await self._check_sends(tensor, peer)
        for _ in range(command.warm_up):
            await self._round_trip(tensor, peer)
        start = time.perf_counter()
        for _ in range(command.repeats):
            await self._round_trip(tensor, peer)
        return (time.perf_counter() - start) / command.num_timed

    async def _check_sends(self, tensor: torch.Tensor, peer: int) -> None:
        group, make = self._group, partial(torch.tensor, dtype=tensor.dtype)
        for sender in (0, 1):
            if group.rank == sender:
                fill(tensor, group.rank, make)
                await group.send(tensor, peer)
            else:
                await group.recv(tensor, peer)
                check_sum(tensor, range(peer, peer + 1), make, f"a send of {tensor.nbytes} bytes")
        tensor.zero_()

    async def _round_trip(self, tensor: torch.Tensor, peer: int) -> None:
        if peer:
            await self._group.send(tensor, peer)
            await self._group.recv(tensor, peer)
        else:
            await self._group.recv(tensor, peer)
            await self._group.send(tensor, peer)


async def main(workers: str, path: str) -> None:
    """Run commands until the bench process closes the connection."""
    world_size = int(os.environ["WORLD_SIZE"])
    async with parallel3d.mesh(dp=world_size, timeout=_CALL_SECONDS, threads=1) as mesh:
        rank = OurRank(mesh.world)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(to_line(workers=workers, rank=mesh.rank))
        async for line in reader:
            try:
                seconds = await rank.perform(Command.from_line(line))
            except Exception as error:
                writer.write(to_line(error=f"{type(error).__name__}: {error}"))
                await writer.drain()
                raise
            writer.write(to_line(seconds=seconds))
        writer.close()


if __name__ == "__main__":
    stdout_to_stderr()
    parallel3d.run(partial(main, *sys.argv[1:]))
