"""MPI on this machine: whether it can be measured, and how its ranks are started. No torch."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel3d.benchmarks.mpi_guard import LEAVE_SECONDS
from runtime.launch.fork_client import HOME

DTYPES = ("float32", "float64", "int32", "int64", "int8", "uint8")  # what both numpy and MPI know
_TERMINATE_SECONDS = 2 * LEAVE_SECONDS
_ERROR_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Mpi:
    """An mpirun that can be used."""

    mpirun: str
    version: str

    def command(self, num_ranks: int) -> list[str]:
        """The words before the program; only Open MPI counts cores and minds who runs it."""
        is_open_mpi = "Open MPI" in self.version
        as_root = ["--allow-run-as-root"] if is_open_mpi and os.geteuid() == 0 else []
        return [self.mpirun, *as_root, *(["--oversubscribe"] if is_open_mpi else []), "-n", str(num_ranks)]


def find_mpi(dtype: str) -> Mpi | str:
    """MPI, or why it can't be measured and what would bring it."""
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
    """Run MPI's ranks to their end; returns why they failed, or nothing. Cancelling it ends them."""
    program = [sys.executable, "-m", "parallel3d.benchmarks.mpi_rank", *args]
    said = folder / "mpirun.txt"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (HOME, os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",  # a file of the user's here shall hide no module
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),  # where Open MPI keeps a folder for each run
    }
    with said.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "parallel3d.benchmarks.mpi_guard", str(os.getpid())),
            *(*mpi.command(num_ranks), *program),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
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
            process.kill()  # mpirun, now an orphan, and its ranks end with the bench process's other descendants
        await process.wait()
