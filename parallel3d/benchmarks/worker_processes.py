"""The worker processes of each contestant: started once, they run commands sent by the bench process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from parallel3d.benchmarks.worker import Command
from runtime.errors import BenchmarkError
from runtime.launch.launch import launch
from runtime.launch.script import Target
from runtime.launch.spec import LaunchSpec

Run = Callable[[], Coroutine[Any, Any, str]]
"""Runs the processes until they exit; returns why they failed, or "". Cancelling stops them."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_READY_SECONDS = 120.0
_ANSWER_SECONDS = 600.0
_LEAVE_SECONDS = 20.0
_GRACE_SECONDS = 2.0
_PRELOAD = ("torch", "torch.distributed", "numpy", "uvloop", "parallel3d.rank_mesh", "parallel3d.benchmarks.plan")


async def run_launched(module: str, num_ranks: int, *args: str) -> str:
    """Launch a module of this package as ranks, as `parallel3d launch` does; returns the failure report, or ""."""
    # PYTHONSAFEPATH: files in the current folder must not shadow modules.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONSAFEPATH": "1"}
    target = Target(f"parallel3d.benchmarks.{module}", is_module=True, args=args)
    spec = LaunchSpec(target, num_ranks, _PRELOAD, environment=environment, interrupt_grace=_GRACE_SECONDS)
    return (await launch(spec)).report


class Listener:
    """The Unix socket, in a private folder, to which all ranks connect."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bench"
        self._awaited: dict[tuple[str, int], asyncio.Future[Connection]] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.path.unlink(missing_ok=True)

    def expect(self, workers: str, num_ranks: int) -> list[asyncio.Future[Connection]]:
        """One future per rank, set when that rank connects."""
        loop = asyncio.get_running_loop()
        keys = [(workers, rank) for rank in range(num_ranks)]
        self._awaited.update((key, loop.create_future()) for key in keys)
        return [self._awaited[key] for key in keys]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        awaited = self._awaited.pop((hello["workers"], hello["rank"]))
        if awaited.done():  # these processes failed in the meantime
            writer.close()
        else:
            awaited.set_result((reader, writer))


class WorkerProcesses:
    """The processes of one contestant. `async with` starts them; after `ready` they accept commands."""

    def __init__(self, name: str, num_ranks: int, listener: Listener, run: Run) -> None:
        self.name = name
        self._num_ranks, self._listener, self._run = num_ranks, listener, run
        self._connections: list[Connection] = []

    async def __aenter__(self) -> Self:
        self._expected = self._listener.expect(self.name, self._num_ranks)
        self._running = asyncio.create_task(self._run(), name=f"workers {self.name}")
        return self

    async def ready(self) -> None:
        """Wait until every rank accepts commands. Raises BenchmarkError if they exit first or take too long."""
        connected = asyncio.create_task(self._connect())
        either: set[asyncio.Future[Any]] = {connected, self._running}
        await asyncio.wait(either, timeout=_READY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            connected.cancel()
            raise await self._failure(f"were not ready within {_READY_SECONDS:g} s")
        self._connections = connected.result()

    async def _connect(self) -> list[Connection]:
        return [await expected for expected in self._expected]

    async def ask(self, command: Command) -> float:
        """Run the command on every rank; returns the slowest rank's seconds."""
        for _, writer in self._connections:
            writer.write(command.to_line())
        answers = [asyncio.create_task(self._answer(rank)) for rank in range(self._num_ranks)]
        try:
            done, waiting = await asyncio.wait(answers, timeout=_ANSWER_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            seconds = [task.result() for task in done]
            if waiting:
                raise BenchmarkError(f"{self.name}: {command.kind} took more than {_ANSWER_SECONDS:g} s")
            return max(seconds)
        finally:
            for task in answers:
                task.cancel()

    async def _answer(self, rank: int) -> float:
        try:
            line = await self._connections[rank][0].readline()
        except ConnectionError:
            line = b""
        if not line:
            raise await self._failure(f"were left by rank {rank}")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"{self.name}, rank {rank} of {self._num_ranks}: {answer['error']}")
        return float(answer["seconds"])

    async def _failure(self, otherwise: str) -> BenchmarkError:
        """The error of processes that have exited or soon will; says `otherwise` if they reported no reason."""
        await asyncio.wait({self._running}, timeout=_LEAVE_SECONDS if self._connections else 0)
        why = await self._running if self._running.done() else ""
        return BenchmarkError(f"the ranks of {self.name} " + (f"failed:\n{why}" if why else otherwise))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_connections()
        if error is None and self._connections:
            await asyncio.wait({self._running}, timeout=_LEAVE_SECONDS)
        await self.dismiss()

    async def dismiss(self) -> None:
        """Stop the processes and wait until they exit, so that they don't disturb the next measurement."""
        self._close_connections()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)  # errors were raised before

    def _close_connections(self) -> None:
        """Makes every connected rank exit, even if others never connected."""
        for expected in self._expected:
            if expected.done() and not expected.cancelled():
                expected.result()[1].close()
