"""Starts N ranks of a script on this host, supervises them, and cleans up."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from runtime.control import LauncherControl, Message
from runtime.errors import Coords, LaunchError
from runtime.launch import processes, supervisor
from runtime.launch.failures import Report, describe_exit, find_root
from runtime.launch.output import Console, ConsoleStyle
from runtime.launch.spec import RUN_ID, LaunchResult, LaunchSpec, Started, prepare, start
from runtime.log_settings import log_environment

__all__ = ["Launch", "LaunchResult", "LaunchSpec", "OnMessage", "launch"]

_SERVER_END_SECONDS = 15.0  # the server gives its descendants 10 s to end

OnMessage = Callable[[int, Message], None]


def ignore_message(rank: int, message: Message) -> None:
    pass


async def launch(spec: LaunchSpec, on_message: OnMessage = ignore_message) -> LaunchResult:
    """Run all ranks to their end. Cancelling it stops them, and kills those that do not stop within the grace period.

    The ranks' output goes to descriptors 1 and 2 of this process. `on_message(rank, message)` is called on the event
    loop for everything that ranks send over their control channels.
    """
    return await Launch(start(spec, prepare(spec)), on_message).finish()


class Launch:
    """Carries out the supervisor's instructions for ranks of a started fork server."""

    def __init__(self, started: Started, on_message: OnMessage = ignore_message) -> None:
        self._started = started
        self._spec = started.spec
        self._server = started.server
        self._on_message = on_message
        self._supervisor = supervisor.Supervisor(self._spec.num_ranks, self._spec.interrupt_grace)
        self._controls: dict[int, LauncherControl] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._has_begun = False

    def begin(self) -> None:
        """Listen to the fork server on the running loop. `finish` must follow; it calls `begin` if needed."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._console = Console(
            ConsoleStyle(self._spec.num_ranks, self._spec.with_prefix, self._spec.only, self._spec.stdout_to_stderr),
            self._started.logs,
        )
        _allow_open_files(4 * self._spec.num_ranks + 64)
        self._loop.add_reader(self._server.connection, self._on_server)
        self._timers.append(self._loop.call_later(self._spec.start_timeout, self._on_start_timeout))
        self._has_begun = True

    async def finish(self) -> LaunchResult:
        """Run the ranks to their end and always clean up."""
        if not self._has_begun:
            self.begin()
        try:
            await self._until_ended()
        finally:
            await self._clean_up()
        failures = tuple(self._supervisor.failures())
        return LaunchResult(
            self._started.run_id,
            self._supervisor.exit_code(),
            find_root(failures),
            failures,
            self._supervisor.interrupted_by,
        )

    def interrupt(self, number: signal.Signals) -> None:
        """Act as if the user had sent this signal: a second SIGINT kills everything at once."""
        if self._supervisor.phase is supervisor.Phase.DONE:  # all that is left is output that is not read
            self._console.abandon()
        self._handle(supervisor.Interrupted(number))

    def send(self, rank: int, kind: str, **fields: object) -> bool:
        """Send a message to a rank over its control channel; False if it has not started, or has ended."""
        control = self._controls.get(rank)
        return control is not None and control.send(kind, **fields)

    async def _until_ended(self) -> None:
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            self.interrupt(signal.SIGTERM)
            await self._ended  # within the grace period; if cancelled again, the clean-up kills everything
            raise

    def _handle(self, event: supervisor.Event) -> None:
        for instruction in self._supervisor.handle(event, time.monotonic()):
            match instruction:
                case supervisor.Fork(rank):
                    self._fork(rank)
                case supervisor.Signal(ranks, number, whole_group):
                    self._server.signal(ranks, number, whole_group)
                case supervisor.SetTimer(timer, seconds):
                    fired = supervisor.TimerFired(timer)
                    self._timers.append(self._loop.call_later(seconds, self._handle, fired))
                case supervisor.Finish():
                    self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

    def _fork(self, rank: int) -> None:
        try:
            control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            (stdout, their_stdout), (stderr, their_stderr) = (os.pipe2(os.O_CLOEXEC) for _ in range(2))
        except OSError as error:
            self._end(LaunchError(f"rank {rank} could not be started: {error}. Raise `ulimit -n`."))
            return
        theirs = (their_stdout, their_stderr, their_control.fileno(), self._started.store)
        self._server.fork(rank, self._rank_environment(rank), theirs)
        their_control.close()
        os.close(their_stdout)
        os.close(their_stderr)
        self._console.add(rank, stdout, stderr)
        self._controls[rank] = LauncherControl(control)
        self._loop.add_reader(control, self._on_control, rank)

    def _rank_environment(self, rank: int) -> dict[str, str]:
        size = str(self._spec.num_ranks)
        place = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size}
        return place | log_environment()

    def _on_server(self) -> None:
        for event in self._server.events():
            match event:
                case {"event": "ready"}:
                    self._handle(supervisor.ServerReady())
                case {"event": "started", "rank": int(rank)}:
                    self._handle(supervisor.RankStarted(rank))
                case {"event": "ended", "rank": int(rank), "code": int(code), "time": float(when)}:
                    self._read_last_messages(rank)
                    self._handle(supervisor.RankEnded(rank, code, when))
                case {"event": "fork_failed", "rank": rank, "message": message}:
                    self._end(LaunchError(f"rank {rank} could not be forked: {message}"))
                case {"event": "preload_failed", "module": module, "traceback": traceback}:
                    self._end(LaunchError(f"{module} could not be preloaded for the ranks:\n{traceback}"))
                case {"event": "lost"}:
                    self._loop.remove_reader(self._server.connection)
                    self._end(_ServerLost())

    def _on_control(self, rank: int) -> None:
        control = self._controls[rank]
        for message in control.messages():
            self._on_rank_message(rank, message)
        if control.ended:
            self._loop.remove_reader(control.connection)

    def _read_last_messages(self, rank: int) -> None:
        """Read what a rank sent before its end is handled. Bounded: a child of the rank may still be sending."""
        for _ in range(64):
            self._on_control(rank)
            if not self._controls[rank].may_have_more:
                return

    def _on_rank_message(self, rank: int, message: Message) -> None:
        coords, report = _coords(message), None
        if coords is not None:
            self._handle(supervisor.RankPlaced(rank, coords))
        elif message["kind"] == "failed":
            report = Report.from_message(message, rank)
        if report is not None:
            self._handle(supervisor.RankFailed(rank, report))
        try:
            self._on_message(rank, message)
        except Exception as error:  # a bug of the caller, which gets it
            self._end(error)

    def _on_start_timeout(self) -> None:
        if not self._server.is_ready or len(self._controls) < self._spec.num_ranks:
            seconds = self._spec.start_timeout
            self._end(LaunchError(f"only {len(self._controls)} ranks had started after {seconds:g} s"))

    async def _clean_up(self) -> None:
        """End remaining processes, write remaining output, close files."""
        for timer in self._timers:
            timer.cancel()
        self._loop.remove_reader(self._server.connection)
        self._server.close()
        try:
            code = await asyncio.to_thread(self._server.wait, _SERVER_END_SECONDS)
            if code != 0:  # it was killed, so it may not have ended its descendants
                await asyncio.to_thread(processes.end_marked, RUN_ID, self._started.run_id)
            await self._console.drain()
            for failure in self._supervisor.failures():
                if failure.report is not None:
                    self._console.log(failure.rank, failure.report.traceback)
            await self._console.close()
        finally:
            self._console.release()  # also if this was cancelled
            self._close_files()
        self._raise_if_server_lost(code)

    def _raise_if_server_lost(self, code: int) -> None:
        ended = self._ended.done() and not self._ended.cancelled()
        if ended and isinstance(self._ended.exception(), _ServerLost):
            raise LaunchError(
                f"the fork server (pid {self._server.process.pid}) ended too early ({describe_exit(code)}); "
                "the ranks depend on it and have been ended"
            ) from None

    def _close_files(self) -> None:
        for control in self._controls.values():
            with suppress(OSError):
                self._loop.remove_reader(control.connection)
            control.connection.close()
        os.close(self._started.store)


class _ServerLost(Exception):
    """The fork server ended before its ranks did."""


def _coords(message: Mapping[str, Any]) -> Coords | None:
    found = message.get("coords")
    if message["kind"] != "mesh" or not isinstance(found, list) or len(found) != 3:
        return None
    return Coords(*found) if all(type(each) is int for each in found) else None


def _allow_open_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, soft), hard))
