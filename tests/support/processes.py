"""Starts real launches and other programs in tests, waits for what they print, and finds what they leave.

Every process of a launch inherits a mark in its environment, so that none can hide.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from runtime.launch.processes import marked

ROOT = Path(__file__).resolve().parents[2]
MARK = "PARALLEL3D_TEST_MARK"
SECONDS = 60.0  # a deadline, not an expectation: most waits end within milliseconds


class Stream:
    """A pipe that is read with a deadline; keeps all it has seen."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen = bytearray()
        os.set_blocking(fd, False)

    @property
    def text(self) -> str:
        return self._seen.decode("utf-8", "surrogateescape")

    @property
    def data(self) -> bytes:
        return bytes(self._seen)

    def wait_for(self, pattern: str, seconds: float = SECONDS) -> re.Match[str]:
        """The first match in all that has come so far; waits for it."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.text, re.MULTILINE)) is None:
            if not self._read(deadline):
                raise AssertionError(f"{pattern!r} never came; there was:\n{self.text}")
        return found

    def read_all(self, seconds: float = SECONDS) -> str:
        """Everything up to the end of the stream."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.text

    def _read(self, deadline: float) -> bool:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise AssertionError(f"nothing more came in time; there was:\n{self.text}")
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # how a terminal says that its last user has left
            data = b""
        self._seen += data
        return bool(data)


class Started:
    """One Python process, with all that it starts. `inside`: a command that starts it elsewhere."""

    def __init__(self, *command: str, cwd: Path | None = None, inside: Sequence[str] = (), **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [*inside, sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={**inherited, "PYTHONPATH": str(ROOT), MARK: self.mark, **environment},
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.stdout = Stream(self.process.stdout.fileno())
        self.stderr = Stream(self.process.stderr.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        left = self.left_behind()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(SECONDS)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self, seconds: float = SECONDS) -> int:
        """The exit code, after all output was read; and at that moment no process may be left."""
        self.stdout.read_all(seconds)
        self.stderr.read_all()
        code = self.process.wait(SECONDS)
        assert self.left_behind() == []
        return code

    def left_behind(self) -> list[int]:
        return marked(MARK, self.mark)

    def wait_until_nothing_is_left(self, seconds: float = SECONDS) -> None:
        """For a launcher that was killed itself: the others need a moment, but not long."""
        deadline = time.monotonic() + seconds
        while left := self.left_behind():
            for pid in left:
                wait_for_end(pid, deadline)


class Launched(Started):
    """One `parallel3d launch` as a process of its own."""

    def __init__(self, *args: str, preload: str | None = "", cwd: Path | None = None, **environment: str) -> None:
        hidden = [] if preload is None else ["--preload", preload]
        super().__init__("-m", "parallel3d", "launch", *hidden, *args, cwd=cwd, **environment)

    @property
    def server_pid(self) -> int:
        """The fork server: the launcher's only child."""
        (pid,) = children(self.process.pid)
        return pid


def wait_for_end(pid: int, deadline: float) -> None:
    """Until this process has ended, by its pidfd."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(max(0.0, deadline - time.monotonic()) * 1000), f"process {pid} is still there"
    finally:
        os.close(fd)


def children(pid: int) -> list[int]:
    """Direct children, as /proc tells."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(name))
    return found


def abandoned_memory() -> set[str]:
    """Files in /dev/shm that no process has open or mapped: other runs may use theirs meanwhile."""
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    for process in Path("/proc").glob("[0-9]*") if found else ():
        with suppress(OSError):  # it has ended meanwhile
            found -= {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
            found -= {os.path.realpath(fd) for fd in (process / "fd").iterdir()}
    return {path for path in found if os.path.exists(path)}


def reset_signals() -> None:
    """Signals as Python expects them at its start: `nohup` ignores SIGHUP, a shell's `&` SIGINT and SIGQUIT, and all
    processes below would inherit that. (SIGPIPE is set by Python itself, whatever it inherits.)"""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def write_script(folder: Path, source: str, name: str = "script.py") -> str:
    """A script in this folder; its path."""
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return str(path)
