"""All-reduce strategies on NCCL, on a recorded fake: which communicators are opened how, and what is called on them."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from process_groups.call import Call, Place
from process_groups.shared_memory.board import Page
from process_groups.shared_memory.ledger import Member
from process_groups.torch_backend import nccl_strategies
from process_groups.torch_backend.backends import OpenBackend, beside_current_stream, nccl_algorithm
from process_groups.torch_backend.nccl_strategies import NcclStrategies
from process_groups.torch_backend.transport import TorchTransport
from runtime.errors import Coords, DeadlineExceeded, GroupClosed
from runtime.threads import DaemonThreads

CPU = torch.device("cpu")
TIMEOUT = 5.0


def environment() -> str | None:
    """NCCL_ALGO as a C library sees it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(b"NCCL_ALGO")
    return None if value is None else value.decode()


@pytest.fixture(autouse=True)
def _nccl(monkeypatch):
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    yield
    assert environment() == os.environ.get("NCCL_ALGO"), "a test left it changed"


class FakeNccl:
    """What happens on this rank's communicators, in order and as text. Calls do nothing."""

    def __init__(self) -> None:
        self.events = []
        self.backends = {}
        self.cut = []
        self.trouble = {}
        """What goes wrong, by event's beginning."""

    def note(self, event: str) -> None:
        self.events.append(event)
        for beginning, do in self.trouble.items():
            if event.startswith(beginning):
                do()

    def open(self, kind, store, rank, size, *, loopback, timeout) -> OpenBackend:
        assert (kind, loopback, timeout) == ("nccl", None, TIMEOUT)
        name = name_of(store)
        self.note(f"open {name}: rank {rank} of {size}, NCCL_ALGO={environment()}")
        self.backends[name] = self.backend(name, rank, size)
        return OpenBackend(self.backends[name], lambda: self.cut.append(name))

    def backend(self, name, rank, size):
        return FakeBackend(self, name)

    def taken(self) -> list[str]:
        """The events since last asked."""
        events, self.events = self.events, []
        return events


def name_of(store) -> str:
    """The prefix of a store, found by writing something through it."""
    store.set("probe", "")
    probes = [key for key in store._underlying_non_prefix_store.list_keys() if key.endswith("/probe")]
    (name,) = (probe.removesuffix("/probe") for probe in probes)
    store.delete_key("probe")
    return name


class FakeBackend:
    """A communicator: its first call makes it, with the environment of that moment."""

    def __init__(self, nccl: FakeNccl, name: str) -> None:
        self.nccl, self.name, self.is_made = nccl, name, False

    def made_by(self, call: str) -> str:
        if self.is_made:
            return f"{self.name} {call}"
        self.is_made = True
        return f"{self.name} {call}, NCCL_ALGO={environment()}"

    def work(self, call: str):
        self.nccl.note(self.made_by(call))

        def wait(timeout=None):
            how = "the stream waits" if timeout is None else f"waits at most {timeout.total_seconds():g} s"
            self.nccl.note(f"{self.name} {how}")

        return SimpleNamespace(wait=wait, of=self.name)

    def allreduce(self, tensors, options):
        (tensor,) = tensors
        return self.work(f"allreduce({op_of(options)}) of {tensor.numel()}")

    def _reduce_scatter_base(self, output, source, options):
        return self.work(f"reduce_scatter({op_of(options)}) of {source.numel()} to {output.numel()}")

    def _allgather_base(self, output, source, options):
        return self.work(f"allgather of {source.numel()} to {output.numel()} bytes")

    def send(self, tensors, peer, tag):
        (tensor,) = tensors
        return self.work(f"send of {tensor.numel()} bytes, peer {peer}")

    def recv(self, tensors, peer, tag):
        (tensor,) = tensors
        return self.work(f"recv of {tensor.numel()} bytes, peer {peer}")

    def broadcast(self, tensors, options):
        (tensor,) = tensors
        return self.work(f"broadcast of {tensor.numel()} bytes from {options.rootRank}")


def op_of(options) -> str:
    names = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg", dist.ReduceOp.MIN: "min", dist.ReduceOp.MAX: "max"}
    return next(name for op, name in names.items() if options.reduceOp == op)


def group(nccl: FakeNccl, rank: int, hosts: list[int], device=CPU) -> NcclStrategies:
    own = nccl.backend("own", rank, len(hosts))
    own.is_made = True
    return NcclStrategies(dist.HashStore(), rank, len(hosts), hosts, device, own, TIMEOUT, nccl.open)


def all_reduce(numel: int = 8, op: str = "sum") -> Call:
    tensor = torch.ones(numel)
    return Call("all_reduce", tensor, tensor, op=op, timeout=3.0)


# Which communicator, made how.


def test_default_is_the_groups_own_communicator():
    nccl = FakeNccl()
    work = group(nccl, 1, [0, 0, 1, 1]).issue(all_reduce(op="mean"), "default")
    assert nccl.events == ["own allreduce(avg) of 8"]
    assert work.of == "own"


@pytest.mark.parametrize("strategy", ["ring", "tree"])
def test_ring_and_tree_have_a_communicator_that_is_made_once_with_nccl_algo(strategy):
    nccl = FakeNccl()
    strategies = group(nccl, 1, [0, 0, 1, 1])
    work = strategies.issue(all_reduce(op="mean"), strategy)
    assert nccl.taken() == [
        f"open {strategy}: rank 1 of 4, NCCL_ALGO=allreduce:{strategy}",
        f"{strategy} allreduce(sum) of 1, NCCL_ALGO=allreduce:{strategy}",
        f"{strategy} waits at most 5 s",
        f"{strategy} allreduce(avg) of 8",
    ]
    assert work.of == strategy
    assert environment() is None
    strategies.issue(all_reduce(3, op="max"), strategy)
    assert nccl.taken() == [f"{strategy} allreduce(max) of 3"]


def test_ring_and_tree_are_two_communicators():
    nccl = FakeNccl()
    strategies = group(nccl, 0, [0, 0])
    strategies.issue(all_reduce(), "ring")
    strategies.issue(all_reduce(), "tree")
    strategies.issue(all_reduce(), "ring")
    assert [event for event in nccl.events if "of 8" in event] == [
        "ring allreduce(sum) of 8",
        "tree allreduce(sum) of 8",
        "ring allreduce(sum) of 8",
    ]


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier", "send", "recv"])
def test_other_kinds_are_refused(kind):
    nccl = FakeNccl()
    strategies = group(nccl, 0, [0, 0])
    for strategy in ("ring", "tree", "hierarchical", "default"):
        with pytest.raises(AssertionError, match=f"{kind} on a communicator for all-reduces"):
            strategies.issue(Call(kind, torch.ones(2), torch.ones(2), op="sum", peer=0), strategy)
    assert nccl.events == []


@pytest.mark.parametrize(
    ("version", "value"), [((2, 21, 5), "tree"), ((2, 23, 4), "tree"), ((2, 24, 3), "allreduce:tree")]
)
def test_an_older_nccl_knows_no_function_names(monkeypatch, version, value):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert nccl_algorithm("tree") == value


def test_the_groups_own_communicator_is_made_with_the_users_settings(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "^NVLS")
    nccl = FakeNccl()
    strategies = NcclStrategies(
        dist.HashStore(), 0, 2, [0, 0], CPU, FakeBackend(nccl, "own"), TIMEOUT, open_backend=nccl.open
    )
    strategies.connect()
    assert nccl.events == ["own allreduce(sum) of 1, NCCL_ALGO=^NVLS", "own waits at most 5 s"]


# The environment.


def test_a_users_own_setting_comes_back(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring,Tree")
    nccl = FakeNccl()
    group(nccl, 0, [0, 0]).issue(all_reduce(), "tree")
    assert nccl.events[0] == "open tree: rank 0 of 2, NCCL_ALGO=allreduce:tree"
    assert environment() == "Ring,Tree"


def test_what_a_c_library_has_set_comes_back():
    """torch's constructor sets it so in deterministic mode, and os.environ never hears of it."""
    os.putenv("NCCL_ALGO", "^NVLS")
    try:
        group(FakeNccl(), 0, [0, 0]).issue(all_reduce(), "ring")
        assert environment() == "^NVLS"
        assert "NCCL_ALGO" not in os.environ
    finally:
        os.unsetenv("NCCL_ALGO")


@pytest.mark.parametrize("users", [None, "Ring,Tree"])
@pytest.mark.parametrize("where", ["open ring", "ring allreduce", "ring waits"])
def test_it_comes_back_after_an_error_too(monkeypatch, users, where):
    if users is not None:
        monkeypatch.setenv("NCCL_ALGO", users)

    def fail():
        raise RuntimeError("unhandled system error")

    nccl = FakeNccl()
    nccl.trouble[where] = fail
    strategies = group(nccl, 0, [0, 0])
    with pytest.raises(RuntimeError, match="unhandled system error"):
        strategies.issue(all_reduce(), "ring")
    assert environment() == users
    group(FakeNccl(), 0, [0, 0]).issue(all_reduce(), "ring")  # the lock is free again


class AnnouncedLock:
    """Says when somebody finds it taken."""

    def __init__(self) -> None:
        self.lock, self.is_wanted = threading.Lock(), threading.Event()

    def acquire(self, timeout: float) -> bool:
        if self.lock.acquire(blocking=False):
            return True
        self.is_wanted.set()
        return self.lock.acquire(timeout=timeout)

    def release(self) -> None:
        self.lock.release()


@pytest.mark.parametrize("second", ["tree", "hierarchical", "connect"])
def test_two_groups_that_make_communicators_at_once_do_not_see_each_others_setting(monkeypatch, second):
    """While the first opens its ring, the second begins: it must wait, and not find NCCL_ALGO set."""
    monkeypatch.setattr(nccl_strategies, "_MAKING", lock := AnnouncedLock())
    first_is_open = threading.Event()
    ring, other = FakeNccl(), FakeNccl()

    def let_the_other_try():
        first_is_open.set()
        assert lock.is_wanted.wait(TIMEOUT)
        assert other.events == []

    def make_the_other():
        assert first_is_open.wait(TIMEOUT)
        if second == "connect":
            own = FakeBackend(other, "own")
            NcclStrategies(dist.HashStore(), 0, 2, [0, 0], CPU, own, TIMEOUT, other.open).connect()
        else:
            group(other, 0, [0, 0, 1, 1]).issue(all_reduce(), second)

    ring.trouble["open ring"] = let_the_other_try
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(make_the_other)
        group(ring, 0, [0, 0]).issue(all_reduce(), "ring")
        made.result(TIMEOUT)
    assert settings(ring) == ["allreduce:ring"] * 2
    assert (
        settings(other)
        == {
            "tree": ["allreduce:tree"] * 2,
            "hierarchical": ["None"] * 4,
            "connect": ["None"],
        }[second]
    )


def settings(nccl: FakeNccl) -> list[str]:
    return [event.partition("NCCL_ALGO=")[2] for event in nccl.events if "NCCL_ALGO=" in event]


def test_waiting_for_another_groups_communicator_has_a_limit(monkeypatch):
    nccl = FakeNccl()
    monkeypatch.setattr(nccl_strategies, "_MAKING", held := threading.Lock())
    held.acquire()
    strategies = NcclStrategies(dist.HashStore(), 0, 2, [0, 0], CPU, FakeBackend(nccl, "own"), 0.01, nccl.open)
    with pytest.raises(DeadlineExceeded) as caught:
        strategies.issue(all_reduce(), "ring")
    assert str(caught.value) == (
        "the NCCL communicator ring could not be made within 0.01 s: this process still makes another. "
        "All ranks must make the first calls on their groups in the same order."
    )
    assert nccl.events == []


# Giving up.


def test_abort_cuts_what_was_opened_here():
    nccl = FakeNccl()
    strategies = group(nccl, 3, [0, 0, 1, 1])
    strategies.issue(all_reduce(), "ring")
    strategies.issue(all_reduce(), "hierarchical")
    strategies.abort()
    assert nccl.cut == ["ring", "inside/1", "across/1"]


def test_abort_cuts_a_communicator_that_is_being_made():
    nccl = FakeNccl()
    strategies = group(nccl, 0, [0, 0])
    nccl.trouble["ring waits"] = strategies.abort
    strategies.issue(all_reduce(), "ring")
    assert nccl.cut == ["ring"]


def test_a_communicator_that_opens_after_the_abort_is_cut_and_not_called():
    nccl = FakeNccl()
    strategies = group(nccl, 0, [0, 0])
    nccl.trouble["open ring"] = strategies.abort
    with pytest.raises(GroupClosed, match="the group was aborted"):
        strategies.issue(all_reduce(), "ring")
    assert nccl.cut == ["ring"]
    assert nccl.events == ["open ring: rank 0 of 2, NCCL_ALGO=allreduce:ring"]


# Hierarchical: the calls.


def test_hierarchical_on_hosts_that_are_alike(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "^NVLS")
    nccl = FakeNccl()
    strategies = group(nccl, 3, [4, 4, 7, 7])
    work = strategies.issue(all_reduce(8), "hierarchical")
    assert nccl.taken() == [
        "open inside/7: rank 1 of 2, NCCL_ALGO=^NVLS",
        "inside/7 allreduce(sum) of 1, NCCL_ALGO=^NVLS",
        "inside/7 waits at most 5 s",
        "open across/1: rank 1 of 2, NCCL_ALGO=^NVLS",
        "across/1 allreduce(sum) of 1, NCCL_ALGO=^NVLS",
        "across/1 waits at most 5 s",
        "inside/7 reduce_scatter(sum) of 8 to 4",
        "inside/7 the stream waits",
        "across/1 allreduce(sum) of 4",
        "across/1 the stream waits",
        "inside/7 allgather of 16 to 32 bytes",
    ]
    assert work.of == "inside/7"
    strategies.issue(all_reduce(4, op="max"), "hierarchical")
    assert nccl.taken() == [
        "inside/7 reduce_scatter(max) of 4 to 2",
        "inside/7 the stream waits",
        "across/1 allreduce(max) of 2",
        "across/1 the stream waits",
        "inside/7 allgather of 8 to 16 bytes",
    ]


def without_openings(nccl: FakeNccl) -> list[str]:
    return [event for event in nccl.events if "NCCL_ALGO" not in event and "at most" not in event]


def test_a_mean_is_summed_on_both_levels():
    nccl = FakeNccl()
    group(nccl, 0, [0, 0, 1, 1]).issue(all_reduce(4, op="mean"), "hierarchical")
    assert [event for event in without_openings(nccl) if "waits" not in event] == [
        "inside/0 reduce_scatter(sum) of 4 to 2",
        "across/0 allreduce(sum) of 2",
        "inside/0 allgather of 8 to 16 bytes",
    ]


def test_what_does_not_divide_goes_over_the_groups_own_communicator():
    nccl = FakeNccl()
    group(nccl, 0, [0, 0, 1, 1]).issue(all_reduce(5, op="mean"), "hierarchical")
    assert without_openings(nccl) == [
        "own allreduce(avg) of 1",
        "own the stream waits",
        "inside/0 reduce_scatter(sum) of 4 to 2",
        "inside/0 the stream waits",
        "across/0 allreduce(sum) of 2",
        "across/0 the stream waits",
        "inside/0 allgather of 8 to 16 bytes",
    ]


def test_a_tensor_with_fewer_elements_than_a_host_has_ranks():
    nccl = FakeNccl()
    work = group(nccl, 0, [0, 0, 1, 1]).issue(all_reduce(1), "hierarchical")
    assert without_openings(nccl) == ["own allreduce(sum) of 1"]
    assert work.of == "own"


def test_hierarchical_on_one_host_needs_no_other_communicator():
    nccl = FakeNccl()
    group(nccl, 1, [0, 0]).issue(all_reduce(8), "hierarchical")
    assert nccl.events == [
        "own reduce_scatter(sum) of 8 to 4",
        "own the stream waits",
        "own allgather of 16 to 32 bytes",
    ]


def test_hierarchical_with_every_rank_alone_is_the_default():
    nccl = FakeNccl()
    group(nccl, 1, [0, 1]).issue(all_reduce(8, op="mean"), "hierarchical")
    assert nccl.events == ["own allreduce(avg) of 8"]


@pytest.mark.parametrize(
    ("rank", "opened", "called"),
    [
        (
            0,
            ["open inside/0: rank 0 of 2, NCCL_ALGO=None", "open across/0: rank 0 of 2, NCCL_ALGO=None"],
            [
                "inside/0 allreduce(sum) of 5",
                "inside/0 the stream waits",
                "across/0 allreduce(sum) of 5",
                "across/0 the stream waits",
                "inside/0 broadcast of 20 bytes from 0",
            ],
        ),
        (
            1,
            ["open inside/0: rank 1 of 2, NCCL_ALGO=None"],
            [
                "inside/0 allreduce(sum) of 5",
                "inside/0 the stream waits",
                "inside/0 broadcast of 20 bytes from 0",
            ],
        ),
        (
            2,
            ["open across/0: rank 1 of 2, NCCL_ALGO=None"],
            ["across/0 allreduce(sum) of 5", "across/0 the stream waits"],
        ),
    ],
)
def test_hierarchical_on_hosts_that_differ(rank, opened, called):
    nccl = FakeNccl()
    work = group(nccl, rank, [0, 0, 1]).issue(all_reduce(5, op="mean"), "hierarchical")
    assert [event for event in nccl.events if event.startswith("open")] == opened
    assert without_openings(nccl) == called
    assert called[-1].startswith(work.of)


# A transport whose ranks are on two hosts.


@pytest.mark.parametrize("kind", ["all_reduce", "send", "recv"])
async def test_nothing_but_the_call_itself_is_handed_to_nccl(kind):
    nccl, store, threads = FakeNccl(), dist.HashStore(), DaemonThreads("test-nccl", limit=1)
    own = nccl.backend("own", 0, 2)
    own.is_made = True
    strategies = NcclStrategies(store, 0, 2, [0, 1], CPU, own, TIMEOUT, nccl.open)
    page = Page(memoryview(bytearray(Page.size(2))), 2)
    members = [Member(Place(rank, Coords(rank, 0, 0)), None if rank else page, None) for rank in range(2)]
    transport = TorchTransport(
        "nccl", OpenBackend(own, lambda: None), store, "dp", members, 0, torch.device("meta"), (0, 1),
        nccl=strategies, issuing=threads,
    )  # fmt: skip
    tensor = torch.ones(8)
    peer, op = (None, "sum") if kind == "all_reduce" else (1, None)
    call = Call(kind, tensor, tensor, op, peer, timeout=3.0, number=1, terms="float32 (8,)")
    try:
        assert transport.start(call).ended_well(TIMEOUT)
    finally:
        transport.abort(GroupClosed("the test is over"))
        threads.stop()
    issued = "allreduce(sum) of 8" if kind == "all_reduce" else f"{kind} of 32 bytes, peer 1"
    assert nccl.events == [f"own {issued}", "own waits at most 8 s"]


# Hierarchical: the values, with ranks that are threads.


class ComputingNccl(FakeNccl):
    """One of several ranks whose calls really exchange values. `meetings` is shared by all of them."""

    def __init__(self, meetings: dict[tuple, Meeting]) -> None:
        super().__init__()
        self.meetings = meetings

    def backend(self, name, rank, size):
        return ComputingBackend(self, name, rank, size)


class Meeting:
    def __init__(self, size: int) -> None:
        self.given, self.barrier = [None] * size, threading.Barrier(size, timeout=TIMEOUT)


class ComputingBackend(FakeBackend):
    def __init__(self, nccl: ComputingNccl, name: str, rank: int, size: int) -> None:
        super().__init__(nccl, name)
        self.rank, self.size, self.num_calls = rank, size, 0

    def exchange(self, call: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor. Only the call that makes a communicator does not wait: all ranks share its lock here."""
        makes, self.num_calls = not self.is_made, self.num_calls + 1
        self.work(call)
        if makes:
            return [tensor.clone()]
        meeting = self.nccl.meetings.setdefault((self.name, self.num_calls), Meeting(self.size))
        meeting.given[self.rank] = (call, tensor.clone())
        meeting.barrier.wait()
        calls, tensors = zip(*meeting.given, strict=True)
        assert len(set(calls)) == 1
        return list(tensors)

    def check_in_place(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """NCCL's rule for buffers that overlap: the part is the rank's own."""
        own = whole.view(self.size, -1)[self.rank]
        assert (part.data_ptr(), part.numel()) == (own.data_ptr(), own.numel())

    def ended(self):
        return SimpleNamespace(wait=lambda timeout=None: None)

    def allreduce(self, tensors, options):
        (tensor,) = tensors
        tensor.copy_(reduced(self.exchange(f"allreduce({op_of(options)})", tensor), options))
        return self.ended()

    def _reduce_scatter_base(self, output, source, options):
        self.check_in_place(output, source)
        total = reduced(self.exchange(f"reduce_scatter({op_of(options)})", source), options)
        output.copy_(total.view(self.size, -1)[self.rank])
        for other, part in enumerate(source.view(self.size, -1)):
            if other != self.rank:
                part.fill_(float("nan"))  # nobody may count on these
        return self.ended()

    def _allgather_base(self, output, source, options):
        self.check_in_place(source, output)
        output.copy_(torch.cat(self.exchange("allgather", source)))
        return self.ended()

    def broadcast(self, tensors, options):
        (tensor,) = tensors
        tensor.copy_(self.exchange("broadcast", tensor)[options.rootRank])
        return self.ended()


def reduced(tensors: list[torch.Tensor], options) -> torch.Tensor:
    stacked = torch.stack(tensors)
    return {"sum": stacked.sum, "avg": stacked.mean, "min": stacked.amin, "max": stacked.amax}[op_of(options)](0)


LAYOUTS = {
    "two hosts of two": [0, 0, 1, 1],
    "ranks dealt out in turn": [0, 1, 0, 1],
    "three hosts of two": [0, 0, 1, 1, 2, 2],
    "two hosts of three": [0, 0, 0, 1, 1, 1],
    "one host": [0, 0, 0],
    "all alone": [0, 1, 2],
    "hosts that differ": [0, 0, 0, 1, 1, 2],
}


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("shape", [(2, 6), (7,), (1,), ()])
@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
def test_hierarchical_computes_what_an_all_reduce_does(hosts, shape, op):
    meetings = {}
    whole = torch.randn(len(hosts), *shape, generator=torch.Generator().manual_seed(1))
    expected = {"sum": whole.sum, "mean": whole.mean, "min": whole.amin, "max": whole.amax}[op](0)

    def run(rank: int) -> list[torch.Tensor]:
        strategies = group(ComputingNccl(meetings), rank, hosts)
        results = []
        for _ in range(2):
            tensor = whole[rank].clone()
            strategies.issue(Call("all_reduce", tensor, tensor, op=op), "hierarchical")
            results.append(tensor)
        return results

    with ThreadPoolExecutor(len(hosts)) as threads:
        for results in threads.map(run, range(len(hosts))):
            for result in results:
                torch.testing.assert_close(result, expected)


def test_a_mean_of_large_float16_values_does_not_grow_across_hosts():
    """Eight times 16,000 is more than float16 holds; two of them are not."""
    hosts, meetings = [0, 0, 1, 1, 2, 2, 3, 3], {}

    def run(rank: int) -> torch.Tensor:
        tensor = torch.full((4,), 16_000.0, dtype=torch.float16)
        group(ComputingNccl(meetings), rank, hosts).issue(Call("all_reduce", tensor, tensor, op="mean"), "hierarchical")
        return tensor

    with ThreadPoolExecutor(len(hosts)) as threads:
        assert [result.tolist() for result in threads.map(run, range(len(hosts)))] == [[16_000.0] * 4] * 8


# The device.


def test_steps_that_wait_for_each_other_do_so_beside_the_users_stream(monkeypatch):
    events = []

    class Stream:
        def __init__(self, device) -> None:
            events.append(f"a stream on {device}")

        def wait_stream(self, other) -> None:
            events.append(f"waits for {other}")

    class Using:
        def __init__(self, stream) -> None:
            assert isinstance(stream, Stream)

        def __enter__(self) -> None:
            events.append("current")

        def __exit__(self, *error) -> None:
            events.append("no longer current")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the user's on {device}")
    with beside_current_stream(torch.device("cuda", 1)):
        events.append("calls")
    assert events == [
        "a stream on cuda:1",
        "waits for the user's on cuda:1",
        "current",
        "calls",
        "no longer current",
    ]
    with beside_current_stream(CPU):
        assert len(events) == 5


def test_only_hierarchical_needs_a_stream_of_its_own(monkeypatch):
    nccl, used = FakeNccl(), []

    def beside(device):
        used.append(device)
        return beside_current_stream(device)

    monkeypatch.setattr(nccl_strategies, "beside_current_stream", beside)
    strategies = group(nccl, 0, [0, 0])
    for strategy in ("default", "ring", "tree"):
        strategies.issue(all_reduce(), strategy)
    assert used == []
    strategies.issue(all_reduce(), "hierarchical")
    assert used == [CPU]
