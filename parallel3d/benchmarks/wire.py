"""What the bench process and the ranks it measures say to each other: JSON lines over a Unix socket. No torch.

bench → rank   {"kind": "all_reduce", "strategy": "ring", …}     time this (`Command`)
bench → rank   {"kind": "rest", …}                               free the buffers: others are timed now
rank → bench   {"crew": "ours", "rank": 0}                       once, when it is ready
rank → bench   {"seconds": 0.00012} or {"error": "…"}            the answer to each command

A rank between two commands waits in a read of its socket and uses no CPU.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Command:
    """One measurement: `repeats` calls, and what one of them took."""

    kind: str
    """`all_reduce`, `send` (a call is there and back between ranks 0 and 1, so it counts twice), or `rest`."""
    num_bytes: int = 0
    dtype: str = "float32"
    repeats: int = 1
    strategy: str = "default"
    registered: bool = True
    """Whether the tensor comes from `group.empty`."""
    shared: bool = False
    """Whether all ranks may have one result. These three mean something to our own ranks only."""
    check: bool = False
    """Make one call with known values first, and fail where the result is wrong."""

    @property
    def num_timed(self) -> int:
        """What the time of all repeats is divided by: the all-reduces, or the messages one way."""
        return 2 * self.repeats if self.kind == "send" else self.repeats

    @property
    def warm_up(self) -> int:
        """Calls before the clock starts: they find the core cold, and in its cache what the turn before has left there.
        Where cores are far, it takes six of 16 MiB until each has its part again; the largest fit no cache anyway."""
        return self.repeats if self.repeats > 2 else 1

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Command:
        return Command(**json.loads(line))


def to_line(**fields: Any) -> bytes:
    """What a rank says."""
    return json.dumps(fields).encode() + b"\n"


def stdout_to_stderr() -> None:
    """The bench process's stdout is for its table: nothing that a rank's libraries print may get there."""
    os.dup2(2, 1)


def end_quietly_on_interrupt() -> None:
    """A rank whose calls block has nothing to tidy up: Ctrl-C ends it at once, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Contestant(Protocol):
    """A rank of a contestant whose calls block."""

    rank: int

    def prepare(self, command: Command) -> None:
        """Allocate, and touch, what `call` needs."""

    def check(self) -> None:
        """Make one call with known values; raise where the result is wrong. Leaves zeros."""

    def call(self) -> None:
        """What is timed."""

    def barrier(self) -> None:
        """So that all ranks start together."""

    def rest(self) -> None:
        """Free what `prepare` allocated."""


def time_calls(contestant: Contestant, command: Command) -> float:
    """Seconds of one all-reduce, or of one message one way, for which the contestant is prepared."""
    if command.check:
        contestant.check()
    for _ in range(command.warm_up):
        contestant.call()
    contestant.barrier()
    start = time.perf_counter()
    for _ in range(command.repeats):
        contestant.call()
    return (time.perf_counter() - start) / command.num_timed


def serve(contestant: Contestant, crew: str, path: str) -> None:
    """Carry out commands until the bench process hangs up."""
    with (
        socket.socket(socket.AF_UNIX) as connection,
        connection.makefile("rb") as commands,
        suppress(BrokenPipeError, ConnectionResetError),  # it hung up while we were busy
    ):
        connection.connect(path)
        connection.sendall(to_line(crew=crew, rank=contestant.rank))
        prepared: Command | None = None
        for line in commands:
            command = Command.from_line(line)
            try:
                seconds = 0.0
                if command.kind == "rest":
                    contestant.rest()
                    prepared = None
                else:
                    if replace(command, check=False) != prepared:
                        contestant.prepare(command)
                        prepared = replace(command, check=False)
                    seconds = time_calls(contestant, command)
            except Exception as error:
                connection.sendall(to_line(error=f"{type(error).__name__}: {error}"))
                raise
            connection.sendall(to_line(seconds=seconds))
