"""What shared memory costs: memory, processor time while waiting, nothing left behind; and what is said without it."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import parallel3d
from parallel3d import LaunchError
from process_groups import arena as arenas
from process_groups.arena import Arena, ArenaUnavailable
from process_groups.shared_memory import sharing
from process_groups.shared_memory.sharing import SharedMemoryWarning
from tests.support.processes import abandoned_memory
from tests.support.ranks import Rank, Ranks, Tell, torch_variables

MIB = 1 << 20
STRATEGIES = ("default", "ring", "tree", "hierarchical", "adaptive")


@pytest.fixture(autouse=True)
def nothing_stays_in_shared_memory():
    before = abandoned_memory()
    yield
    assert abandoned_memory() <= before


def hear_all(ranks: Ranks) -> list:
    heard = [rank.hear() for rank in ranks]
    assert [rank.finish() for rank in ranks] == [0] * len(ranks)
    return heard


def memory() -> int:
    """Bytes of this process that are no file's, of shared ones its share.

    Files count apart: which share of torch's own is ours depends on who else uses them at the moment.
    """
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sizes = {name: int(size) * 1024 for name, size, *_ in lines}
    return sizes["Anonymous:"] + sizes["Pss_Shmem:"]


def num_mapped() -> int:
    """Of arenas and boards; machine code stays as long as the process."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count("parallel3d") - maps.count("parallel3d-copy-lines")


# Memory.


async def use_every_call(tell: Tell) -> None:
    async with parallel3d.mesh(dp=2, tp=2) as mesh:
        for group in (mesh.world, mesh.dp, mesh.tp):  # what torch loads when first used does not count
            await group.all_reduce(torch.ones(10), strategy="ring")
        gc.collect()
        before, in_shm = memory(), set(os.listdir("/dev/shm"))
        registered = 0
        buffers = []
        for num_bytes in (1000, 100_000, 3 * MIB, 12 * MIB):
            source, target = mesh.world.empty(num_bytes // 4).zero_(), mesh.world.empty(num_bytes // 4 * 4).zero_()
            buffers += [source, target]
            registered += source.nbytes + target.nbytes
            for group in (mesh.world, mesh.dp, mesh.tp):
                part = source[: source.numel() // group.size * group.size]
                for strategy in STRATEGIES:
                    await group.all_reduce(source, strategy=strategy)
                await group.all_gather(source, out=target[: source.numel() * group.size])
                await group.reduce_scatter(part, out=target[: part.numel() // group.size])
                await group.all_to_all(part, out=target[: part.numel()])
                await group.broadcast(source)
                right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
                await asyncio.gather(group.send(source, right), group.recv(target[: source.numel()], left))
        await mesh.world.barrier()
        tell((memory() - before - registered, set(os.listdir("/dev/shm")) - in_shm))
        await mesh.world.barrier()


@pytest.mark.slow
def test_memory_stays_within_what_is_registered():
    with Ranks(use_every_call, torch_variables(4)) as ranks:
        heard = hear_all(ranks)
    assert max(more for more, _ in heard) < 32 * MIB
    assert [files for _, files in heard if any("parallel3d" in file for file in files)] == []


async def make_many_buffers(tell: Tell) -> None:
    async with parallel3d.mesh(dp=2) as mesh:

        async def use(num: int) -> None:
            for number in range(num):
                numel = (100, 10_000, 300_000, 2 * MIB)[number % 4] + number
                buffers = [mesh.world.empty(numel).fill_(1.0) for _ in range(2)]
                for buffer in buffers:
                    await mesh.world.all_reduce(buffer)
                assert buffers[0][-1] == 2

        await use(16)
        before = memory()
        await use(80)
        tell(memory() - before)


def test_buffers_that_come_and_go_leave_no_memory_in_use():
    with Ranks(make_many_buffers, torch_variables(2)) as ranks:
        assert max(hear_all(ranks)) < 8 * MIB


async def make_many_meshes(tell: Tell) -> None:
    async def use() -> None:
        async with parallel3d.mesh(dp=2) as mesh:
            tensor = mesh.world.empty(4 * MIB).fill_(1.0)
            await mesh.world.all_reduce(tensor)
            await mesh.world.all_reduce(torch.ones(MIB), strategy="ring")

    await use()
    before, files = memory(), len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        await use()
        gc.collect()
    tell((memory() - before, len(os.listdir("/proc/self/fd")) - files, num_mapped()))


def test_meshes_that_come_and_go_leave_neither_memory_nor_files():
    with Ranks(make_many_meshes, torch_variables(2)) as ranks:
        for grown, files, mapped in hear_all(ranks):
            assert grown < 8 * MIB
            assert files <= 0
            assert mapped == 0


async def fork_and_collect(tell: Tell) -> None:
    arena = Arena(4096, 2)
    tensor = arena.empty((MIB,), torch.float32).fill_(3)
    child = os.fork()
    if child == 0:
        del tensor  # its last view in this process
        os._exit(0)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    tell((status, tensor.unique().tolist(), arena.num_bytes_used))


def test_a_forked_child_frees_nothing():
    """A data loader's worker, for example, has the same memory, and drops what it does not need."""
    with alone(fork_and_collect) as rank:
        assert rank.hear() == (0, [3.0], 4 * MIB)


@contextmanager
def alone(main, *args):
    rank = Rank(main, args, {})
    try:
        yield rank
        assert rank.finish() == 0
    finally:
        rank.close()


# Waiting.


async def wait_for_a_late_one(tell: Tell) -> None:
    async with parallel3d.mesh(dp=8) as mesh:
        world, small, large = mesh.world, mesh.world.empty(8).zero_(), mesh.world.empty(MIB).zero_()
        found = []
        for call in (world.barrier, lambda: world.all_reduce(small), lambda: world.all_reduce(large)):
            await call()
            await mesh.dp.barrier()
            if mesh.rank == 5:
                await asyncio.sleep(1.0)
            before, began = time.process_time(), time.monotonic()
            await call()
            found.append((time.process_time() - before, time.monotonic() - began))
        tell(found)


@pytest.mark.slow
def test_waiting_costs_no_processor_time():
    with Ranks(wait_for_a_late_one, torch_variables(8)) as ranks:
        heard = [found for rank, found in enumerate(hear_all(ranks)) if rank != 5]
    assert all(used < 0.2 for found in heard for used, _ in found), heard
    assert all(seconds > 0.5 for found in heard for _, seconds in found), "they have waited"


# Without shared memory.


@contextmanager
def told():
    """What the user is warned of meanwhile, in whatever thread."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(warning.message) for warning in caught if warning.category is SharedMemoryWarning]


async def compute_without(tell: Tell, limited: tuple[int, ...], number: int, limit: int) -> None:
    if int(os.environ["RANK"]) in limited:
        resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
    with told() as texts:
        async with parallel3d.mesh(dp=3) as mesh:
            found = []
            for strategy in STRATEGIES:
                tensor = mesh.world.empty(50_001).fill_(mesh.rank + 1.0)
                await mesh.world.all_reduce(tensor, strategy=strategy)
                found += tensor.unique().tolist()
            gathered = await mesh.world.all_gather(torch.tensor([mesh.rank]))
            message = mesh.world.empty(200_000).fill_(mesh.rank)
            answer = torch.empty(200_000)
            await asyncio.gather(
                mesh.world.send(message, (mesh.rank + 1) % 3), mesh.world.recv(answer, (mesh.rank - 1) % 3)
            )
            found += [*gathered.tolist(), *answer.unique().tolist()]
            name = mesh.world.transport_name
    tell((name, found, texts))


NEED = f"{arenas._virtual_size(3) / (1 << 30):.1f} GiB of addresses are needed"
LIMITS = {
    "file size": (resource.RLIMIT_FSIZE, 64 * MIB, "0.0625 GiB of file size (ulimit -f)"),
    "addresses": (resource.RLIMIT_AS, 12 << 30, "12 GiB of addresses (ulimit -v)"),
}


@pytest.mark.parametrize(("which", "limited"), [("file size", (0, 1, 2)), ("file size", (2,)), ("addresses", (1,))])
def test_ranks_that_cannot_share_memory_are_told_once_and_use_gloo(which, limited):
    number, limit, what = LIMITS[which]
    with Ranks(compute_without, torch_variables(3), (limited, number, limit)) as ranks:
        heard = hear_all(ranks)
    assert [name for name, _, _ in heard] == ["gloo"] * 3
    sums = [6.0] * len(STRATEGIES)
    assert [found for _, found, _ in heard] == [[*sums, 0, 1, 2, float((rank - 1) % 3)] for rank in range(3)]
    (text,) = [text for _, _, texts in heard for text in texts]
    assert text.startswith("ranks 0, 1, 2 on ")
    assert text.endswith(
        f" use gloo, which is slower than shared memory: {NEED}, but this process may have {what}. Raise that limit."
    )


async def form_within(tell: Tell, number: int, limit: int) -> None:
    resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
    async with parallel3d.mesh(dp=2):
        tell("formed")


def test_a_rank_that_can_make_no_memory_at_all_says_what_would_help():
    with Ranks(form_within, torch_variables(2)[:1], (resource.RLIMIT_FSIZE, MIB)) as ranks:
        with pytest.raises(LaunchError) as caught:
            ranks[0].hear()
        assert ranks[0].finish() == 1
    assert str(caught.value) == (
        "start-up: rank 0 can't make the shared memory in which ranks compare their calls: [Errno 27] File too large. "
        "Raise its limits, of file size (ulimit -f) above all."
    )


async def try_with_limit(tell: Tell, number: int, limit: int) -> None:
    resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
    before = len(os.listdir("/proc/self/fd"))
    try:
        Arena(4096, 3)
    except ArenaUnavailable as unavailable:
        tell((str(unavailable), len(os.listdir("/proc/self/fd")) - before))


@pytest.mark.parametrize("which", LIMITS)
def test_a_limit_of_the_process_is_named_and_kills_nobody(which):
    number, limit, what = LIMITS[which]
    with alone(try_with_limit, number, limit) as rank:
        assert rank.hear() == (f"{NEED}, but this process may have {what}. Raise that limit.", 0)


async def ask_for_too_much(tell: Tell) -> None:
    with told() as texts:
        async with parallel3d.mesh(dp=2) as mesh:
            if mesh.rank == 1:  # only there
                arenas.available_memory = sharing.available_memory = lambda: 2 * MIB
            found = []
            for group in (mesh.world, mesh.dp):
                for _ in range(2):
                    tensor = group.empty(MIB).fill_(mesh.rank + 1.0)
                    await group.all_reduce(tensor)
                    found += tensor.unique().tolist()
    tell((found, texts))


def test_a_buffer_without_memory_works_and_is_warned_of_once():
    with Ranks(ask_for_too_much, torch_variables(2)) as ranks:
        heard = hear_all(ranks)
    assert [found for found, _ in heard] == [[3.0] * 4] * 2
    assert [texts for _, texts in heard] == [
        [],
        [
            "a buffer of 4.0 MiB is not registered, so it is copied through shared memory at every call: 2.0 MiB are "
            "available here. Give the ranks more memory (a container's --memory), or free other buffers."
        ],
    ]
