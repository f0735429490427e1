"""`bench collectives` without processes: words to plans, seconds to figures, figures to tables; known values."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import parallel3d
from monitoring.events.collectives import bus_factor
from parallel3d.benchmarks import collectives, mpirun, worker, worker_processes
from parallel3d.benchmarks.collectives import Contestant
from parallel3d.benchmarks.memory_rank import MemoryRank, cut
from parallel3d.benchmarks.mpirun import Mpi, find_mpi
from parallel3d.benchmarks.our_rank import OurRank
from parallel3d.benchmarks.plan import DTYPES, Plan, _check_memory, make_plan
from parallel3d.benchmarks.plot import picture
from parallel3d.benchmarks.results import (
    MEMORY_LIMIT,
    Measured,
    Run,
    fastest_of_ours,
    figures,
    geometric_means,
    machine,
)
from parallel3d.benchmarks.table import _number, render
from parallel3d.benchmarks.worker import Command, check_sum, fill, largest_sum, time_calls
from parallel3d.benchmarks.worker_processes import Listener, WorkerProcesses
from parallel3d.formatting import parse_size, parse_sizes, show_size
from process_groups.arguments import STRATEGIES
from process_groups.reduction import piece_bytes
from runtime import cores
from runtime.errors import BenchmarkError, InvalidCall


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4", 4),
        ("4B", 4),
        (" 64KiB ", 65536),
        ("64 kib", 65536),
        ("64k", 65536),
        ("4KB", 4000),
        ("4.1 kb", 4100),
        ("1M", 1 << 20),
        ("1.5MiB", 3 << 19),
        ("2GiB", 2 << 30),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


def test_a_list_of_sizes_keeps_its_order_and_counts_each_once():
    assert parse_sizes("1MiB, 4,1024K,8") == (1 << 20, 4, 8)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (4, "4 B"),
        (1023, "1023 B"),
        (65536, "64 KiB"),
        (3 << 19, "1.5 MiB"),
        (2 << 30, "2 GiB"),
        (4000, "4 KB"),
        (1_500_000, "1.5 MB"),
        (1_024_000, "1000 KiB"),
    ],
)
def test_sizes_are_shown(size, text):
    assert show_size(size) == text


def plan_of(ranks=("2",), sizes=None, strategies=None, dtype="float32", rounds=None, quick=False):
    return make_plan(ranks, sizes, strategies, dtype, rounds, quick)


def test_the_default_plan():
    sizes = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
    assert plan_of() == Plan((2,), sizes, STRATEGIES, "float32", 5, quick=False)
    assert plan_of(quick=True) == Plan((2,), (4, 64 << 10, 1 << 20, 16 << 20), STRATEGIES, "float32", 3, quick=True)


def test_ranks_may_be_a_list_and_repeated():
    assert plan_of(ranks=("2,4", "3", "2"), sizes="4").ranks == (2, 4, 3)


def test_large_sizes_and_quick_runs_repeat_less():
    sizes = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
    assert [(plan_of().turns(size), plan_of().repeats(size)) for size in sizes] == [
        (7, 40),
        (7, 40),
        (7, 20),
        (3, 8),
        (5, 2),
        (2, 2),
    ]
    assert {plan_of(quick=True).turns(size) for size in sizes} == {1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"ranks": ("two",)}, "--ranks 'two' is not a number of ranks such as 2 or 2,4,8."),
        ({"ranks": ("2,,4",)}, "--ranks '' is not a number of ranks such as 2 or 2,4,8."),
        ({"ranks": ("1",)}, "--ranks 1: a collective needs at least 2 ranks."),
        ({"sizes": "4,many"}, "--sizes 'many' is not a size such as 4, 64KiB or 1.5MiB."),
        ({"sizes": "-4"}, "--sizes '-4' is not a size such as 4, 64KiB or 1.5MiB."),
        ({"sizes": "0"}, "--sizes '0' is 0 bytes; give whole ones, 1 or more."),
        ({"sizes": "1.5"}, "--sizes '1.5' is 1.5 bytes; give whole ones, 1 or more."),
        ({"sizes": "9" * 400}, "--sizes '999999999999...9999999999999' is not a size such as 4, 64KiB or 1.5MiB."),
        ({"sizes": "8388608TiB"}, "--sizes '8388608TiB' is more than any memory; give less than 8 EiB."),
        ({"sizes": "6"}, "--sizes 6: a float32 has 4 bytes, and 6 is no multiple. Give 4 or 8."),
        ({"sizes": "2"}, "--sizes 2: a float32 has 4 bytes, and 2 is no multiple. Give 4."),
        ({"strategies": "best"}, f"--strategies 'best' is not one of {', '.join(STRATEGIES)}."),
        ({"dtype": "int4"}, f"--dtype 'int4' is not one of {', '.join(DTYPES)}."),
        ({"rounds": 0}, "--rounds 0: at least one round is needed."),
        (
            {"ranks": ("64",), "dtype": "bfloat16", "sizes": "4"},
            "--ranks 64: bfloat16 is exact up to 256, too little to check the sums of so many. "
            "Ask for 42 at most, or for another --dtype.",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_the_remedy(words, message):
    with pytest.raises(InvalidCall) as error:
        plan_of(**words)
    assert str(error.value) == message


def test_more_than_the_memory_holds_is_refused():
    plan = Plan((2, 8), (4, 256 << 20), ("default",))
    _check_memory(plan, 4 << 30)
    with pytest.raises(InvalidCall) as error:
        _check_memory(plan, 3 << 30)
    assert str(error.value) == (
        "--sizes 256 MiB with 8 ranks needs 4 GiB of memory, and 3 GiB are available. "
        "Leave out the largest size, or ask for fewer ranks."
    )


SECONDS = {
    "default": [1e-3, 2e-3, 3e-3],
    "ring": [4e-3, 1e-3, 1e-3],
    "gloo": [2e-3, 6e-3, 12e-3],
    "mpi": [1e-3, 1e-3, 1e-3],
    "memory limit": [5e-4, 5e-4, 5e-4],
}


def test_figures_are_medians_and_ratios_those_of_the_rounds():
    found = figures(Measured(1_000_000, 250_000, 8, SECONDS), bus_factor("all_reduce", 4))
    default = found["default"]
    assert default.seconds == 2e-3
    assert default.algbw == pytest.approx(0.5)
    assert default.busbw == pytest.approx(0.5 * 1.5)
    assert default.times_gloo == pytest.approx(3.0)  # of 2, 3 and 4
    assert default.times_mpi == pytest.approx(0.5)  # of 1, 1/2 and 1/3
    assert default.share_of_memory_limit == pytest.approx(0.25)
    assert fastest_of_ours(found) == "ring"


def test_without_a_peer_there_is_no_ratio():
    found = figures(Measured(4, 1, 8, {"default": [1.0], "gloo": [2.0]}))["default"]
    assert (found.times_gloo, found.times_mpi, found.share_of_memory_limit) == (2.0, None, None)


def test_geometric_means_are_over_sizes():
    sizes = [Measured(4, 1, 1, {"default": [1.0], "gloo": [gloo]}) for gloo in (2.0, 8.0)]
    means = geometric_means(sizes)
    assert means == {"default": {"times_gloo": pytest.approx(4.0)}, "gloo": {"times_gloo": pytest.approx(1.0)}}


TABLE = """\
all-reduce, 4 ranks, float32, median of 3 rounds (* fastest of ours)
     size      count  contestant       time µs     min-max µs  algbw GB/s  busbw GB/s   x gloo    x mpi  of memory limit
      4 B          1  default           2000.0  1000.0-3000.0   0.0000020   0.0000030     3.00     0.50                -
                      ring *            1000.0  1000.0-4000.0   0.0000040   0.0000060     6.00     1.00                -
                      gloo              6000.0   2000.0-12000  0.00000067   0.0000010     1.00     0.17                -
                      mpi               1000.0  1000.0-1000.0   0.0000040   0.0000060     6.00     1.00                -
                      memory limit       500.0    500.0-500.0   0.0000080    0.000012    12.00     2.00                -

   16 MiB    4194304  default            60000    30000-90000        0.28        0.42     3.00     0.50            25.0%
                      ring *             30000   30000-120000        0.56        0.84     6.00     1.00            50.0%
                      gloo              180000   60000-360000       0.093        0.14     1.00     0.17             8.3%
                      mpi                30000    30000-30000        0.56        0.84     6.00     1.00            50.0%
                      memory limit       15000    15000-15000        1.12        1.68    12.00     2.00           100.0%

geometric mean, default: 3.00 x gloo, 0.50 x mpi, 25.0% of the memory limit from 64 KiB up
geometric mean, ring: 6.00 x gloo, 1.00 x mpi, 50.0% of the memory limit from 64 KiB up

send one way, rank 0 to rank 1 of 4, float32, median of 3 rounds
     size      count  contestant       time µs     min-max µs  algbw GB/s   x gloo
      4 B          1  registered *       100.0    100.0-100.0    0.000040     8.00
                      unregistered       400.0    400.0-400.0    0.000010     2.00
                      gloo               800.0    800.0-800.0   0.0000050     1.00"""


def test_the_table():
    sends = {"registered": [1e-4], "unregistered": [4e-4], "gloo": [8e-4]}
    run = Run(
        4,
        (
            Measured(4, 1, 200, SECONDS),
            Measured(16 << 20, 4 << 20, 8, {n: [30 * s for s in v] for n, v in SECONDS.items()}),
        ),
        (Measured(4, 1, 200, sends),),
    )
    assert render(run, "float32", 3) == TABLE


@pytest.mark.parametrize(
    ("value", "text"), [(16.476, "16.48"), (0.1, "0.10"), (0.0956, "0.096"), (0.0004, "0.00040"), (2e-6, "0.0000020")]
)
def test_a_number_keeps_two_digits_however_small(value, text):
    assert _number(value) == text


def test_without_mpi_the_table_has_no_such_column():
    seconds = {name: SECONDS[name][:1] for name in ("default", "gloo", "memory limit")}
    run = Run(2, (Measured(4, 1, 200, seconds),), (Measured(4, 1, 200, seconds),))
    text = render(run, "float32", 1)
    assert "mpi" not in text
    assert "min-max" not in text  # of one round
    assert "all-reduce, 2 ranks, float32, 1 round (* fastest of ours)\n" in text


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 3, 200_000])
def test_known_values_add_up_in_every_dtype(dtype, length):
    make = partial(torch.tensor, dtype=DTYPES[dtype])
    parts = [torch.empty(length, dtype=DTYPES[dtype]) for _ in range(7)]
    for rank, part in enumerate(parts):
        fill(part, rank, make)
    total = sum(parts[1:], parts[0].clone())
    check_sum(total, range(7), make, "it")
    assert total.max() <= largest_sum(7)
    if length > 3:
        for rank in range(7):
            with pytest.raises(ValueError, match="it gave"):  # any one rank missing
                check_sum(total - parts[rank], range(7), make, "it")


@pytest.mark.parametrize("make_buffer", [torch.zeros, np.zeros])
def test_a_wrong_sum_is_an_error_with_its_place(make_buffer):
    buffer = make_buffer(200_000)
    make = partial(torch.tensor, dtype=torch.float32) if make_buffer is torch.zeros else partial(np.array, dtype=float)
    fill(buffer, 2, make)
    check_sum(buffer, range(2, 3), make, "it")
    buffer[199_999] = 77
    with pytest.raises(ValueError, match=r"^it gave 77\.0 at element 199999, not 3\.0$"):
        check_sum(buffer, range(2, 3), make, "it")


@pytest.mark.parametrize(("length", "parts"), [(10, 3), (2, 5), (0, 2), (8, 4)])
def test_a_cut_covers_all_in_order(length, parts):
    pieces = cut(length, parts)
    assert [index for piece in pieces for index in piece] == list(range(length))
    assert len(pieces) == parts
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.parametrize("num_cores", [1, 2, 3])
def test_the_memory_limit_moves_the_bytes_of_an_all_reduce(num_cores):
    num_ranks, num_bytes = 3, 4 * piece_bytes(3)
    added = copied = 0
    for core in range(num_cores):
        rank = MemoryRank(num_ranks, core, num_cores)
        rank.prepare(Command("all_reduce", num_bytes))
        rank.check()
        assert max(own.nbytes for own, _ in rank._pieces) <= piece_bytes(3)
        added += sum(other.nbytes for _, others in rank._pieces for other in others)
        copied += sum(own.nbytes * len(others) for own, others in rank._pieces)
    assert added == copied == (num_ranks - 1) * num_bytes  # n(n-1) times 1/n


class Counting:
    """A contestant that only notes what is asked of it."""

    rank = 0

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str):
        return lambda *_: self.asked.append(name)


@pytest.mark.parametrize(("repeats", "warm_up"), [(1, 1), (2, 1), (3, 3), (8, 8)])
def test_calls_are_checked_warmed_up_and_synchronised_before_the_clock_starts(repeats, warm_up):
    contestant = Counting()
    seconds = time_calls(contestant, Command("all_reduce", 4, repeats=repeats, check=True))
    assert contestant.asked == ["check", *["call"] * warm_up, "barrier", *["call"] * repeats]
    assert math.isfinite(seconds)


def test_a_peer_keeps_its_tensor_until_it_rests_or_another_is_wanted(tmp_path):
    once, twice = (Command("all_reduce", 4, check=check) for check in (True, False))
    commands = once, twice, Command("send", 4), Command("rest"), Command("send", 4)
    contestant = Counting()
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        listening.settimeout(10)
        serving = threading.Thread(target=worker.serve, args=(contestant, "mpi", path), daemon=True)
        serving.start()
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"".join(command.to_line() for command in commands))
            connection.shutdown(socket.SHUT_WR)
            serving.join(10)
    asked = [name for name in contestant.asked if name in ("prepare", "check", "rest")]
    assert asked == ["prepare", "check", "prepare", "rest", "prepare"]


def test_a_send_there_and_back_counts_as_two(monkeypatch):
    clock = iter([10.0, 22.0, 10.0, 22.0])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(clock))
    assert time_calls(Counting(), Command("all_reduce", 4, repeats=3)) == 4.0
    assert time_calls(Counting(), Command("send", 4, repeats=3)) == 2.0


def test_a_command_survives_the_wire():
    command = Command("send", 64, "int8", 7, "ring", registered=False, check=True)
    assert Command.from_line(command.to_line()) == command


def test_why_mpi_is_left_out(monkeypatch):
    monkeypatch.setattr(mpirun.shutil, "which", lambda name: None)
    assert find_mpi("float32") == (
        "there is no mpirun on PATH. Install Open MPI (such as apt install openmpi-bin) and pip install mpi4py."
    )
    monkeypatch.setattr(mpirun.shutil, "which", lambda name: "/bin/mpirun")
    monkeypatch.setattr(mpirun.importlib.util, "find_spec", lambda name: None)
    assert find_mpi("float32") == "mpi4py is not installed. pip install mpi4py."
    monkeypatch.setattr(mpirun.importlib.util, "find_spec", lambda name: object())
    assert find_mpi("bfloat16") == ("it has no bfloat16. Choose --dtype float32, float64, int32, int64, int8 or uint8.")


def test_only_open_mpi_gets_its_own_options(monkeypatch):
    monkeypatch.setattr(mpirun.os, "geteuid", lambda: 0)
    open_mpi = Mpi("mpirun", "mpirun (Open MPI) 4.1.4")
    assert open_mpi.command(4) == ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    assert Mpi("mpirun", "HYDRA build details:").command(4) == ["mpirun", "-n", "4"]
    monkeypatch.setattr(mpirun.os, "geteuid", lambda: 1000)
    assert open_mpi.command(4) == ["mpirun", "--oversubscribe", "-n", "4"]


class Idle:
    """Worker processes that answer at once; note whether MPI's had ended by then."""

    def __init__(self, name: str, happened: list[str]) -> None:
        self.name, self._happened = name, happened

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        pass

    async def ready(self) -> None:
        pass

    async def ask(self, command: Command) -> float:
        self._happened.append("measured")
        return 1.0


async def test_an_mpi_that_is_not_ready_in_time_has_ended_before_anything_is_measured(tmp_path, monkeypatch):
    happened: list[str] = []

    async def never_ready() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # ending processes takes a while
            happened.append("mpi has ended")
        return ""

    def make_workers(num_ranks: int, mpi: Mpi | None, listener: Listener, folder: Path) -> list[WorkerProcesses | Idle]:
        others = [Idle(name, happened) for name in ("ours", "gloo", "memory limit")]
        return [*others, WorkerProcesses("mpi", num_ranks, listener, never_ready)]

    monkeypatch.setattr(worker_processes, "_READY_SECONDS", 0.001)
    monkeypatch.setattr(collectives, "_workers", make_workers)
    notes, seen = [], []
    plan = Plan((2,), (4,), ("default",), rounds=1)
    runs = await collectives.measure(plan, None, tmp_path, lambda text: None, notes.append, seen.append)
    assert notes == ["mpi is left out of 2 ranks: the ranks of mpi were not ready within 0.001 s"]
    assert happened[0] == "mpi has ended"
    assert happened.count("mpi has ended") == 1
    assert set(happened[1:]) == {"measured"}
    assert seen == runs


async def test_turns_of_a_round_alternate_and_their_median_counts(monkeypatch):
    asked: list[Command] = []
    answers = {"default": iter([1.0, 9.0, 2.0]), "ring": iter([8.0, 4.0, 5.0])}

    class Ours(Idle):
        async def ask(self, command: Command) -> float:
            asked.append(command)
            return 0.0 if command.kind == "rest" else next(answers[command.strategy])

    monkeypatch.setattr(Plan, "turns", lambda self, num_bytes: 3)
    monkeypatch.setattr(collectives, "all_reducers", lambda strategies: [Contestant(s, "ours", s) for s in strategies])
    plan = Plan((2,), (4,), ("default", "ring"), rounds=1)
    measured = await collectives._measure_size(plan, "all_reduce", 4, {"ours": Ours("ours", [])}, lambda text: None)
    assert [command.strategy for command in asked[:-1]] == ["default", "ring", "ring", "default", "default", "ring"]
    assert [command.check for command in asked[:-1]] == [True, True, False, False, False, False]
    assert asked[-1].kind == "rest"
    assert measured == Measured(4, 1, 120, {"default": [2.0], "ring": [5.0]})


async def test_a_rank_that_comes_when_its_processes_were_dismissed_is_sent_away(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_processes, "_READY_SECONDS", 0.001)
    async with Listener(tmp_path) as listener:
        first, second = [await asyncio.open_unix_connection(listener.path) for _ in range(2)]
        async with WorkerProcesses("mpi", 2, listener, asyncio.Event().wait) as workers:
            first[1].write(worker.to_line(workers="mpi", rank=0))
            with pytest.raises(BenchmarkError, match="were not ready within"):
                await workers.ready()
            await workers.dismiss()
            second[1].write(worker.to_line(workers="mpi", rank=1))
            for reader, writer in (first, second):
                assert await reader.read() == b""
                writer.close()


def test_cores_are_those_that_a_container_leaves(monkeypatch, tmp_path):
    """More ranks of the memory limit than that would take turns on them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cores, "quota", lambda: 2.5)
    assert machine(None)["cores"] == 3
    workers = {each.name: each for each in collectives._workers(2, None, Listener(tmp_path), tmp_path)}
    assert workers[MEMORY_LIMIT]._num_ranks == 3
    assert workers[MEMORY_LIMIT]._run.args[1] == 3


FACTS = {"cores": 2, "cpu": "a CPU", "torch": "2.0", "mpi": None}


def test_the_picture_tells_lines_apart_and_says_what_was_measured():
    sizes = (4, 1 << 20, 64 << 20)
    names = [*STRATEGIES, "shared", "staged", "gloo", "mpi", "memory limit"]
    reduced = tuple(Measured(size, size // 4, 3, {name: [1e-6 * size] for name in names}) for size in sizes)
    sent = tuple(Measured(size, size // 4, 3, {"registered": [1e-6], "gloo": [2e-6]}) for size in sizes)
    plan = Plan((2, 4), sizes, STRATEGIES, rounds=3)
    drawn = picture(plan, FACTS, [Run(2, reduced, sent), Run(4, reduced, sent)])
    assert drawn.get_suptitle() == "2 cores (a CPU), torch 2.0\nfloat32, 2, 4 ranks, median of 3 rounds"
    assert [panel.get_title() for panel in drawn.axes] == [
        "all-reduce, 2 ranks: bandwidth",
        "all-reduce, 4 ranks: bandwidth",
        "all-reduce, 2 ranks: time",
        "all-reduce, 4 ranks: time",
        "send, rank 0 to rank 1 of 2: time",
        "send, rank 0 to rank 1 of 4: time",
    ]
    bandwidth, _, time, *_ = drawn.axes
    assert [line.get_label() for line in time.get_lines()] == names
    assert len({line.get_marker() for line in time.get_lines()}) == len(names)
    assert len({str(line.get_linestyle()) + str(line.get_color()) for line in time.get_lines()}) > 2
    assert list(time.get_lines()[0].get_ydata()) == pytest.approx([1.0 * size for size in sizes])  # µs
    assert list(bandwidth.get_lines()[0].get_ydata()) == pytest.approx([1e-3] * 3)  # GB/s
    drawn.draw_without_rendering()
    for panel in drawn.axes[1::2]:
        assert panel.get_legend().get_window_extent().x0 > panel.get_window_extent().x1  # beside the lines


class Forgetful:
    """A group of two whose all-reduce and whose sends lose one element."""

    def __init__(self, group: parallel3d.Group) -> None:
        self._group = group

    def __getattr__(self, name: str):
        return getattr(self._group, name)

    async def all_reduce(self, tensor: torch.Tensor, **options) -> torch.Tensor:
        result = await self._group.all_reduce(tensor, **options)
        result[5] = 0
        return result

    async def recv(self, tensor: torch.Tensor, src: int) -> None:
        await self._group.recv(tensor, src)
        tensor[5] = 0


@pytest.mark.parametrize(("kind", "what"), [("all_reduce", "an all-reduce"), ("send", "a send")])
@pytest.mark.parametrize("registered", [True, False])
async def test_our_ranks_check_what_they_compute(kind, what, registered):
    command = Command(kind, 64, repeats=2, registered=registered, check=True)

    async def honest() -> float:
        async with parallel3d.mesh(dp=2) as mesh:
            return await OurRank(mesh.world).perform(command)

    async def forgetful() -> float:
        async with parallel3d.mesh(dp=2) as mesh:
            return await OurRank(Forgetful(mesh.world)).perform(command)

    assert min(await parallel3d.in_process(honest, ranks=2)) > 0
    with pytest.raises(ValueError, match=f"^{what} of 64 bytes gave 0.0 at element 5, not "):
        await parallel3d.in_process(forgetful, ranks=2)
