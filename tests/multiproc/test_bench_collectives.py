"""`parallel3d bench collectives` with real ranks of every contestant: what it prints, refuses, and leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
from pathlib import Path

import pytest

from runtime.cores import num_cores
from tests.support.processes import ROOT, Started, Stream, children
from tests.support.tools import needs

pytestmark = pytest.mark.slow
SECONDS = 100.0
PROGRESS = r"(2 ranks: starting|all_reduce of 1 MiB, round \d+ of 100000: [\w ]+)? *"
SMALL = ("--quick", "-n", "2", "--sizes", "4,64KiB", "--rounds", "1")
NO_MPI = (
    "parallel3d bench collectives: mpi is left out: there is no mpirun on PATH. "
    "Install Open MPI (such as apt install openmpi-bin) and pip install mpi4py.\n"
)
WITH_OR_WITHOUT_MPI = pytest.mark.parametrize(
    "has_mpi", [pytest.param(True, marks=needs("mpirun")), False], ids=["mpi", "no mpi"]
)

_ON_TERMINAL = """
import os, sys
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_NOCTTY), 2)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Bench(Started):
    """One command whose temporary files, and nothing else, are in a folder of its own."""

    def __init__(self, folder: Path, *args: str, before: tuple[str, ...] = (), has_mpi: bool = True, **options) -> None:
        if not has_mpi:
            options["PATH"] = str(folder)  # where there is no program at all
        self.folder = folder / "t"
        self.folder.mkdir()
        command = (*before, "-m", "parallel3d", "bench", "collectives", *args)
        super().__init__(*command, **{"TMPDIR": str(self.folder), **options})

    def finish(self, seconds: float = SECONDS) -> int:
        code = super().finish(seconds)
        assert list(self.folder.iterdir()) == []
        return code


class LongBench(Bench):
    """One that would go on for long, with its stderr on a terminal, where progress is shown."""

    def __init__(self, folder: Path, has_mpi: bool) -> None:
        self._fd, theirs = os.openpty()
        self.terminal = Stream(self._fd)
        self.shared_memory = folder / "shm"
        self.shared_memory.mkdir()
        super().__init__(
            folder,
            *("-n", "2", "--sizes", "1MiB", "--rounds", "100000"),
            before=("-c", _ON_TERMINAL, os.ttyname(theirs)),
            has_mpi=has_mpi,
            OMPI_MCA_btl_vader_backing_directory=str(self.shared_memory),
        )
        self.terminal.wait_for("all_reduce of 1 MiB, round 2 of 100000: default", SECONDS)
        os.close(theirs)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        os.close(self._fd)
        assert list(self.shared_memory.iterdir()) == []


@pytest.fixture
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("b")


def run(folder: Path, *args: str, **options) -> tuple[int, str, str]:
    with Bench(folder, *args, **options) as bench:
        code = bench.finish()
        return code, bench.stdout.text, bench.stderr.text


@WITH_OR_WITHOUT_MPI
def test_json_has_everything_and_its_figures_agree(short_tmp, has_mpi):
    picture = short_tmp / "bench.png"
    code, out, err = run(short_tmp, *SMALL, "--json", "--plot", str(picture), has_mpi=has_mpi)
    assert (code, err) == (0, "" if has_mpi else NO_MPI)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.stat().st_size > 10_000
    found = json.loads(out)
    assert set(found) == {"machine", "dtype", "rounds", "quick", "notes", "runs"}
    machine = {"cores", "cpu", "memory_bytes", "system", "python", "torch", "parallel3d", "mpi"}
    assert set(found["machine"]) == machine
    assert found["machine"]["cores"] == num_cores()
    assert (found["dtype"], found["rounds"], found["quick"]) == ("float32", 1, True)
    (two,) = found["runs"]
    assert set(two) == {"ranks", "all_reduce", "send", "geometric_means"}
    assert two["ranks"] == 2
    for kind, bus_factor in (("all_reduce", 1.0), ("send", 1.0)):  # 2 (2 - 1) / 2
        assert [(each["bytes"], each["count"]) for each in two[kind]] == [(4, 1), (65536, 16384)]
        for size in two[kind]:
            check_size(size, bus_factor)
    names = list(two["all_reduce"][0]["contestants"])
    assert [name for name in names if name not in ("ring", "tree", "hierarchical", "adaptive")] == [
        *("default", "shared", "staged", "gloo"),
        *(["mpi"] if has_mpi else []),
        "memory limit",
    ]
    assert list(two["send"][0]["contestants"]) == ["registered", "unregistered", "gloo"]
    check_means(two)


def check_size(size: dict, bus_factor: float) -> None:
    contestants = size["contestants"]
    assert size["fastest_of_ours"] in contestants
    for each in contestants.values():
        assert each["seconds"] == statistics.median(each["rounds"]) > 0
        assert each["algbw"] == pytest.approx(size["bytes"] / each["seconds"] / 1e9)
        assert each["busbw"] == pytest.approx(each["algbw"] * bus_factor)
        assert each["times_gloo"] == pytest.approx(contestants["gloo"]["seconds"] / each["seconds"])
        for peer, name in (("mpi", "times_mpi"), ("memory limit", "share_of_memory_limit")):
            if peer in contestants:
                assert each[name] == pytest.approx(contestants[peer]["seconds"] / each["seconds"])
            else:
                assert each[name] is None


def check_means(run: dict) -> None:
    for kind in ("all_reduce", "send"):
        for name, means in run["geometric_means"][kind].items():
            for ratio, mean in means.items():
                values = [size["contestants"][name][ratio] for size in run[kind]]
                assert mean == pytest.approx(statistics.geometric_mean(values))


@pytest.mark.exhaustive
def test_the_table_is_on_stdout_and_missing_mpi_is_told_once(short_tmp):
    """Three ranks, where bus bandwidth is not algorithm bandwidth; one of them has no part in the sends."""
    args = ("-n", "3", "--sizes", "64", "--rounds", "1", "--dtype", "float64")
    code, out, err = run(short_tmp, *args, has_mpi=False)
    assert code == 0, err
    assert err == NO_MPI
    lines = out.splitlines()
    assert lines[0].startswith(f"{num_cores()} cores (")
    assert lines[1:4] == [
        "",
        "all-reduce, 3 ranks, float64, 1 round (* fastest of ours)",
        "     size      count  contestant       time µs  algbw GB/s  busbw GB/s   x gloo  of memory limit",
    ]
    assert lines[4].startswith("     64 B          8  default ")
    sends = lines.index("send one way, rank 0 to rank 1 of 3, float64, 1 round")
    assert [line.split()[-1] for line in lines[sends + 1 :]][-1] == "1.00"


@pytest.mark.exhaustive
def test_each_number_of_ranks_is_shown_when_it_is_done(short_tmp):
    with Bench(short_tmp, "-n", "2,3", "--sizes", "4", "--rounds", "1", "--quick") as bench:
        bench.stdout.wait_for("^send one way, rank 0 to rank 1 of 2", SECONDS)
        assert "3 ranks" not in bench.stdout.text
        assert bench.process.poll() is None
        assert bench.finish() == 0
        assert bench.stdout.text.count(" cores (") == 1
        assert "\n\nall-reduce, 3 ranks" in bench.stdout.text


@pytest.mark.exhaustive
def test_an_mpi_that_does_not_work_is_left_out_with_its_own_words(short_tmp):
    folder = short_tmp / "bin"
    folder.mkdir()
    broken = folder / "mpirun"
    broken.write_text("#!/bin/sh\nif [ $1 = --version ]; then echo some MPI; else echo no slots >&2; exit 3; fi\n")
    broken.chmod(0o755)
    args = ("-n", "2", "--sizes", "4", "--rounds", "1", "--json")
    code, out, err = run(short_tmp, *args, PATH=f"{folder}:{os.environ['PATH']}")
    note = "mpi is left out of 2 ranks: the ranks of mpi failed:\nno slots"
    assert (code, err) == (0, f"parallel3d bench collectives: {note}\n")
    assert json.loads(out)["notes"] == [note]
    assert "mpi" not in json.loads(out)["runs"][0]["all_reduce"][0]["contestants"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "1"], "--ranks 1: a collective needs at least 2 ranks."),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                (["--sizes", "x"], "--sizes 'x' is not a size such as 4, 64KiB or 1.5MiB."),
                (["--plot", "b.txt"], "--plot b.txt: the name must end in .png, .svg or .pdf."),
                (
                    ["--plot", "no/b.png"],
                    "--plot no/b.png can't be written: No such file or directory. Name another file.",
                ),
                (["--plot", "d.png"], "--plot d.png can't be written: Is a directory. Name another file."),
            )
        ),
    ],
)
def test_bad_input_gets_one_message_before_a_process_starts(tmp_path, short_tmp, args, message):
    (tmp_path / "d.png").mkdir()
    expected = f"parallel3d bench collectives: {message}\n"
    assert run(short_tmp, *args, cwd=tmp_path) == (2, "", expected)
    assert [path.name for path in tmp_path.iterdir()] == ["d.png"]


def test_a_plot_without_matplotlib_is_refused_before_measuring(tmp_path, short_tmp):
    hiding = tmp_path / "sitecustomize.py"
    hiding.write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'matplotlib' else find(name, *a)\n"
    )
    expected = (
        "parallel3d bench collectives: --plot needs matplotlib, which is not installed. "
        "pip install 'parallel3d[plot]'.\n"
    )
    path = f"{ROOT}:{tmp_path}"
    assert run(short_tmp, "--plot", "bench.png", cwd=tmp_path, PYTHONPATH=path) == (2, "", expected)


@WITH_OR_WITHOUT_MPI
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_ends_it_and_nothing_stays(short_tmp, number, code, has_mpi):
    with LongBench(short_tmp, has_mpi) as bench:
        bench.send(number)
        assert (bench.finish(), bench.stdout.text) == (code, "")
        text = bench.terminal.read_all().replace("\r\n", "\n")
        assert text.startswith(NO_MPI) is not has_mpi
        lines = text.removeprefix(NO_MPI).rstrip().split("\r")
        assert [line for line in lines if not re.fullmatch(PROGRESS, line)] == []


@WITH_OR_WITHOUT_MPI
def test_killed_it_takes_its_processes_along(short_tmp, has_mpi):
    with LongBench(short_tmp, has_mpi) as bench:
        bench.send(signal.SIGKILL)
        bench.process.wait(SECONDS)
        bench.wait_until_nothing_is_left()


@WITH_OR_WITHOUT_MPI
@pytest.mark.exhaustive
def test_a_rank_that_dies_ends_it_with_the_reason(short_tmp, has_mpi):
    with LongBench(short_tmp, has_mpi) as bench:
        fork_server = next(pid for pid in children(bench.process.pid) if len(children(pid)) == 2)
        os.kill(children(fork_server)[0], signal.SIGKILL)
        assert (bench.finish(), bench.stdout.text) == (1, "")
        assert re.search(
            r"\rparallel3d: all_reduce of 1 MiB, round \d+ of 100000: \w+.*: .*rank", bench.terminal.read_all()
        )
