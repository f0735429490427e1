"""MPI on this machine: whether it can be measured, and how its ranks are started and ended. No torch.

mpirun runs under a process of this module (`guard`), so that MPI's ranks end in order even if the bench process dies.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.launch.fork_client import HOME
from runtime.launch.processes import die_with_parent

DTYPES = ("float32", "float64", "int32", "int64", "int8", "uint8")  # of both numpy and MPI
_LEAVE_SECONDS = 5.0
_TERMINATE_SECONDS = 2 * _LEAVE_SECONDS
_ERROR_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Mpi:
    """A usable mpirun."""

    mpirun: str
    version: str

    def command(self, num_ranks: int) -> list[str]:
        """The command before the program; only Open MPI limits ranks to cores and refuses root."""
        is_open_mpi = "Open MPI" in self.version
        as_root = ["--allow-run-as-root"] if is_open_mpi and os.geteuid() == 0 else []
        return [self.mpirun, *as_root, *(["--oversubscribe"] if is_open_mpi else []), "-n", str(num_ranks)]


def find_mpi(dtype: str) -> Mpi | str:
    """MPI, or the reason why it can't be measured, with the remedy."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return "there is no mpirun on PATH. Install Open MPI (such as apt install openmpi-bin) and pip install mpi4py."
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed. pip install mpi4py."
    if dtype not in DTYPES:
        return f"it has no {dtype}. Choose --dtype {', '.join(DTYPES[:-1])} or {DTYPES[-1]}."
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{mpirun} --version failed: {error}. Repair the installation."
    return Mpi(mpirun, next(iter(done.stdout.splitlines()), "").strip())


async def run_mpi(mpi: Mpi, num_ranks: int, folder: Path, *args: str) -> str:
    """Run MPI's ranks to their end; returns why they failed, or "". Cancelling it ends them."""
    program = [sys.executable, "-m", "parallel3d.benchmarks.mpi_rank", *args]
    said = folder / "mpirun.txt"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (HOME, os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",  # no file of the current folder may hide a module
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),  # Open MPI keeps a folder for each run there
    }
    with said.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "parallel3d.benchmarks.mpirun", str(os.getpid())),
            *(*mpi.command(num_ranks), *program),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is for this process alone
        )
    try:
        code = await process.wait()
    finally:
        await _end(process)
    return said.read_bytes()[-_ERROR_BYTES:].decode(errors="replace").strip() or f"exit {code}" if code else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_TERMINATE_SECONDS):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()  # mpirun and its ranks end with the other descendants of the bench process
        await process.wait()


def guard(parent: int, command: list[str]) -> int:
    """Run mpirun to its end; on SIGTERM, sent or because `parent` died, let its ranks leave first.

    MPI's ranks leave by themselves once the bench process has closed its sockets, and then remove their shared memory.
    An mpirun that gets SIGTERM before that may leave it in /dev/shm, so it gets one only when they take too long.
    """
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        die_with_parent(parent, signal.SIGTERM)
        return process.wait()
    except KeyboardInterrupt:
        try:
            return process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.wait()


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
