"""Carries what ranks print from their pipes to the launcher's own stdout and stderr and to log files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from runtime.launch.output import LineSplitter, Prefix, Writer, rank_prefix, wants_colour

_READ_BYTES = 64 * 1024
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class ConsoleStyle:
    """How ranks' lines are shown."""

    num_ranks: int
    with_prefix: bool
    only: frozenset[int] | None
    """The ranks that are shown; None: all."""
    stdout_to_stderr: bool = False
    """Our own stdout is for data, and our stderr has a line on a terminal that is drawn again and again."""

    def prefix(self, rank: int, fd: int, environment: Mapping[str, str]) -> Prefix:
        clear = b"\r\x1b[K" if self.stdout_to_stderr and os.isatty(fd) else b""
        prefix = rank_prefix(rank, self.num_ranks, wants_colour(fd, environment)).text if self.with_prefix else b""
        return Prefix(clear + prefix)

    def shows(self, rank: int) -> bool:
        return self.only is None or rank in self.only


class Read(Enum):
    """What one look into a pipe gave."""

    DATA = "data"
    NOTHING_YET = "nothing yet"
    END = "end"


@dataclass(frozen=True, slots=True)
class _Stream:
    pipe: int
    console: int | None
    log: int | None
    prefix: Prefix
    lines: LineSplitter


class Console:
    """Reads ranks' pipes on the loop; a thread writes. A slow reader slows ranks down and loses nothing."""

    def __init__(self, style: ConsoleStyle, logs: Sequence[int]) -> None:
        """Takes over the log files too."""
        self._style = style
        self._logs = logs
        self._streams: dict[int, _Stream] = {}
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._unfinished: set[int] = set()  # log files whose last line has no newline
        self._abandoned = False
        self._is_paused = False
        self._writer = Writer(self._on_room, owned=logs)

    def add(self, rank: int, stdout: int, stderr: int) -> None:
        """Take over the reading ends of a rank's two pipes."""
        shown_on = _STDERR if self._style.stdout_to_stderr else _STDOUT
        for pipe, console in ((stdout, shown_on), (stderr, _STDERR)):
            os.set_blocking(pipe, False)
            prefix = self._style.prefix(rank, console, os.environ)
            shown = console if self._style.shows(rank) else None
            log = self._logs[rank] if self._logs else None
            self._streams[pipe] = _Stream(pipe, shown, log, prefix, LineSplitter())
            if not self._is_paused:
                self._loop.add_reader(pipe, self._on_readable, pipe)

    def log(self, rank: int, text: str) -> None:
        """Append our own words to a rank's log file, if there is one; on a line of their own."""
        if self._logs:
            fd = self._logs[rank]
            newline = b"\n" if fd in self._unfinished else b""
            self._writer.write(fd, newline + text.encode("utf-8", "replace"))

    def abandon(self) -> None:
        """Stop waiting for whoever does not read our output."""
        self._abandoned = True
        self._room.set()

    async def drain(self) -> None:
        """Deliver all that is in the pipes. Call when no rank lives, so that nothing more can come."""
        for pipe in list(self._streams):
            while pipe in self._streams and not self._abandoned:
                if self._writer.is_full:
                    await self._wait_for_room()
                elif self._read(pipe) is not Read.DATA:
                    self._end(pipe)

    async def close(self) -> None:
        """Wait until all is written. No deadline: a pager may well read slowly, and Ctrl-C abandons it."""
        self.release()
        while not self._writer.is_done and not self._abandoned:
            await self._wait_for_room()

    def release(self) -> None:
        """Close the pipes and let the thread end once it has written what it has."""
        for pipe in list(self._streams):
            self._end(pipe)
        self._writer.close()

    async def _wait_for_room(self) -> None:
        self._room.clear()
        if (self._writer.is_full or not self._writer.is_done) and not self._abandoned:
            await self._room.wait()

    def _on_readable(self, pipe: int) -> None:
        if pipe in self._streams and self._read(pipe) is Read.END:
            self._end(pipe)
        if self._writer.is_full and not self._is_paused:
            self._is_paused = True
            for each in self._streams:
                self._loop.remove_reader(each)

    def _read(self, pipe: int) -> Read:
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return Read.NOTHING_YET
        stream = self._streams[pipe]
        self._show(stream, stream.lines.feed(data))
        return Read.DATA if data else Read.END

    def _show(self, stream: _Stream, lines: bytes) -> None:
        if lines and stream.log is not None:
            self._writer.write(stream.log, lines)
            (self._unfinished.discard if lines.endswith(b"\n") else self._unfinished.add)(stream.log)
        if lines and stream.console is not None:
            self._writer.write(stream.console, stream.prefix.apply(lines))

    def _end(self, pipe: int) -> None:
        stream = self._streams.pop(pipe)
        self._show(stream, stream.lines.finish())
        self._loop.remove_reader(pipe)
        os.close(pipe)

    def _on_room(self) -> None:
        with suppress(RuntimeError):  # the loop may be closed once we were abandoned
            self._loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        self._room.set()
        if self._is_paused and not self._writer.is_full:
            self._is_paused = False
            for pipe in self._streams:
                self._loop.add_reader(pipe, self._on_readable, pipe)
