"""What zero-copy could break: autograd's bookkeeping, the order of additions, wake-ups, and memory after a failure."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from typing import Any

import pytest
import torch

import parallel3d
from parallel3d import CommunicationError, DeadlineExceeded, GroupClosed
from process_groups import counters
from process_groups.reduction import PIECE, Reducer
from process_groups.shared_memory import streaming, writer
from tests.support.processes import SECONDS
from tests.support.ranks import Ranks, Tell, torch_variables

NUM = 300_000  # floats of what peers read and write in place


def flat_mesh() -> parallel3d.Mesh:
    return parallel3d.mesh(dp=int(os.environ["WORLD_SIZE"]))


def hear_all(ranks: Ranks) -> list[Any]:
    heard = [rank.hear() for rank in ranks]
    assert [rank.finish() for rank in ranks] == [0] * len(ranks)
    return heard


# Autograd.


async def overwrite_saved_tensors(tell: Tell) -> None:
    async with flat_mesh() as mesh:
        world, noticed = mesh.world, []

        def saved(numel: int, registered: bool) -> tuple[torch.Tensor, torch.Tensor]:
            tensor = (world.empty(numel) if registered else torch.empty(numel)).fill_(1.0)
            return tensor, (torch.ones(numel, requires_grad=True) * tensor).sum()

        async def note(what: str, loss: torch.Tensor) -> None:
            await world.barrier()  # the peers have written too
            try:
                loss.backward()
            except RuntimeError as error:
                noticed.append(what if "modified by an inplace operation" in str(error) else str(error))

        for numel in (3, NUM):
            for registered in (True, False):
                tensor, loss = saved(numel, registered)
                await world.all_reduce(tensor)
                await note("all_reduce", loss)
                for strategy in ("ring", "tree", "hierarchical"):
                    tensor, loss = saved(numel, registered)
                    await world.all_reduce(tensor, strategy=strategy)
                    await note(strategy, loss)
                tensor, loss = saved(numel, registered)
                await world.broadcast(tensor, root=1 - mesh.rank // 2)
                await note("broadcast", loss)
                tensor, loss = saved(2 * numel, registered)
                await world.all_gather(torch.ones(numel), out=tensor)
                await note("all_gather", loss)
                tensor, loss = saved(numel, registered)
                await world.reduce_scatter(torch.ones(2 * numel), out=tensor)
                await note("reduce_scatter", loss)
                tensor, loss = saved(numel, registered)
                sending = world.send(torch.ones(numel), 1 - mesh.rank)
                await world.recv(tensor, 1 - mesh.rank)
                await sending
                await note("recv", loss)
                tensor, loss = saved(numel, registered)
                await asyncio.gather(
                    world.send(tensor, 1 - mesh.rank), world.recv(torch.ones(numel), 1 - mesh.rank),
                    world.all_gather(tensor), world.all_to_all(torch.cat([tensor, tensor])),
                )  # fmt: skip
                await note("what is only read", loss)
        tell(noticed)


def test_autograd_notices_every_overwritten_tensor():
    with Ranks(overwrite_saved_tensors, torch_variables(2)) as ranks:
        each = ["all_reduce", "ring", "tree", "hierarchical", "broadcast", "all_gather", "reduce_scatter", "recv"]
        assert hear_all(ranks) == [each * 4] * 2


# The order of additions.


async def add_up_in_many_ways(tell: Tell, dtype: torch.dtype) -> None:
    async with flat_mesh() as mesh:
        world, size = mesh.world, mesh.world_size
        numel = 60_000 * size
        generator = torch.Generator().manual_seed(mesh.rank)
        mine = (
            torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
        ).to(dtype)

        def copy(registered: bool) -> torch.Tensor:
            return (world.empty(numel, dtype=dtype) if registered else torch.empty(numel, dtype=dtype)).copy_(mine)

        whole = await world.all_reduce(copy(True))
        different = []
        for registered in (True, False):
            tensor = await world.all_reduce(copy(registered))
            if not torch.equal(tensor, whole):
                different.append(("again", registered))
            tensor = copy(registered)
            part = await world.reduce_scatter(tensor)
            if not torch.equal(await world.all_gather(part), whole):
                different.append(("reduce_scatter", registered))
            for cuts in ((1,), (30_000, 30_001, 150_000), range(0, numel, 17_777), range(0, numel, 8_000)):
                tensor = copy(registered)
                slices = [piece for piece in tensor.tensor_split(list(cuts)) if piece.numel()]
                await asyncio.gather(*(world.all_reduce(piece) for piece in slices))
                if not torch.equal(tensor, whole):
                    different.append((cuts, registered))
            tensor = copy(registered)
            await world.all_reduce(tensor[: numel // 2])
            half = await world.reduce_scatter(tensor[numel // 2 :])
            tensor[numel // 2 :] = await world.all_gather(half)
            if not torch.equal(tensor, whole):
                different.append(("half and half", registered))
        tell(different)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_sum_do_not_depend_on_how_it_is_cut(dtype):
    with Ranks(add_up_in_many_ways, torch_variables(3), (dtype,)) as ranks:
        assert hear_all(ranks) == [[]] * 3


# Wake-ups.


async def call_again_and_again(tell: Tell, num: int) -> None:
    # Who misses a wake-up shall sleep until its call is too late, not just look again.
    counters._LONGEST_SLEEP, counters._longest_sleep = 3600.0, counters._Timespec(3600, 0)
    async with flat_mesh() as mesh:
        tensor, longest, right = torch.ones(8), 0.0, 0
        for number in range(num):
            began = time.monotonic()
            if number % 2:
                await mesh.world.barrier()
            else:
                await mesh.world.all_reduce(tensor.fill_(1))
                right += tensor[0].item() == mesh.world_size
            longest = max(longest, time.monotonic() - began)
        tell((right, longest))


@pytest.mark.slow
def test_no_wake_up_is_lost_where_ranks_share_cores():
    num = 3000
    with Ranks(call_again_and_again, torch_variables(8), (num,)) as ranks:
        heard = hear_all(ranks)
    assert [right for right, _ in heard] == [num // 2] * 8
    assert max(longest for _, longest in heard) < 1.0


# Memory after a failure.


class Gate:
    """Holds this rank's third reduction until it may go on, and counts all of them."""

    def __init__(self) -> None:
        self.reached, self.count = asyncio.Event(), 0
        self._open, self._loop, self._reduce = threading.Event(), asyncio.get_running_loop(), Reducer.__call__
        gate = self

        def count_and_wait(reducer: Reducer, *args: Any) -> None:
            gate.count += 1
            if gate.count == 3:
                gate._loop.call_soon_threadsafe(gate.reached.set)
                assert gate._open.wait(SECONDS)
            gate._reduce(reducer, *args)

        Reducer.__call__ = count_and_wait  # type: ignore[method-assign]

    async def open_until_quiet(self) -> None:
        """Let the reduction go on, and wait until this rank's thread has ended."""
        self._open.set()
        for thread in threading.enumerate():
            if thread.name == "parallel3d-world-collectives":
                await asyncio.to_thread(thread.join, SECONDS)
                assert not thread.is_alive()


def overlap(place: int, other: int, num_bytes: int) -> bool:
    return abs(place - other) < num_bytes


async def give_up_midway(tell: Tell, how: str) -> None:
    """Rank 2 is in the middle of its slice when rank 0 gives up; rank 1 only waits."""
    async with flat_mesh() as mesh:
        numel, token = 30 * PIECE // 4, torch.ones(1)
        gate = Gate() if mesh.rank == 2 else None
        tensor = mesh.world.empty(numel).fill_(1.0)
        place = tensor.data_ptr()
        limit = 0.5 if how == "late" and mesh.rank == 0 else None
        waiting = asyncio.ensure_future(await_work(mesh.world.all_reduce(tensor, timeout=limit)))
        if gate is not None:
            await gate.reached.wait()
            await mesh.dp.send(token, 0)
        elif mesh.rank == 0:
            await mesh.dp.recv(token, 2)
            if how == "cancelled":
                waiting.cancel()
        try:
            await waiting
        except (CommunicationError, asyncio.CancelledError) as error:
            told = type(error), str(error)
        with pytest.raises(GroupClosed):
            mesh.world.barrier()
        await mesh.dp.barrier()  # all have raised
        if gate is not None:
            await gate.open_until_quiet()
            assert gate.count == 3
        await mesh.dp.barrier()  # and rank 2 is quiet
        tensor.fill_(7.0)
        await mesh.dp.barrier()
        unchanged = bool(tensor.eq(7.0).all())
        del tensor, waiting
        new = [mesh.world.empty(numel) for _ in range(3)]
        reused = any(overlap(place, other.data_ptr(), 4 * numel) for other in new)
        sums = await mesh.dp.all_reduce(new[0].fill_(1.0))
        tell((told, unchanged, reused, sums.unique().tolist()))


async def await_work(work: parallel3d.Work) -> torch.Tensor:
    return await work


TERMS = f"all_reduce(sum) of float32 ({30 * PIECE // 4},)"


@pytest.mark.parametrize(
    ("how", "kinds", "text"),
    [
        (
            "cancelled",
            [asyncio.CancelledError, GroupClosed, GroupClosed],
            f"rank 0 (dp=0 tp=0 pp=0) cancelled {TERMS} on group world",
        ),
        (
            "late",
            [DeadlineExceeded] * 3,
            f"{TERMS} on group world did not end within 0.5 s, though every rank has called it.",
        ),
    ],
)
def test_what_is_given_up_midway_closes_the_group_and_its_memory_is_left_alone(how, kinds, text):
    with Ranks(give_up_midway, torch_variables(3), (how,)) as ranks:
        heard = hear_all(ranks)
    assert [told[0] for told, *_ in heard] == kinds
    assert {told[1] for told, *_ in heard if told[0] is not asyncio.CancelledError} == {text}
    assert [rest for _, *rest in heard] == [[True, False, [3.0]]] * 3


# Many elements of the wrong kind.


async def far_apart_values(tell: Tell) -> None:
    async with flat_mesh() as mesh:
        half = mesh.world.empty(50_000, dtype=torch.float16).fill_(60_000.0)
        await mesh.world.all_reduce(half, op="mean")
        nan = torch.full((50_000,), math.nan if mesh.rank == 1 else 1.0)
        await mesh.world.all_reduce(nan, op="max")
        tell((half.unique().tolist(), bool(nan.isnan().all())))


def test_no_mean_overflows_and_no_nan_is_lost():
    with Ranks(far_apart_values, torch_variables(2)) as ranks:
        assert hear_all(ranks) == [([60_000.0], True)] * 2


# Round the cache, between processes.


async def write_round_the_cache(tell: Tell) -> None:
    streamed = []

    def stream(target: torch.Tensor, source: torch.Tensor) -> None:
        streaming.stream(target, source)
        streamed.append(source.nbytes)

    writer.stream = stream
    writer._FAR = writer._STILL_FAR = 0.0  # every reader is far
    writer._TRY_EVERY = 1e-4
    draw, wrong = random.Random(3), 0
    async with flat_mesh() as mesh:
        group, size = mesh.world, mesh.world.size
        for number in range(60):
            numel = draw.randrange(1, 400_000)
            values = [torch.arange(numel, dtype=torch.float32).add_(1000 * rank + number) for rank in range(size)]
            mine = values[mesh.rank].clone()
            await group.all_reduce(mine)
            wrong += not torch.equal(mine, sum(values[1:], values[0]))
            gathered = torch.empty(size * numel)
            await group.all_gather(values[mesh.rank], out=gathered)
            wrong += not torch.equal(gathered, torch.cat(values))
            came = torch.empty(numel)
            received = group.recv(came, (mesh.rank - 1) % size)
            await group.send(values[mesh.rank], (mesh.rank + 1) % size)
            await received
            wrong += not torch.equal(came, values[mesh.rank - 1])
    tell((wrong, sum(streamed) > 20 << 20))


@pytest.mark.parametrize("size", [2, 3])
def test_what_goes_round_the_cache_is_there_when_peers_are_told(size):
    with Ranks(write_round_the_cache, torch_variables(size)) as ranks:
        assert hear_all(ranks) == [(0, streaming.CAN_STREAM)] * size
