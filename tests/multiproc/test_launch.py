"""`parallel3d launch` with real ranks: what they are given, how they run, what is shown of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.errors import Coords, LaunchError
from runtime.launch.launch import LaunchSpec, launch
from runtime.launch.processes import marked
from runtime.launch.script import Target
from tests.support.processes import MARK, ROOT, SECONDS, Launched, wait_for_end, write_script


def run(*args: str, **options) -> tuple[int, str, str]:
    with Launched(*args, **options) as launched:
        code = launched.finish()
        return code, launched.stdout.text, launched.stderr.text


def test_each_rank_has_torchruns_variables_and_the_shared_store(tmp_path):
    script = write_script(
        tmp_path,
        """
        import json, os, fcntl
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PARALLEL3D_RUN_ID"]
        names.append("OMP_NUM_THREADS")
        fds = [int(os.environ[f"PARALLEL3D_{name}_FD"]) for name in ("STORE", "CONTROL")]
        print(json.dumps({
            **{name: os.environ[name] for name in names},
            "inode": os.stat(f"/proc/self/fd/{fds[0]}").st_ino,
            "close_on_exec": [bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC) for fd in fds],
            "open": len(os.listdir("/proc/self/fd")) - 1,
            "own_group": os.getpgrp() == os.getpid(),
            "stdin": os.readlink("/proc/self/fd/0"),
        }))
        """,
    )
    code, out, err = run("-n", "2", "--no-prefix", script)
    assert (code, err) == (0, "")
    ranks = sorted((json.loads(line) for line in out.splitlines()), key=lambda each: each["RANK"])
    assert [each["RANK"] for each in ranks] == [each["LOCAL_RANK"] for each in ranks] == ["0", "1"]
    assert {each["WORLD_SIZE"] + each["LOCAL_WORLD_SIZE"] for each in ranks} == {"22"}
    assert len({each["PARALLEL3D_RUN_ID"] for each in ranks}) == 1
    assert len({each["inode"] for each in ranks}) == 1
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for each in ranks:
        assert each["OMP_NUM_THREADS"] == threads
        assert each["close_on_exec"] == [True, True]
        assert each["open"] == 5, "stdin, stdout, stderr, store, control: nothing of the server's"
        assert each["own_group"]
        assert each["stdin"] == "/dev/null"


def test_the_users_own_thread_count_is_kept(tmp_path):
    script = write_script(tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'])")
    assert run("-n", "1", script, OMP_NUM_THREADS="7")[1] == "[0] 7\n"


SHOW_MAIN = """
import json, sys
main = sys.modules["__main__"]
print(json.dumps([
    sys.argv, __name__, __file__, sys.path[0], __package__, main.__dict__ is globals(),
    type(__loader__).__name__, __spec__ and __spec__.name, isinstance(__builtins__, type(sys)),
    sorted(name for name in globals() if name.startswith("__")),
]))
"""


@pytest.mark.parametrize("arguments", [(), ("--flag", "-x", "-n", "3", "--", "--help", "")])
def test_a_script_sees_what_python_would_show_it(tmp_path, arguments):
    write_script(tmp_path, SHOW_MAIN, "show.py")
    _assert_same_as_python(tmp_path, "show.py", *arguments)


def test_a_linked_script_finds_its_neighbours(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    write_script(real, SHOW_MAIN, "show.py")
    (tmp_path / "link.py").symlink_to("real/show.py")
    _assert_same_as_python(tmp_path, "link.py")


@pytest.mark.parametrize("name", ["package", "package.inner"])
def test_a_module_sees_what_python_would_show_it(tmp_path, name):
    package = tmp_path / "package"
    package.mkdir()
    for file in ("__init__.py", "__main__.py", "inner.py"):
        (package / file).write_text("" if file == "__init__.py" else SHOW_MAIN)
    _assert_same_as_python(tmp_path, "-m", name, "--flag", "-x")


def _assert_same_as_python(folder: Path, *args: str) -> None:
    expected = subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True, timeout=30)
    assert expected.returncode == 0, expected.stderr
    assert run("-n", "1", "--no-prefix", *args, cwd=folder) == (0, expected.stdout, "")


def test_classes_of_the_script_pickle_and_spawned_processes_find_them(tmp_path):
    script = write_script(
        tmp_path,
        """
        import multiprocessing, pickle

        class Thing:
            value = 20

        def work(thing):
            return thing.value + 1

        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [Thing()]))
        """,
    )
    assert run("-n", "1", script) == (0, "[0] [21]\n", "")


def test_the_interpreter_finishes_as_usual(tmp_path):
    script = write_script(
        tmp_path,
        """
        import atexit, sys, threading
        atexit.register(print, "atexit")
        threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
        sys.stdout.write("unfinished; ")
        """,
    )
    assert run("-n", "1", script) == (0, "[0] unfinished; thread\n[0] atexit\n", "")


@pytest.mark.parametrize(
    ("end", "code", "printed"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(0)", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('words')", 1, "[0] words\n"),
        ("import os; os._exit(9)", 9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, ""),
        ("import os; os.abort()", 134, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("1 / 0", 1, ""),
        ("def", 1, ""),
    ],
)
def test_exit_codes_are_pythons(tmp_path, end, code, printed):
    found, _, err = run("-n", "1", write_script(tmp_path, end))
    assert found == code
    assert err.startswith(printed + ("parallel3d: rank 0 failed first: " if code else ""))


def test_the_traceback_is_as_python_prints_it_and_stands_alone(tmp_path):
    script = write_script(
        tmp_path,
        """
        def divide():
            return 1 / 0

        try:
            {}["key"]
        except KeyError:
            divide()
        """,
    )
    expected = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30).stderr
    head = "parallel3d: rank 0 failed first: ZeroDivisionError: division by zero\n"
    assert run("-n", "1", script) == (1, "", head + expected)


def test_an_excepthook_of_the_users_is_called(tmp_path):
    script = write_script(tmp_path, "import sys; sys.excepthook = lambda *a: print('hook', a[0]); 1 / 0")
    code, out, _ = run("-n", "1", script)
    assert (code, out) == (1, "[0] hook <class 'ZeroDivisionError'>\n")


def test_a_script_beside_a_file_that_hides_our_package_is_refused(tmp_path):
    hiding = tmp_path / "runtime.py"
    hiding.write_text("")
    code, out, err = run("-n", "1", write_script(tmp_path, "print('ran')"), cwd=tmp_path)
    assert (code, out) == (1, "")
    assert f"ImportError: {hiding} hides parallel3d's own package 'runtime'" in err


def test_lines_of_ranks_are_whole_and_named(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        rank = os.environ["RANK"]
        for line in range(2000):
            os.write(1, f"{rank} {line} ".encode())
            os.write(1, b"end\\n")
        """,
    )
    code, out, _ = run("-n", "4", script)
    assert code == 0
    for rank in range(4):
        mine = [line for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] {rank} {line} end" for line in range(2000)]


def test_bytes_pass_through_long_lines_are_bounded_and_streams_kept_apart(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os
        os.write(1, b"\\xff\\x00\\n")
        os.write(2, b"to stderr\\n")
        rest = b"x" * 3_000_000
        while rest:
            rest = rest[os.write(1, rest):]
        """,
    )
    with Launched("-n", "1", script) as launched:
        assert launched.finish() == 0
        assert launched.stdout.data.startswith(b"[0] \xff\x00\n")
        assert launched.stdout.data.count(b"x") == 3_000_000
        assert launched.stderr.text == "[0] to stderr\n"


def test_a_slow_reader_loses_nothing(tmp_path):
    script = write_script(
        tmp_path,
        """
        import sys
        for number in range(80_000):
            print(number, "x" * 100)
        print("done", file=sys.stderr, flush=True)
        """,
    )
    with Launched("-n", "1", "--no-prefix", script) as launched:
        launched.stdout.wait_for("^0 x")
        # Far more is on its way than all buffers hold, so the rank waits for us here.
        assert "done" not in launched.stderr.text
        assert launched.finish() == 0
        lines = launched.stdout.text.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(80_000))


def test_log_files_hold_all_and_only_some_ranks_are_shown(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        print("out", os.environ["RANK"])
        print("err", file=sys.stderr)
        """,
    )
    logs = tmp_path / "deep" / "logs"
    code, out, err = run("-n", "12", "--log-dir", str(logs), "--only", "1,10-11", script)
    assert code == 0
    assert sorted(out.splitlines()) == ["[ 1] out 1", "[10] out 10", "[11] out 11"]
    assert sorted(err.splitlines()) == ["[ 1] err", "[10] err", "[11] err"]
    assert sorted(file.name for file in logs.iterdir()) == sorted(f"rank{rank}.log" for rank in range(12))
    assert sorted((logs / "rank5.log").read_text().splitlines()) == ["err", "out 5"]


def test_the_traceback_is_in_the_log_too(tmp_path):
    script = write_script(tmp_path, "print('before', end='')\n1 / 0")
    code, _, _ = run("-n", "1", "--log-dir", str(tmp_path), script)
    log = (tmp_path / "rank0.log").read_text()
    assert code == 1
    assert log.startswith("before\nTraceback (most recent call last):\n")
    assert log.endswith("ZeroDivisionError: division by zero\n")


def test_a_rank_may_end_while_others_go_on(tmp_path):
    script = write_script(
        tmp_path,
        f"""
        import os
        fifo = {str(tmp_path / "fifo")!r}
        if os.environ["RANK"] == "0":
            print("leaving", flush=True)
        else:
            open(fifo).read()
            print("stayed")
        """,
    )
    os.mkfifo(tmp_path / "fifo")
    with Launched("-n", "2", script) as launched:
        launched.stdout.wait_for(r"^\[0\] leaving")
        (tmp_path / "fifo").write_text("go")
        assert launched.finish() == 0
        assert "[1] stayed\n" in launched.stdout.text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", "here.py"], "-n 0: at least one rank is needed"),
        (["-n", "-3", "here.py"], "-n -3: at least one rank is needed"),
        (["-n", "2", "nowhere.py"], "there is no script nowhere.py (seen from {folder})"),
        (["-n", "2", "."], ". is a directory; name the script in it"),
        (["-n", "2", "-m", "no_such_module"], "no module named 'no_such_module' here or on the import path"),
        (["-n", "2", "--only", "2", "here.py"], "--only '2': there is no rank 2; the last of 2 is 1"),
        (["-n", "2", "--only", "x", "here.py"], "--only 'x' is not a list of ranks such as 0 or 0,3-5"),
        (
            ["-n", "2", "--log-dir", "here.py/logs", "here.py"],
            "log files can't be written in here.py/logs: Not a directory (here.py/logs)",
        ),
    ],
)
def test_bad_input_gets_one_message_before_a_process_starts(tmp_path, args, message):
    write_script(tmp_path, "print('ran')", "here.py")
    expected = f"parallel3d launch: {message.format(folder=tmp_path)}\n"
    assert run(*args, cwd=tmp_path) == (2, "", expected)


def test_a_preload_that_fails_is_shown(tmp_path):
    code, out, err = run("-n", "2", write_script(tmp_path, "print('ran')"), preload="no_such_module")
    assert (code, out) == (1, "")
    assert err.startswith("parallel3d: no_such_module could not be preloaded for the ranks:\n")
    assert "ModuleNotFoundError: No module named 'no_such_module'" in err


def test_numpy_is_seeded_apart_in_each_rank(tmp_path):
    script = write_script(tmp_path, "import numpy, random; print(numpy.random.rand(), random.random())")
    code, out, _ = run("-n", "2", "--no-prefix", script, preload="numpy,numpy.random")
    first, second = (line.split() for line in out.splitlines())
    assert code == 0
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_closed_stdout_takes_nothing_else_down(tmp_path):
    script = write_script(tmp_path, "import sys; print('lost'); print('seen', file=sys.stderr)")
    command = [sys.executable, "-m", "parallel3d", "launch", "--preload", "", "-n", "1", script]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "[0] seen\n")


@pytest.mark.slow
def test_torch_ranks_meet_through_the_store(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, torch, torch.distributed as dist
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore("/proc/self/fd/" + os.environ["PARALLEL3D_STORE_FD"], size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        value = torch.full((1,), float(rank))
        dist.all_reduce(value)
        print(value.item(), torch.get_num_threads())
        dist.destroy_process_group()
        """,
    )
    code, out, err = run("-n", "4", "--no-prefix", script, preload="torch,torch.distributed")
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert (code, out, err) == (0, f"6.0 {threads}\n" * 4, "")


def scrape_until(url: str, lines: Sequence[str], seconds: float = SECONDS) -> str:
    """The metrics, once they have these lines."""
    deadline = time.monotonic() + seconds
    while True:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        if set(lines) <= set(text.splitlines()):
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


@pytest.mark.slow
def test_the_ranks_calls_are_in_the_metrics_and_stay_there(tmp_path):
    script = write_script(
        tmp_path,
        f"""
        import asyncio, os, torch, parallel3d

        async def main():
            for strategies in (["default"], ["ring", "ring"], ["ring"]):
                async with parallel3d.mesh(dp=2) as mesh:
                    for strategy in strategies:
                        await mesh.dp.all_reduce(torch.ones(1000), strategy=strategy)
                    if strategies == ["default"]:
                        await mesh.world.barrier()
                        await asyncio.to_thread(lambda: open(f"{tmp_path}/inside{{mesh.rank}}").read())
            if mesh.rank == 0:
                print(os.getpid(), flush=True)
            else:
                open("{tmp_path}/after").read()

        parallel3d.run(main)
        """,
    )
    for name in ("inside0", "inside1", "after"):
        os.mkfifo(tmp_path / name)
    all_reduce, barrier = '{axis="dp",op="all_reduce"}', '{axis="world",op="barrier"}'
    first = [
        f"parallel3d_collective_duration_seconds_count{all_reduce} 2.0",
        f"parallel3d_collective_duration_seconds_count{barrier} 2.0",
        f"parallel3d_collective_bytes_total{all_reduce} 8000.0",
        *(
            f'parallel3d_rank_info{{device="cpu",dp="{rank}",host="",pp="0",rank="{rank}",tp="0"}} 1.0'
            for rank in (0, 1)
        ),
    ]
    with Launched("-n", "2", "--metrics-port", "0", script, preload=None) as launched:
        url = launched.stderr.wait_for(r"^metrics: (\S+)$")[1]
        text = scrape_until(url, first)  # reported while the mesh is up
        assert 'strategy="ring"' not in text
        for rank in range(2):
            (tmp_path / f"inside{rank}").write_text("go")
        last = [
            f"parallel3d_collective_duration_seconds_count{all_reduce} 8.0",
            f"parallel3d_collective_bytes_total{all_reduce} 32000.0",
        ]
        rank_0 = int(launched.stdout.wait_for(r"^\[0\] (\d+)$")[1])
        wait_for_end(rank_0, time.monotonic() + SECONDS)
        text = scrape_until(url, last)  # of three meshes, which have ended
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert 0.0 < float(values[f"parallel3d_collective_duration_seconds_sum{all_reduce}"]) < SECONDS
        for strategy in ("default", "ring"):
            where = f'{{axis="dp",op="all_reduce",strategy="{strategy}"}}'
            assert 0.0 < float(values[f"parallel3d_collective_bus_bandwidth_bytes_per_second{where}"]) < 1e12
        (tmp_path / "after").write_text("go")
        assert launched.finish() == 0


def spec(script: str, mark: str, num_ranks: int = 2) -> LaunchSpec:
    return LaunchSpec(Target(script), num_ranks, environment={MARK: mark}, interrupt_grace=5.0)


async def test_the_api_passes_messages_on_and_knows_where_ranks_sit(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os
        from runtime.control import rank_control
        control = rank_control()
        rank = int(os.environ["RANK"])
        control.send("mesh", coords=[0, 0, rank])
        control.send("mesh", coords="nonsense")
        os.write(int(os.environ["PARALLEL3D_CONTROL_FD"]), b"garbage")
        if rank == 1:
            raise ValueError("wrong")
        """,
    )
    seen = []
    result = await launch(spec(script, "api"), on_message=lambda rank, message: seen.append((rank, message)))
    assert result.exit_code == 1
    assert result.root is not None
    assert (result.root.rank, result.root.coords) == (1, Coords(0, 0, 1))
    assert result.report.startswith("parallel3d: rank 1 (dp=0 tp=0 pp=1) failed first: ValueError: wrong\n")
    assert (1, {"kind": "mesh", "coords": [0, 0, 1]}) in seen
    assert [message["type"] for rank, message in seen if message["kind"] == "failed"] == ["ValueError"]
    assert marked(MARK, "api") == []


async def test_cancelling_stops_the_ranks_in_order(tmp_path):
    script = write_script(
        tmp_path,
        f"""
        import os, time
        from runtime.control import rank_control
        try:
            rank_control().send("here")
            while True:
                time.sleep(0.05)
        finally:
            open(os.path.join({str(tmp_path)!r}, "left" + os.environ["RANK"]), "w").close()
        """,
    )
    here = asyncio.Semaphore(0)
    running = asyncio.create_task(launch(spec(script, "cancel"), on_message=lambda *_: here.release()))
    async with asyncio.timeout(30):
        await here.acquire()
        await here.acquire()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert {file.name for file in tmp_path.glob("left*")} == {"left0", "left1"}
    assert marked(MARK, "cancel") == []


async def test_an_error_of_the_callers_own_callback_ends_the_launch_with_it(tmp_path):
    script = write_script(
        tmp_path,
        "import signal; from runtime.control import rank_control; rank_control().send('x'); signal.pause()",
    )

    def callback(rank: int, message: object) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await launch(spec(script, "callback"), on_message=callback)
    assert marked(MARK, "callback") == []


async def test_the_api_refuses_bad_input(tmp_path):
    with pytest.raises(LaunchError, match="at least one rank"):
        await launch(LaunchSpec(Target("x.py"), 0))
