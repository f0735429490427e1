"""Ranks' output: from their pipes to the launcher's console, whole lines with the rank in front, and to log files."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

MAX_LINE_BYTES = 1024 * 1024  # a longer line is shown in pieces of this size
MAX_QUEUED_BYTES = 4 * 1024 * 1024  # above this the ranks' pipes are not read, so the ranks wait
_READ_BYTES = 64 * 1024
_STDOUT, _STDERR = 1, 2
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


class LineSplitter:
    """Cuts a stream of bytes into whole lines; an unfinished line is kept, up to MAX_LINE_BYTES."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> bytes:
        """All whole lines so far; also an unfinished one that is too long to keep."""
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        if len(data) - end >= MAX_LINE_BYTES:
            end = len(data)
        self._partial = data[end:]
        return data[:end]

    def finish(self) -> bytes:
        """The last line, if it has no newline."""
        partial, self._partial = self._partial, b""
        return partial


@dataclass(frozen=True, slots=True)
class Prefix:
    """The text in front of each line of a rank."""

    text: bytes

    def apply(self, lines: bytes) -> bytes:
        """Prefix every line. A last line without newline gets one, so that the next rank's output starts a new line."""
        body = lines.removesuffix(b"\n")
        return self.text + body.replace(b"\n", b"\n" + self.text) + b"\n"


def rank_prefix(rank: int, num_ranks: int, coloured: bool) -> Prefix:
    """`[3] `, aligned if there are ten ranks or more."""
    width = len(str(num_ranks - 1))
    text = f"[{rank:>{width}}]"
    if coloured:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return Prefix(text.encode() + b" ")


def wants_colour(fd: int, environment: Mapping[str, str]) -> bool:
    """True on a terminal, unless NO_COLOR is set."""
    return not environment.get("NO_COLOR") and os.isatty(fd)


class Writer:
    """Writes to descriptors that may be slow, in order, from a thread of its own.

    The descriptors are shared with other programs, so they stay blocking, and the event loop must not wait
    for a slow reader of our stdout.
    """

    def __init__(self, on_room: Callable[[], None], owned: Sequence[int] = ()) -> None:
        self._on_room = on_room  # called in the thread, when the queue has room again and at the end
        self._owned = owned  # closed at the end: after an early close, a late write might reach another file
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._broken: set[int] = set()
        self._closing = False
        self.is_done = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="parallel3d-output", daemon=True)
        self._thread.start()

    def write(self, fd: int, data: bytes) -> None:
        if data:
            with self._changed:
                self._queue.append((fd, data))
                self._queued_bytes += len(data)
                self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        return self._queued_bytes > MAX_QUEUED_BYTES

    def close(self) -> None:
        """Let the thread end once everything is written; `is_done` says when."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            fd, data = item
            self._write_out(fd, data)
            with self._changed:
                was_full = self.is_full
                self._queued_bytes -= len(data)
                has_room_again = was_full and not self.is_full
            if has_room_again:
                self._on_room()
        for fd in self._owned:
            os.close(fd)
        self.is_done = True
        self._on_room()

    def _next(self) -> tuple[int, bytes] | None:
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()  # ended by `close`, which the launch always calls
            return self._queue.popleft() if self._queue else None

    def _write_out(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view and fd not in self._broken:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # another program made it non-blocking
                _wait_writable(fd)
            except OSError as error:  # its reader is gone, or the disk is full: the ranks go on without it
                self._broken.add(fd)
                if fd > 2:
                    with suppress(OSError):
                        os.write(2, f"parallel3d: a log file could not be written: {error}\n".encode())


def _wait_writable(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll(1000)


@dataclass(frozen=True, slots=True)
class ConsoleStyle:
    """How the ranks' lines are shown."""

    num_ranks: int
    with_prefix: bool
    only: frozenset[int] | None
    """The ranks to show; None: all."""
    stdout_to_stderr: bool = False
    """Stdout is for our own data, and stderr has a status line that is redrawn on a terminal."""

    def prefix(self, rank: int, fd: int, environment: Mapping[str, str]) -> Prefix:
        clear = b"\r\x1b[K" if self.stdout_to_stderr and os.isatty(fd) else b""
        prefix = rank_prefix(rank, self.num_ranks, wants_colour(fd, environment)).text if self.with_prefix else b""
        return Prefix(clear + prefix)

    def shows(self, rank: int) -> bool:
        return self.only is None or rank in self.only


class Read(Enum):
    """The result of reading a pipe once."""

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
    """Reads the ranks' pipes on the event loop, writes in a thread. A slow reader slows the ranks; nothing is lost."""

    def __init__(self, style: ConsoleStyle, logs: Sequence[int]) -> None:
        """Takes ownership of the log files."""
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
        """Take ownership of the reading ends of a rank's two pipes."""
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
        """Append text to a rank's log file, if there is one, on a new line."""
        if self._logs:
            fd = self._logs[rank]
            newline = b"\n" if fd in self._unfinished else b""
            self._writer.write(fd, newline + text.encode("utf-8", "replace"))

    def abandon(self) -> None:
        """Stop waiting for a reader that does not read our output."""
        self._abandoned = True
        self._room.set()

    async def drain(self) -> None:
        """Write everything that is in the pipes. Call it when all ranks have ended."""
        for pipe in list(self._streams):
            while pipe in self._streams and not self._abandoned:
                if self._writer.is_full:
                    await self._wait_for_room()
                elif self._read(pipe) is not Read.DATA:
                    self._end(pipe)

    async def close(self) -> None:
        """Wait until everything is written. No deadline: a pager may read slowly, and Ctrl-C abandons it."""
        self.release()
        while not self._writer.is_done and not self._abandoned:
            await self._wait_for_room()

    def release(self) -> None:
        """Close the pipes, and let the thread end once its queue is written."""
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
        with suppress(RuntimeError):  # the loop may be closed after `abandon`
            self._loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        self._room.set()
        if self._is_paused and not self._writer.is_full:
            self._is_paused = False
            for pipe in self._streams:
                self._loop.add_reader(pipe, self._on_readable, pipe)
