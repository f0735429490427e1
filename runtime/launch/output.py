"""Ranks' output: whole lines with the rank in front on the console, and as it is in one file a rank."""

from __future__ import annotations

import os
import re
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import LaunchError

MAX_LINE_BYTES = 1024 * 1024  # a longer line is shown in pieces of this size
MAX_QUEUED_BYTES = 4 * 1024 * 1024  # beyond this the ranks' pipes are not read, so that the ranks wait
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


class LineSplitter:
    """Cuts a stream of bytes into runs of whole lines; what has no newline yet waits, within bounds."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> bytes:
        """All whole lines up to here; also an unfinished one, once it is too long to keep."""
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        if len(data) - end >= MAX_LINE_BYTES:
            end = len(data)
        self._partial = data[end:]
        return data[:end]

    def finish(self) -> bytes:
        """The last line, where no newline ended it."""
        partial, self._partial = self._partial, b""
        return partial


@dataclass(frozen=True, slots=True)
class Prefix:
    """Puts the rank in front of each line."""

    text: bytes

    def apply(self, lines: bytes) -> bytes:
        """Every line prefixed; a last one without newline gets one, or the next rank would continue it."""
        body = lines.removesuffix(b"\n")
        return self.text + body.replace(b"\n", b"\n" + self.text) + b"\n"


def rank_prefix(rank: int, num_ranks: int, coloured: bool) -> Prefix:
    """`[3] `, aligned when there are ten ranks or more."""
    width = len(str(num_ranks - 1))
    text = f"[{rank:>{width}}]"
    if coloured:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return Prefix(text.encode() + b" ")


def wants_colour(fd: int, environment: Mapping[str, str]) -> bool:
    """Only on a terminal, and not where NO_COLOR is set to anything."""
    return not environment.get("NO_COLOR") and os.isatty(fd)


def parse_ranks(text: str, num_ranks: int) -> frozenset[int]:
    """The ranks that `0,3-5` names."""
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
    """One emptied file a rank, as descriptors."""
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


class Writer:
    """Writes to descriptors that may be slow, in order, from a thread of its own.

    The descriptors are shared with other programs, so they are left blocking; and the event loop
    must not wait for whoever reads our stdout.
    """

    def __init__(self, on_room: Callable[[], None], owned: Sequence[int] = ()) -> None:
        self._on_room = on_room  # called from the thread, when the queue has room again and at the end
        self._owned = owned  # closed at the end and not before, or a late write might reach another file
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
        """The thread ends once all is written; `is_done` says when."""
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
                self._changed.wait()  # ended by `close`, which the launch calls whatever happens
            return self._queue.popleft() if self._queue else None

    def _write_out(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view and fd not in self._broken:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # someone else made it non-blocking
                _wait_writable(fd)
            except OSError as error:  # its reader left, or the disk is full: the ranks go on without
                self._broken.add(fd)
                if fd > 2:
                    with suppress(OSError):
                        os.write(2, f"parallel3d: a log file could not be written: {error}\n".encode())


def _wait_writable(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll(1000)
