"""Registered memory: where buffers lie, when they are freed, what peers see, and why there may be none."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from process_groups import arena as arenas
from process_groups.arena import Arena, ArenaUnavailable, Mapping, open_peer
from tests.support.processes import SECONDS

RESERVED = 5000  # bytes: buffers begin on the page after it
FIRST = 8192
MIB = 1 << 20


@pytest.fixture
def arena():
    made = Arena(RESERVED, num_ranks=4)
    yield made
    made.close()


def place(arena: Mapping, tensor: torch.Tensor) -> int:
    offset = arena.offset_of(tensor)
    assert offset is not None
    return offset


def memory_used(arena: Arena) -> int:
    """Bytes of pages that the file has."""
    return os.stat(f"/proc/self/fd/{arena._fd}").st_blocks * 512


def floats(arena: Arena, *shape: int) -> torch.Tensor:
    tensor = arena.empty(shape, torch.float32)
    assert tensor is not None
    return tensor


def test_a_large_buffer_gives_its_pages_back_wherever_it_lies(arena):
    small = floats(arena, 3)
    used = memory_used(arena)
    large = floats(arena, 1 << 20).fill_(1.0)
    assert memory_used(arena) >= used + large.nbytes
    del large
    assert memory_used(arena) <= used + 4096
    del small


def test_a_size_that_is_no_integer_spoils_nothing(arena):
    with pytest.raises(TypeError):
        arena.empty((2, 2.5), torch.float32)
    assert floats(arena, 2, 2).shape == (2, 2)


def test_buffers_share_neither_bytes_nor_cache_lines(arena):
    sizes = (1, 16, 17, 1023, 1024, 1025, 3)  # floats
    tensors = [floats(arena, size) for size in sizes]
    places = [place(arena, tensor) for tensor in tensors]
    pages = [FIRST + 4096, FIRST + 2 * 4096, FIRST + 3 * 4096]  # buffers of a page and more begin with one
    assert places == [FIRST, FIRST + 64, FIRST + 128, *pages, FIRST + 256]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in tensors] == [[float(number)] for number in range(len(sizes))]
    assert arena.num_bytes_used == 64 + 64 + 128 + 4096 + 4096 + 8192 + 64


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), [2, 1, 3], torch.Size((4, 5))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_shapes_and_dtypes(arena, shape, dtype):
    tensor = arena.empty(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (tuple(shape), dtype, True)
    assert tensor.data_ptr() % 64 == 0
    assert place(arena, tensor) == FIRST


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, -0)])
def test_nothing_takes_no_memory(arena, shape):
    tensor = arena.empty(shape, torch.float32)
    assert tensor.shape == shape
    assert arena.num_bytes_used == 0


@pytest.mark.parametrize("shape", [(-1,), (-5000,), (-1, -5), (3, -5000)])
def test_negative_sizes_are_refused_as_torch_does(arena, shape):
    with pytest.raises(RuntimeError, match="negative dimension"):
        arena.empty(shape, torch.float32)
    assert arena.num_bytes_used == 0
    assert place(arena, floats(arena, 1)) == FIRST


def test_a_buffer_lives_as_long_as_a_view_of_it(arena):
    tensor = floats(arena, 10, 10)
    view = tensor[3:, 2].detach()
    del tensor
    assert arena.num_bytes_used == 448
    assert place(arena, floats(arena, 1)) == FIRST + 448
    assert arena.offset_of(view) == FIRST + 4 * 32
    del view
    assert arena.num_bytes_used == 0
    assert place(arena, floats(arena, 1)) == FIRST


def test_a_buffer_lives_as_long_as_autograd_needs_it(arena):
    saved, weight = floats(arena, 3).fill_(2), torch.ones(3, requires_grad=True)
    loss = (weight * saved).sum()
    del saved
    assert arena.num_bytes_used == 64
    loss.backward()
    assert weight.grad.tolist() == [2, 2, 2]
    del loss
    assert arena.num_bytes_used == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_neighbours_become_one(arena, order):
    tensors = {number: floats(arena, 4096) for number in range(3)}
    fence = floats(arena, 1)
    for number in order:
        del tensors[number]
    whole = floats(arena, 3 * 4096)
    assert place(arena, whole) == FIRST
    assert place(arena, fence) == FIRST + 3 * 16384


def test_the_first_hole_that_is_large_enough_is_used(arena):
    tensors = [floats(arena, 1024 * number) for number in (1, 1, 4, 1)]
    places = [place(arena, tensor) for tensor in tensors]
    tensors[0] = tensors[2] = None
    assert place(arena, floats(arena, 2048)) == places[2]
    small = floats(arena, 1024)
    assert place(arena, small) == places[0]


def test_large_buffers_give_their_pages_back(arena):
    before = memory_used(arena)
    large, small = floats(arena, 4 * MIB), floats(arena, 1024)
    large.fill_(1)
    small.fill_(2)
    assert memory_used(arena) - before >= 16 * MIB
    del large
    assert memory_used(arena) - before <= 8192
    assert small.unique().tolist() == [2]
    assert floats(arena, 4 * MIB).count_nonzero() == 0, "new pages are empty"


def test_pages_are_given_back_after_closing_too(arena):
    large = floats(arena, 4 * MIB).fill_(1)
    watch = os.dup(arena._fd)
    arena.close()
    arena.close()
    del large
    assert os.fstat(watch).st_blocks * 512 < MIB
    os.close(watch)


def test_many_buffers_come_and_go_without_growth(arena):
    floats(arena, MIB).fill_(1)
    for size in range(1, 200):
        tensors = [floats(arena, size * 1000).fill_(1) for _ in range(3)]
        del tensors
    assert arena.num_bytes_used == 0
    assert arena._free == [(FIRST, arena.size)]
    assert memory_used(arena) <= 4 * MIB, "blocks below a MiB keep their pages"


def test_a_buffer_may_be_collected_at_any_moment(arena):
    """Also in a thread that is just handing out another."""
    cycle = [floats(arena, 10)]
    cycle.append(cycle)
    del cycle

    def collect():
        with arena._lock:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert place(arena, floats(arena, 10)) == FIRST


def test_threads_get_buffers_of_their_own(arena):
    wrong = []

    def use(number: int) -> None:
        for size in range(1, 150):
            tensor = floats(arena, size * 10).fill_(number)
            if tensor.ne(number).any():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert wrong == []
    floats(arena, 1)
    assert arena.num_bytes_used == 0


# Peers.


def test_a_peer_sees_what_is_written_and_writes_itself(arena):
    peer = open_peer(arena.address_for_peers)
    tensor = floats(arena, 100)
    tensor.copy_(torch.arange(100))
    theirs = peer.tensor(place(arena, tensor), 100, torch.float32)
    assert theirs.data_ptr() != tensor.data_ptr()
    assert torch.equal(theirs, torch.arange(100.0))
    theirs[7] = -1
    assert tensor[7] == -1
    assert (peer.offset_of(tensor), peer.offset_of(theirs)) == (None, place(arena, tensor))


def test_tensors_elsewhere_have_no_place(arena):
    assert arena.offset_of(torch.ones(1000)) is None
    other = Arena(0, 2)
    assert arena.offset_of(floats(other, 3)) is None
    other.close()


def test_another_file_is_no_arena(arena, tmp_path):
    pid, fd, nonce = arena.address_for_peers.split("/")
    assert open_peer(f"{pid}/{fd}/{'0' * len(nonce)}") is None
    assert open_peer(f"{pid}/9999/{nonce}") is None
    assert open_peer(f"{2**22 + 1}/{fd}/{nonce}") is None
    read_end, write_end = os.pipe()  # reading it would wait
    assert open_peer(f"{pid}/{read_end}/{nonce}") is None
    empty = os.open(tmp_path, os.O_RDONLY)  # a folder
    assert open_peer(f"{pid}/{empty}/{nonce}") is None
    for number in (read_end, write_end, empty):
        os.close(number)


def test_a_peer_of_a_closed_arena_finds_nothing_but_keeps_what_it_has(arena):
    early = open_peer(arena.address_for_peers)
    tensor = floats(arena, 3).fill_(5)
    arena.close()
    assert open_peer(arena.address_for_peers) is None
    assert early.tensor(place(arena, tensor), 3, torch.float32).tolist() == [5, 5, 5]


def test_looking_for_peers_leaves_no_file_open(arena):
    before = len(os.listdir("/proc/self/fd"))
    address, nonce = arena.address_for_peers.rsplit("/", 1)
    for _ in range(3):
        assert open_peer(f"{address}/{'0' * len(nonce)}") is None
    assert len(os.listdir("/proc/self/fd")) == before


# Too little memory.


def test_too_little_memory_is_no_error(arena, monkeypatch):
    monkeypatch.setattr(arenas, "available_memory", lambda: 8 * MIB - 1)
    assert arena.empty((2 * MIB,), torch.float32) is None
    assert arena.empty((2 * MIB - 1024,), torch.float32) is not None
    monkeypatch.setattr(arenas, "available_memory", lambda: 0)
    assert arena.empty((1000,), torch.float32) is not None, "a small one is not worth a look"


def test_what_is_larger_than_the_arena_finds_no_memory(arena, monkeypatch):
    monkeypatch.setattr(arenas, "available_memory", lambda: 1 << 62)
    assert arena.empty((arena.size,), torch.uint8) is None
    assert arena.num_bytes_used == 0


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000\n", "memory.current": "300\n", "memory.stat": "anon 200\ninactive_file 50\n"}, [750]),
        ({"memory.max": "max\n", "memory.current": "300\n", "memory.stat": "inactive_file 50\n"}, []),
        ({"memory.max": "100\n", "memory.current": "300\n", "memory.stat": "inactive_file 0\n"}, [0]),
        ({"memory.max": "100\n", "memory.current": "30\n", "memory.stat": ""}, []),
        (
            {
                "memory/memory.limit_in_bytes": "900",
                "memory/memory.usage_in_bytes": "100",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n",
            },
            [820],
        ),
        ({}, []),
    ],
)
def test_what_a_control_group_leaves(tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert arenas._group_available(str(tmp_path))[1:] == left


def test_available_memory_is_the_least_of_all(monkeypatch):
    monkeypatch.setattr(arenas, "_system_available", lambda: 500)
    for found, least in (([1000], 500), ([1000, 300], 300)):
        monkeypatch.setattr(arenas, "_group_available", lambda found=found: found)
        assert arenas.available_memory() == least


def test_the_system_tells_what_is_available():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < arenas.available_memory() <= total


@pytest.mark.parametrize(("num_ranks", "size"), [(2, None), (1 << 20, 16 << 20)])
def test_every_rank_can_map_every_others(num_ranks, size):
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert arenas._virtual_size(num_ranks) == (memory if size is None else size)


# No shared memory at all.


def test_what_the_system_says_is_passed_on(monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arenas.mmap, "mmap", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ArenaUnavailable) as caught:
        Arena(RESERVED, 2)
    assert str(caught.value).endswith(
        " GiB of addresses are needed, and the system says: [Errno 12] Cannot allocate memory."
    )
    assert len(os.listdir("/proc/self/fd")) == before
