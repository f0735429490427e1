"""A launch's settings and result, and the start of its fork server. No asyncio: its import would delay that start."""

from __future__ import annotations

import importlib.machinery
import math
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runtime.cores import threads_per_rank
from runtime.errors import LaunchError
from runtime.launch.failures import Failure, render, render_interrupted
from runtime.launch.fork_client import HOME, ForkClient
from runtime.launch.fork_server import Job
from runtime.launch.script import Target

RUN_ID = "PARALLEL3D_RUN_ID"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Settings of a launch."""

    target: Target
    num_ranks: int
    preload: tuple[str, ...] = ()
    """Modules to import once, before the ranks are forked."""
    before_script: str | None = None
    """`module:function`, called in each rank before the script runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    interrupt_grace: float = 10.0
    """Seconds for ranks to end after one Ctrl-C."""
    start_timeout: float = 120.0
    """Seconds from the start until the last rank is forked."""
    log_dir: Path | None = None
    with_prefix: bool = True
    only: frozenset[int] | None = None
    """Ranks shown on the console; None: all."""
    stdout_to_stderr: bool = False
    """Show the ranks' stdout on stderr: stdout is for the launcher's own data."""

    def check(self) -> None:
        """Raise LaunchError if a setting is wrong, before a process starts."""
        if self.num_ranks < 1:
            raise LaunchError(f"-n {self.num_ranks}: at least one rank is needed")
        if not math.isfinite(self.interrupt_grace) or self.interrupt_grace < 0:
            raise LaunchError(f"--grace {self.interrupt_grace}: seconds, 0 or more, are needed")
        name = self.target.name
        if self.target.is_module:
            top = name.partition(".")[0]
            if not _is_importable(top):
                raise LaunchError(f"no module named {top!r} here or on the import path")
        elif os.path.isdir(name):
            raise LaunchError(f"{name} is a directory; name the script in it")
        elif not os.path.exists(name):
            raise LaunchError(f"there is no script {name} (seen from {os.getcwd()})")
        elif not os.access(name, os.R_OK):
            raise LaunchError(f"{name} can't be read: permission denied")


def _is_importable(top: str) -> bool:
    """As for `python -m`: also from the current folder, and by the finders of editable installs."""
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None:
        return True
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)


def parse_ranks(text: str, num_ranks: int) -> frozenset[int]:
    """The ranks in a list such as `0,3-5`."""
    ranks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        if found is None:
            raise LaunchError(f"--only {text!r} is not a list of ranks such as 0 or 0,3-5")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise LaunchError(f"--only {text!r}: {part.strip()} runs backwards")
        if last >= num_ranks:
            whole = f"the last of {num_ranks} is {num_ranks - 1}"
            raise LaunchError(f"--only {text!r}: there is no rank {last}; {whole}")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def open_logs(folder: Path, num_ranks: int) -> list[int]:
    """Descriptors of one empty log file per rank."""
    fds: list[int] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(num_ranks):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            fds.append(os.open(folder / f"rank{rank}.log", flags, 0o666))
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise LaunchError(f"log files can't be written in {folder}: {error.strerror} ({error.filename})") from error
    return fds


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a launch ended."""

    run_id: str
    exit_code: int
    """0, or the root failure's, or 128 + n if signal n interrupted the launch."""
    root: Failure | None
    failures: tuple[Failure, ...]
    interrupted_by: signal.Signals | None

    @property
    def report(self) -> str:
        """Text for people, with the root failure first; empty if no rank failed."""
        if self.interrupted_by is not None:
            return render_interrupted(self.interrupted_by, self.failures)
        return render(self.root, self.failures) if self.root else ""


@dataclass(frozen=True, slots=True)
class WarmServer:
    """A fork server that is importing and has no job yet."""

    run_id: str
    server: ForkClient

    def discard(self) -> None:
        """End it unused."""
        self.server.close()
        self.server.wait(10.0)


@dataclass(frozen=True, slots=True)
class Started:
    """A launch whose fork server is importing."""

    spec: LaunchSpec
    run_id: str
    server: ForkClient
    logs: tuple[int, ...]
    """One log file per rank, or none."""
    store: int
    """The file of the ranks' rendezvous: in memory, so that nothing is left behind."""


def prepare(spec: LaunchSpec) -> tuple[int, ...]:
    """Check the settings and open the log files, before a process starts."""
    spec.check()
    return tuple(open_logs(spec.log_dir, spec.num_ranks)) if spec.log_dir else ()


def warm_up(num_ranks: int, preload: tuple[str, ...], environment: Mapping[str, str]) -> WarmServer:
    """Start the fork server: first, because it takes the longest."""
    run_id = os.urandom(4).hex()
    environment = {**environment, RUN_ID: run_id}
    # libgomp reads it once, when torch is loaded.
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_ranks)))
    return WarmServer(run_id, ForkClient(preload, environment))


def start(spec: LaunchSpec, logs: tuple[int, ...], warm: WarmServer | None = None) -> Started:
    """Give a fork server, `warm` or a new one, its job."""
    try:
        if warm is None:
            warm = warm_up(spec.num_ranks, spec.preload, {**os.environ, **spec.environment})
    except LaunchError:
        for fd in logs:
            os.close(fd)
        raise
    warm.server.give(Job(HOME, spec.before_script, spec.target))
    return Started(spec, warm.run_id, warm.server, logs, os.memfd_create("parallel3d-store"))
