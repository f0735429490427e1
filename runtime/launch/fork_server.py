"""The fork server: a process that has imported everything and forks a rank on each request.

Before a fork it only imports: no tensor operation, autograd, CUDA call, thread or event loop.
It talks to the launcher over a SOCK_SEQPACKET pair, in JSON records that may carry descriptors.
When the launcher closes its end or dies, it ends all of its descendants and itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from runtime.control import CONTROL_FD, RANK_PID, rank_control
from runtime.launch import processes
from runtime.launch.script import Target, run_target

STORE_FD = "PARALLEL3D_STORE_FD"
MAX_RECORD_BYTES = 64 * 1024
NUM_RANK_FDS = 4  # stdout, stderr, control, store


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of a launch have in common; the server reads it once."""

    home: str
    """The folder of our packages."""
    before_script: str | None
    """A hook `module:function` called in each rank before the script."""
    target: Target

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(data: bytes) -> Job:
        fields = json.loads(data)
        target = fields.pop("target")
        return Job(**fields, target=Target(target["name"], target["is_module"], tuple(target["args"])))


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A rank to fork: what differs between ranks."""

    rank: int
    environment: Mapping[str, str]
    fds: tuple[int, ...]


class ForkServer:
    """Serves requests in the main thread until the launcher is gone; in a forked child, until it is a rank."""

    def __init__(self, connection: socket.socket, job_fd: int) -> None:
        self._connection, self._job_fd = connection, job_fd
        self._job: Job | None = None
        self._pids: dict[int, int] = {}  # rank by pid, of each child that is not reaped
        self._wakeup, self._wakeup_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._launcher_is_gone = False

    def serve(self) -> tuple[Job, RankRequest] | None:
        """None when the launcher is gone. Returns in each forked child too, with what that runs."""
        self._catch_signals()
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        poller.register(self._wakeup, select.POLLIN)
        self._send("ready")
        while not self._launcher_is_gone:
            ready = {fd for fd, _ in poller.poll()}  # returns at the latest when the launcher ends
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
            self._reap()
            if self._connection.fileno() in ready:
                request = self._handle_record()
                if request is not None:
                    assert self._job is not None
                    return self._job, request
        return None

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._launcher_died)  # sent because of die_with_parent
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _launcher_died(self, *_: object) -> None:
        self._launcher_is_gone = True

    def _send(self, event: str, **fields: object) -> None:
        try:
            self._connection.send(json.dumps({"event": event, **fields}).encode())
        except OSError:
            self._launcher_is_gone = True

    def _reap(self) -> None:
        for pid, status in processes.reap():
            rank = self._pids.pop(pid, None)
            if rank is not None:  # others are orphans, which become children of a subreaper
                code = os.waitstatus_to_exitcode(status)
                self._send("ended", rank=rank, code=code, time=time.monotonic())

    def _handle_record(self) -> RankRequest | None:
        try:
            data, fds, _, _ = socket.recv_fds(self._connection, MAX_RECORD_BYTES, NUM_RANK_FDS)
        except OSError:
            data, fds = b"", []
        if not data:
            self._launcher_is_gone = True
            return None
        for fd in fds:  # or programs that a rank starts would get them; recv_fds ignores its flag for that
            os.set_inheritable(fd, False)
        record = json.loads(data)
        if record["request"] == "job":
            with open(self._job_fd, "rb") as file:
                self._job = Job.from_json(file.read())
            return None
        if record["request"] == "fork":
            return self._fork(RankRequest(record["rank"], record["environment"], tuple(fds)))
        self._signal(record["ranks"], record["signal"], record["whole_group"])
        return None

    def _signal(self, ranks: list[int], number: int, whole_group: bool) -> None:
        """Signal only ranks that are not reaped: their pids cannot be reused yet."""
        for pid, rank in self._pids.items():
            if rank in ranks:
                try:
                    (os.killpg if whole_group else os.kill)(pid, number)
                except ProcessLookupError:  # it moved to another group
                    os.kill(pid, number)

    def _fork(self, request: RankRequest) -> RankRequest | None:
        # Signals are blocked until the child has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._send("fork_failed", rank=request.rank, message=str(error))
            pid = -1
        if pid == 0:
            self._become_rank(server_pid)
            return request
        for fd in request.fds:
            os.close(fd)
        if pid > 0:
            self._pids[pid] = request.rank
            with suppress(OSError):  # the child does it too; one of them is first
                os.setpgid(pid, pid)
            self._send("started", rank=request.rank, pid=pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return None

    def _become_rank(self, server_pid: int) -> None:
        processes.die_with_parent(server_pid, signal.SIGKILL)
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        self._connection.close()
        os.close(self._wakeup)
        os.close(self._wakeup_writer)


class PreloadError(Exception):
    """A module to preload cannot be imported; the cause says why."""


def preload(names: Sequence[str]) -> None:
    """Import these modules; without the garbage collector that is about a third faster."""
    gc.disable()
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            raise PreloadError(name) from error
    gc.enable()
    gc.freeze()  # so that collections in ranks do not copy pages that ranks share


def _run_rank(job: Job, request: RankRequest) -> None:
    stdout, stderr, control, store = request.fds
    for fd, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    own = {RANK_PID: str(os.getpid()), CONTROL_FD: str(control), STORE_FD: str(store)}
    os.environ.update({**request.environment, **own})
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _reseed_numpy()
    _restore_import_path(job.home)

    def before() -> None:
        _reset_signals()  # here, because a SIGINT raises from now on
        if job.before_script is not None:
            module, _, function = job.before_script.partition(":")
            getattr(importlib.import_module(module), function)()

    run_target(job.target, before, rank_control())


def _reset_signals() -> None:
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _reseed_numpy() -> None:
    """A fork copies numpy's global generator; Python's `random` reseeds itself."""
    module: Any = sys.modules.get("numpy.random")
    if module is not None:
        module.seed()


def _restore_import_path(home: str) -> None:
    """Move the folder of our packages to the end of the path, unless the user's path has it anyway."""
    sys.path.remove(home)
    if home not in sys.path:
        sys.path.append(home)


def main() -> None:
    """Import, then serve. Arguments: launcher's pid, connection, job file, modules to import."""
    launcher_pid, connection_fd, job_fd = map(int, sys.argv[1:4])
    connection = socket.socket(fileno=connection_fd)
    for fd in (connection_fd, job_fd):
        os.set_inheritable(fd, False)
    processes.die_with_parent(launcher_pid, signal.SIGTERM)
    processes.become_subreaper()
    try:
        preload(sys.argv[4:])
    except PreloadError as error:
        text = "".join(traceback.format_exception(error.__cause__))[-MAX_RECORD_BYTES // 8 :]
        failed = {"event": "preload_failed", "module": str(error), "traceback": text}
        connection.send(json.dumps(failed).encode())
        raise SystemExit(1) from None
    work = ForkServer(connection, job_fd).serve()
    if work is not None:
        _run_rank(*work)
    else:
        processes.end_descendants()
        os._exit(0)  # skips torch's slow finalisation; nothing else is left to finalise
