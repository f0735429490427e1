"""Finds MPI on this machine, and starts and stops its ranks. Doesn't import torch.

mpirun runs under a process of this module (`guard`), so that its ranks exit cleanly even if the bench process dies.
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

DTYPES = ("float32", "float64", "int32", "int64", "int8", "uint8")  # supported by both numpy and MPI
_LEAVE_SECONDS = 5.0
_TERMINATE_SECONDS = 2 * _LEAVE_SECONDS
_ERROR_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Mpi:
    """An mpirun executable and its version line."""

    mpirun: str
    version: str

    def command(self, num_ranks: int) -> list[str]:
        """The mpirun arguments to put before the program. Only Open MPI needs flags for more ranks than cores and for
        root."""
        is_open_mpi = "Open MPI" in self.version
        as_root = ["--allow-run-as-root"] if is_open_mpi and os.geteuid() == 0 else []
        return [self.mpirun, *as_root, *(["--oversubscribe"] if is_open_mpi else []), "-n", str(num_ranks)]


def find_mpi(dtype: str) -> Mpi | str:
    """The MPI to measure, or the reason why it can't be measured, with the remedy."""
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
    """Run the MPI ranks until they exit; returns why they failed, or "". Cancelling stops them."""
    program = [sys.executable, "-m", "parallel3d.benchmarks.mpi_rank", *args]
    said = folder / "mpirun.txt"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (HOME, os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",  # files in the current folder must not shadow modules
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),  # Open MPI creates its session folder there
    }
    with said.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "parallel3d.benchmarks.mpirun", str(os.getpid())),
            *(*mpi.command(num_ranks), *program),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must reach only the bench process
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
            process.kill()  # mpirun and its ranks are killed with the bench process's other descendants
        await process.wait()


def guard(parent: int, command: list[str]) -> int:
    """Run mpirun until it exits. On SIGTERM, also sent when `parent` dies, give its ranks time to exit first.

    The MPI ranks exit when the bench process closes its sockets, and then remove their shared memory. An mpirun that
    gets SIGTERM before that may leave files in /dev/shm, so it is terminated only if the ranks take too long.
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
