"""Real ranks without a launcher, for tests that end some of them: nobody stops the others.

A fork server that has torch loaded starts them, so that a mesh of four stands within a second.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.support.processes import SECONDS

_context = multiprocessing.get_context("forkserver")
atexit.register(forkserver._forkserver._stop)  # it would end by itself, but only after this process has
_gradients = ["runtime.gradient_server.server", "runtime.gradient_server.client.worker"]
_context.set_forkserver_preload(["__main__", "torch", "parallel3d.rank_mesh", "runtime.loop", *_gradients, __name__])

NETWORK = "PARALLEL3D_TEST_NETWORK"  # the file of the network namespace a rank lives in
_CLONE_NEWNET = 0x40000000
_random = random.SystemRandom()  # tests begin with the same seed

Tell = Callable[[object], None]
Main = Callable[..., Coroutine[Any, Any, None]]


def free_port() -> int:
    """Below those that the system gives to whoever asks for any, so that nobody gets it by chance meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", _random.randrange(lowest // 2, lowest)))
            return int(sock.getsockname()[1])


def torch_variables(world_size: int, **more: str) -> list[dict[str, str]]:
    """What torchrun would set for each rank; rank 0 serves the store."""
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **more,
        }
        for rank in range(world_size)
    ]


def slurm_variables(world_size: int, num_nodes: int = 1, **more: str) -> list[dict[str, str]]:
    """What srun would set for each task; their number is the same on each node."""
    per_node = world_size // num_nodes
    return [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(world_size),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_NNODES": str(num_nodes),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{num_nodes})" if num_nodes > 1 else str(per_node),
            **more,
        }
        for rank in range(world_size)
    ]


class Rank:
    """One process that runs `main(tell, *args)`; what it tells arrives in `hear`, its error last."""

    def __init__(
        self,
        main: Main,
        args: Sequence[object],
        environment: Mapping[str, str],
    ) -> None:
        self._ear, mouth = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_live, args=(mouth, main, args, dict(environment)), daemon=True)
        self._process.start()
        mouth.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def hear(self, seconds: float = SECONDS) -> Any:
        """The next word; an exception that ended the rank is raised here."""
        assert self._ear.poll(seconds), f"rank process {self.pid} said nothing within {seconds} s"
        word = self._ear.recv()
        if isinstance(word, BaseException):
            raise word
        return word

    def send(self, number: signal.Signals) -> float:
        """Signal it; the moment on the clock that all processes share."""
        moment = time.monotonic()
        os.kill(self.pid, number)
        return moment

    def finish(self, seconds: float = SECONDS) -> int | None:
        """Its exit code, minus the signal's number where one killed it."""
        self._process.join(seconds)
        assert not self._process.is_alive(), f"rank process {self.pid} has not ended within {seconds} s"
        return self._process.exitcode

    def close(self) -> None:
        self._process.kill()
        self._process.join(SECONDS)
        self._process.close()
        self._ear.close()


class Ranks(list[Rank]):
    """One rank for each environment; all are gone at the end of the `with`."""

    def __init__(
        self,
        main: Main,
        environments: Sequence[Mapping[str, str]],
        args: Sequence[object] = (),
    ) -> None:
        super().__init__(Rank(main, args, environment) for environment in environments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self:
            rank.close()


def _live(
    mouth: Connection,
    main: Main,
    args: Sequence[object],
    environment: Mapping[str, str],
) -> None:
    """What a rank process does."""
    os.environ.update(environment)
    if NETWORK in environment:
        _enter_network(environment[NETWORK])
    tempfile.tempdir = None  # found again, from this rank's TMPDIR
    import parallel3d

    try:
        parallel3d.run(lambda: main(mouth.send, *args))
    except Exception as error:
        mouth.send(error)
        raise SystemExit(1) from None


def _enter_network(path: str) -> None:
    """For this thread and all it will start: nothing of ours may have made a socket yet. Python 3.12 has os.setns."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", path)
    finally:
        os.close(fd)
