"""What users are told when ranks of one host don't share memory, or a buffer finds none."""

from __future__ import annotations

import resource
import warnings
from typing import Any

import pytest
import torch

from process_groups import arena as arenas
from process_groups.arena import Arena
from process_groups.group import Group
from process_groups.shared_memory import sharing
from process_groups.shared_memory.sharing import RegisteredMemory, SharedMemoryWarning, warn_if_not_shared
from runtime.errors import Coords

PROBLEM = (
    "24.0 GiB of addresses are needed, but this process may have 1 GiB of file size (ulimit -f). Raise that limit."
)


def greeting(rank: int, host: str = "here", problem: str | None = None) -> dict[str, Any]:
    return {"host": host, "arena_problem": problem, "segment": f"{100 + rank}/3/00"}


def all_but(size: int, *apart: tuple[int, int]) -> list[list[bool]]:
    return [[(a, b) not in apart for b in range(size)] for a in range(size)]


def told(greetings: list[dict[str, Any]], shares: list[list[bool]]) -> dict[int, str]:
    """What each rank warns of."""
    found = {}
    for rank in range(len(greetings)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_if_not_shared(rank, greetings, shares)
        if caught:
            (warning,) = caught
            assert warning.category is SharedMemoryWarning
            found[rank] = str(warning.message)
    return found


def test_ranks_that_share_are_not_warned():
    assert told([greeting(rank) for rank in range(3)], all_but(3)) == {}


def test_ranks_of_different_hosts_are_not_warned():
    greetings = [greeting(rank, host="ab"[rank]) for rank in range(2)]
    assert told(greetings, all_but(2, (0, 1), (1, 0))) == {}


def test_a_rank_without_memory_is_told_once_with_numbers_and_remedy():
    greetings = [greeting(0), greeting(1), greeting(2, problem=PROBLEM)]
    shares = all_but(3, (0, 2), (1, 2), (2, 0), (2, 1), (2, 2))
    assert told(greetings, shares) == {
        0: f"ranks 0, 1, 2 on here use gloo, which is slower than shared memory: {PROBLEM}"
    }


def test_ranks_that_cannot_map_each_other():
    greetings = [greeting(0, host="there"), greeting(1), greeting(2)]
    assert told(greetings, all_but(3, (0, 1), (0, 2), (1, 0), (2, 0), (2, 1))) == {
        1: "ranks 1, 2 on here use gloo, which is slower than shared memory: rank 2 can't map the memory of rank 1, "
        "process 101. Start them as one user in one container (or with a shared pid namespace: --pid=host); if they "
        "are on different hosts that have one name, give each its own PARALLEL3D_HOST."
    }


def test_ranks_that_have_too_few_addresses_to_map_each_other(monkeypatch):
    gib = 1 << 30
    monkeypatch.setattr(arenas, "_virtual_size", lambda num_ranks: 24 * gib)
    limits = {resource.RLIMIT_AS: (40 * gib, -1), resource.RLIMIT_FSIZE: (gib, -1)}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    assert told([greeting(0), greeting(1)], all_but(2, (0, 1))) == {
        0: "ranks 0, 1 on here use gloo, which is slower than shared memory: 48.0 GiB of addresses are needed, but "
        "this process may have 40 GiB of addresses (ulimit -v). Raise that limit."
    }
    limits[resource.RLIMIT_AS] = (50 * gib, -1)
    assert "Start them as one user in one container" in told([greeting(0), greeting(1)], all_but(2, (0, 1)))[0]


def test_many_ranks_are_not_all_listed():
    shares = [[False] * 12] * 12
    text = told([greeting(rank, problem=PROBLEM) for rank in range(12)], shares)[0]
    assert text.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7, … on here use gloo")


@pytest.fixture
def groups(monkeypatch):
    """Two groups of one mesh, for which there is 1 MiB left."""
    for module in (arenas, sharing):
        monkeypatch.setattr(module, "available_memory", lambda: 1 << 20)
    arena = Arena(4096, 2)
    memory = RegisteredMemory(arena)
    options = {"coords_of": lambda rank: Coords(rank, 0, 0), "timeout": 1.0, "device": torch.device("cpu")}
    yield [Group(name, (0,), 0, None, allocate=memory.empty, **options) for name in ("world", "dp")], arena
    arena.close()


def test_a_buffer_that_finds_no_memory_is_warned_of_once_a_mesh(groups):
    (world, dp), arena = groups
    with pytest.warns(SharedMemoryWarning) as caught:
        first, second = world.empty(3, 1 << 18), dp.empty((3, 1 << 18), dtype=torch.float64)
    assert [(str(warning.message), warning.filename) for warning in caught] == [
        (
            "a buffer of 3.0 MiB is not registered, so it is copied through shared memory at every call: 1.0 MiB are "
            "available here. Give the ranks more memory (a container's --memory), or free other buffers.",
            __file__,
        )
    ]
    for tensor, dtype in ((first, torch.float32), (second, torch.float64)):
        assert (tensor.shape, tensor.dtype, arena.offset_of(tensor)) == ((3, 1 << 18), dtype, None)


def test_a_buffer_that_finds_memory_is_registered(groups):
    (world, _), arena = groups
    assert arena.offset_of(world.empty(5)) is not None
    assert arena.offset_of(world.empty((1 << 18,))) is not None
