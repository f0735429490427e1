"""Kills the launcher, the fork server and ranks in every way that was promised to leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.errors import LaunchError
from runtime.launch.launch import LaunchSpec, launch
from runtime.launch.processes import marked
from runtime.launch.script import Target
from tests.support.processes import MARK, ROOT, SECONDS, Launched, Stream, children, wait_for_end, write_script

# Each rank also has a child in its own group and one that left for a session of its own, which ignores
# every polite signal; `up` is printed when both run.
FAMILY = """
import os, signal, subprocess, sys
code = "import signal, sys; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print('x', flush=True); "
code += "signal.pause()"
for away in (False, True):
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=away)
    child.stdout.readline()
"""
NUM_FAMILY = 3  # the rank and its two children
WAIT = "print('up', flush=True)\nsignal.pause()\n"


@pytest.fixture
def family(tmp_path: Path) -> str:
    return write_script(tmp_path, FAMILY + WAIT)


def wait_until_up(launched: Launched, num_ranks: int = 2) -> None:
    for rank in range(num_ranks):
        launched.stdout.wait_for(rf"^\[{rank}\] up$")


def rank_pids(launched: Launched) -> list[int]:
    """In order of rank: that is how they are forked."""
    return sorted(children(launched.server_pid))


def test_the_launcher_is_killed(family):
    with Launched("-n", "2", family) as launched:
        wait_until_up(launched)
        assert len(launched.left_behind()) == 2 + 2 * NUM_FAMILY, "launcher, server, two families"
        launched.process.kill()
        launched.wait_until_nothing_is_left()


@pytest.fixture
def still_importing(tmp_path: Path) -> Iterator[Launched]:
    """A launch whose server is stuck in an import, as it is for two seconds in torch's."""
    stuck = "import sys, signal; print('importing', file=sys.stderr, flush=True); signal.pause()"
    write_script(tmp_path, stuck, "slow.py")
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    with Launched("-n", "2", write_script(tmp_path, ""), preload="slow", PYTHONPATH=path) as launched:
        launched.stderr.wait_for("importing")
        yield launched


def test_the_launcher_is_killed_while_the_server_still_imports(still_importing):
    still_importing.process.kill()
    still_importing.wait_until_nothing_is_left()


def test_ctrl_c_while_the_server_still_imports(still_importing):
    still_importing.send(signal.SIGINT)
    assert still_importing.finish() == 130


def test_the_fork_server_is_killed(family):
    with Launched("-n", "2", family) as launched:
        wait_until_up(launched)
        server = launched.server_pid
        os.kill(server, signal.SIGKILL)
        assert launched.finish() == 1
        assert launched.stderr.text == (
            f"parallel3d: the fork server (pid {server}) ended too early (killed by SIGKILL); "
            "the ranks depend on it and have been ended\n"
        )


async def test_the_fork_server_of_an_async_app_is_killed(tmp_path):
    """Such an app is no subreaper, and orphans that left for a session of their own are still found."""
    script = write_script(
        tmp_path,
        FAMILY + "from runtime.control import rank_control\nrank_control().send('up')\nsignal.pause()\n",
    )
    mark = uuid.uuid4().hex
    up = asyncio.Semaphore(0)
    spec = LaunchSpec(Target(script), 2, environment={MARK: mark})
    async with asyncio.timeout(SECONDS):
        running = asyncio.create_task(launch(spec, on_message=lambda *_: up.release()))
        await up.acquire()
        await up.acquire()
        assert len(marked(MARK, mark)) == 1 + 2 * NUM_FAMILY
        (server,) = set(children(os.getpid())) & set(marked(MARK, mark))
        os.kill(server, signal.SIGKILL)
        with pytest.raises(LaunchError, match=r"ended too early \(killed by SIGKILL\)"):
            await running
    assert marked(MARK, mark) == []


def test_launcher_and_server_are_killed_together_and_ranks_die_with_them(tmp_path):
    script = write_script(tmp_path, "import signal\n" + WAIT)
    with Launched("-n", "2", script) as launched:
        wait_until_up(launched)
        server = launched.server_pid
        os.kill(launched.process.pid, signal.SIGSTOP)  # so that it can't help
        os.kill(server, signal.SIGKILL)
        launched.process.kill()
        launched.wait_until_nothing_is_left()


def test_a_rank_is_killed(family):
    with Launched("-n", "3", family) as launched:
        wait_until_up(launched, 3)
        os.kill(rank_pids(launched)[1], signal.SIGKILL)
        assert launched.finish() == 137
        assert launched.stderr.text == (
            "parallel3d: rank 1 failed first: killed by SIGKILL\nparallel3d: 2 other ranks were stopped.\n"
        )


@pytest.mark.slow
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        if os.environ["RANK"] == "0":
            os.read(os.open(os.environ["FIFO"], os.O_RDONLY), 1)
            raise SystemExit(5)
        while True:
            signal.pause()
        """,
    )
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with Launched("-n", "2", script, FIFO=str(fifo)) as launched:
        wait_until_up(launched)
        fifo.write_text("go")
        assert launched.finish() == 5
        assert launched.stderr.text.startswith("parallel3d: rank 0 failed first: exited with code 5\n")


def test_a_rank_that_ends_well_but_leaves_a_daemon(tmp_path):
    script = write_script(tmp_path, FAMILY + "print('done')\nos._exit(0)\n")
    with Launched("-n", "2", script) as launched:
        assert launched.finish() == 0
        assert sorted(launched.stdout.text.splitlines()) == ["[0] done", "[1] done"]


TIDY = """
import os, signal, time
try:
    print("up", flush=True)
    while True:  # not pause(): a signal just before it would go unnoticed
        time.sleep(0.05)
finally:
    print("tidied", flush=True)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_one_signal_is_orderly(tmp_path, number, code):
    with Launched("-n", "2", write_script(tmp_path, TIDY)) as launched:
        wait_until_up(launched)
        launched.send(number)
        assert launched.finish() == code
        assert launched.stdout.text.count("tidied") == 2
        assert launched.stderr.text == f"parallel3d: interrupted by {number.name}; all ranks have ended.\n"


def test_what_fails_while_tidying_is_shown(tmp_path):
    with Launched("-n", "1", write_script(tmp_path, TIDY + "    1 / 0\n")) as launched:
        wait_until_up(launched, 1)
        launched.send(signal.SIGINT)
        assert launched.finish() == 130
        assert "parallel3d: rank 0 failed: ZeroDivisionError: division by zero\n" in launched.stderr.text


STUBBORN = (
    FAMILY
    + """
import time

def refuse(*_):
    print("refused", flush=True)

signal.signal(signal.SIGINT, refuse)
print("up", flush=True)
while True:
    time.sleep(0.05)
"""
)


def test_ctrl_c_twice_ends_ranks_that_refuse(tmp_path):
    with Launched("-n", "2", "--grace", "100", write_script(tmp_path, STUBBORN)) as launched:
        wait_until_up(launched)
        launched.send(signal.SIGINT)
        for rank in range(2):
            launched.stdout.wait_for(rf"^\[{rank}\] refused$")
        second = time.monotonic()
        launched.send(signal.SIGINT)
        assert launched.finish() == 130
        assert time.monotonic() - second < SECONDS / 2
        assert launched.stderr.text.count("had not stopped yet and was killed") == 2


def test_ranks_that_refuse_are_killed_after_the_grace(tmp_path):
    with Launched("-n", "2", "--grace", "0.3", write_script(tmp_path, STUBBORN)) as launched:
        wait_until_up(launched)
        launched.send(signal.SIGINT)
        assert launched.finish() == 130
        assert launched.stdout.text.count("refused") == 2


def test_nohup_is_respected(tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched = Launched("-n", "1", write_script(tmp_path, TIDY))
    finally:
        signal.signal(signal.SIGHUP, previous)
    with launched:
        wait_until_up(launched, 1)
        launched.send(signal.SIGHUP)
        launched.send(signal.SIGTERM)
        assert launched.finish() == 143


def test_the_terminals_ctrl_c_reaches_ranks_only_through_the_launcher(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        print("up", flush=True)
        sender = signal.sigtimedwait([signal.SIGINT], 30).si_pid
        try:
            os.open("/dev/tty", os.O_RDWR)
        except OSError:
            print("by the server" if sender == os.getppid() else sender, "without terminal", flush=True)
        """,
    )
    mark = uuid.uuid4().hex
    pid, fd = pty.fork()
    if pid == 0:
        _exec_launch(mark, "-n", "2", script)
    terminal = Stream(fd)
    for rank in range(2):
        terminal.wait_for(rf"\[{rank}\]\x1b\[0m up")
    os.write(fd, b"\x03")
    for rank in range(2):  # on a terminal ranks are coloured
        terminal.wait_for(rf"\x1b\[\d+m\[{rank}\]\x1b\[0m by the server without terminal")
    terminal.wait_for("interrupted by SIGINT")
    wait_for_end(pid, time.monotonic() + SECONDS)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(fd)
    assert marked(MARK, mark) == []


def _exec_launch(mark: str, *args: str) -> None:
    command = [sys.executable, "-m", "parallel3d", "launch", "--preload", "", *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark}
    environment.pop("NO_COLOR", None)
    os.execve(sys.executable, command, environment)


def test_the_first_failure_is_shown_first_and_its_consequences_after(tmp_path):
    script = write_script(
        tmp_path,
        """
        import atexit, os, signal
        from runtime.control import rank_control
        from runtime.errors import PeerLost
        rank = int(os.environ["RANK"])
        rank_control().send("mesh", coords=[0, rank // 2, rank % 2])
        print("up", flush=True)
        if rank in (0, 2):
            os.read(os.open(os.environ["FIFO"] + str(rank), os.O_RDONLY), 1)
        if rank == 0:  # hears of the loss before the rank at fault has said a word
            atexit.register(print, "gone", flush=True)
            raise PeerLost("rank 2 left during all_reduce", rank=2)
        if rank == 2:
            raise ValueError("the cause")
        signal.pause()
        """,
    )
    fifos = [tmp_path / "fifo0", tmp_path / "fifo2"]
    for fifo in fifos:
        os.mkfifo(fifo)
    with Launched("-n", "4", script, FIFO=str(tmp_path / "fifo")) as launched:
        wait_until_up(launched, 4)
        fifos[0].write_text("go")
        launched.stdout.wait_for(r"^\[0\] gone$")
        fifos[1].write_text("go")
        assert launched.finish() == 1
        lines = launched.stderr.text.splitlines()
        assert lines[0] == "parallel3d: rank 2 (dp=0 tp=1 pp=0) failed first: ValueError: the cause"
        assert lines[1] == "Traceback (most recent call last):"
        assert lines[-2] == "parallel3d: rank 0 (dp=0 tp=0 pp=0): PeerLost: rank 2 left during all_reduce"
        assert lines[-1] == "parallel3d: 2 other ranks were stopped."


def test_all_that_a_killed_rank_printed_is_delivered(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, signal
        for number in range(5000):
            os.write(1, b"%d\\n" % number)
        os.write(1, b"last words")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    with Launched("-n", "1", "--log-dir", str(tmp_path), script) as launched:
        assert launched.finish() == 137
        lines = [*map(str, range(5000)), "last words"]
        assert launched.stdout.text.splitlines() == [f"[0] {line}" for line in lines]
        assert (tmp_path / "rank0.log").read_text() == "\n".join(lines)


def test_a_reader_that_leaves_does_not_stop_the_ranks(tmp_path):
    script = write_script(tmp_path, "for n in range(50_000): print(n)\nopen(__file__ + '.done', 'w').close()")
    with Launched("-n", "1", script) as launched:
        launched.stdout.wait_for(r"^\[0\] 0$")
        assert launched.process.stdout is not None
        os.dup2(os.open(os.devnull, os.O_RDONLY), launched.process.stdout.fileno())
        assert launched.finish() == 0
        assert Path(script + ".done").exists()


def test_nothing_of_the_launch_is_on_disk_or_in_shared_memory(tmp_path, family):
    before = set(os.listdir("/dev/shm"))
    with Launched("-n", "2", family, TMPDIR=str(tmp_path)) as launched:
        wait_until_up(launched)
        launched.process.kill()
        launched.wait_until_nothing_is_left()
    assert set(os.listdir("/dev/shm")) <= before
    assert os.listdir(tmp_path) == ["script.py"]
