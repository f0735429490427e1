"""Common to all benchmark ranks: commands over a socket, timing, and test values that verify results. No torch.

The bench process and its ranks exchange JSON lines over a Unix socket:

bench → rank   {"kind": "all_reduce", "strategy": "ring", …}     time this call (`Command`)
bench → rank   {"kind": "rest", …}                               free the buffers while others are timed
rank → bench   {"workers": "ours", "rank": 0}                    once, when ready
rank → bench   {"seconds": 0.00012} or {"error": "…"}            the answer to each command

Between two commands a rank blocks in a read of its socket and uses no CPU.

The test values work for torch tensors and numpy arrays, and are small, so that sums are exact in small dtypes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

_CYCLE = 3  # the values repeat every 3 elements
_STEPS = 5  # the values repeat every 5 ranks
_BLOCK = _CYCLE << 16  # elements written or compared at a time, so that checking needs little memory
Make = Callable[[list[int]], Any]
"""Makes a tensor or array of these values in the dtype of the buffer."""


@dataclass(frozen=True, slots=True)
class Command:
    """One measurement: the mean time of `repeats` calls."""

    kind: str
    """`all_reduce`, `send` (one call is a round trip between ranks 0 and 1, two messages), or `rest`."""
    num_bytes: int = 0
    dtype: str = "float32"
    repeats: int = 1
    strategy: str = "default"
    registered: bool = True
    """Whether the tensor comes from `group.empty`."""
    shared: bool = False
    """Whether the ranks may share one result tensor. Only our own ranks read strategy, registered and shared."""
    check: bool = False
    """First make one call with test values, and fail if the result is wrong."""

    @property
    def num_timed(self) -> int:
        """Number of all-reduces, or of one-way messages, in all repeats."""
        return 2 * self.repeats if self.kind == "send" else self.repeats

    @property
    def warm_up(self) -> int:
        """Untimed calls that refill the caches after the previous turn. Where cores share no cache, 16 MiB needs six
        calls; the largest sizes fit in no cache, so one is enough."""
        return self.repeats if self.repeats > 2 else 1

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Command:
        return Command(**json.loads(line))


def to_line(**fields: Any) -> bytes:
    """Encode a message from a rank to the bench process."""
    return json.dumps(fields).encode() + b"\n"


def stdout_to_stderr() -> None:
    """Send a rank's stdout to stderr, so that library output doesn't mix with the table on the bench's stdout."""
    os.dup2(2, 1)


def end_quietly_on_interrupt() -> None:
    """Make Ctrl-C end a blocking rank at once, without a traceback. It has nothing to clean up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class BlockingRank(Protocol):
    """One rank of a contestant with blocking calls."""

    rank: int

    def prepare(self, command: Command) -> None:
        """Allocate the buffers that `call` needs and touch their pages."""

    def check(self) -> None:
        """Make one call with test values; raise ValueError if the result is wrong. Leaves the buffers zeroed."""

    def call(self) -> None:
        """Make the call that is timed."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def rest(self) -> None:
        """Free what `prepare` allocated."""


def time_calls(rank: BlockingRank, command: Command) -> float:
    """Seconds per all-reduce, or per one-way message. Call `rank.prepare(command)` first."""
    if command.check:
        rank.check()
    for _ in range(command.warm_up):
        rank.call()
    rank.barrier()
    start = time.perf_counter()
    for _ in range(command.repeats):
        rank.call()
    return (time.perf_counter() - start) / command.num_timed


def serve(rank: BlockingRank, workers: str, path: str) -> None:
    """Run commands until the bench process closes the connection."""
    with (
        socket.socket(socket.AF_UNIX) as connection,
        connection.makefile("rb") as commands,
        suppress(BrokenPipeError, ConnectionResetError),  # the bench process closed it during a command
    ):
        connection.connect(path)
        connection.sendall(to_line(workers=workers, rank=rank.rank))
        prepared: Command | None = None
        for line in commands:
            command = Command.from_line(line)
            try:
                seconds = 0.0
                if command.kind == "rest":
                    rank.rest()
                    prepared = None
                else:
                    if replace(command, check=False) != prepared:
                        rank.prepare(command)
                        prepared = replace(command, check=False)
                    seconds = time_calls(rank, command)
            except Exception as error:
                connection.sendall(to_line(error=f"{type(error).__name__}: {error}"))
                raise
            connection.sendall(to_line(seconds=seconds))


def largest_sum(num_ranks: int) -> int:
    """Upper bound of any element's sum over `num_ranks` test values, partial sums included."""
    return num_ranks * (_CYCLE - 1 + _STEPS - 1)


def fill(buffer: Any, rank: int, make: Make) -> None:
    """Fill the buffer with this rank's test values."""
    _for_blocks(buffer, make, [position + rank % _STEPS for position in range(_CYCLE)], _write)


def check_sum(buffer: Any, ranks: range, make: Make, what: str) -> None:
    """Raise ValueError unless the buffer is the sum of these ranks' test values."""
    total = sum(rank % _STEPS for rank in ranks)
    values = [len(ranks) * position + total for position in range(_CYCLE)]

    def compare(start: int, part: Any, expected: Any) -> None:
        wrong = part != expected
        if bool(wrong.any()):
            index = wrong.tolist().index(True)
            raise ValueError(
                f"{what} gave {part[index].item()} at element {start + index}, not {expected[index].item()}"
            )

    _for_blocks(buffer, make, values, compare)


def _write(_start: int, part: Any, values: Any) -> None:
    part[:] = values


def _for_blocks(buffer: Any, make: Make, cycle: list[int], act: Callable[[int, Any, Any], None]) -> None:
    length = min(len(buffer), _BLOCK)
    values = make((cycle * (length // _CYCLE + 1))[:length])
    for start in range(0, len(buffer), _BLOCK):
        part = buffer[start : start + _BLOCK]
        act(start, part, values[: len(part)])
