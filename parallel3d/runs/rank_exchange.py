"""What ranks exchange beside their steps: commands, clock offsets and, without a supervisor, reports.

A command is broadcast while a step is under way, so all ranks know it when that step ends and apply it to the next one.

Ranks without a supervisor bring their reports to rank 0 about once a second, beside a step. Rank 0's command says that
it is time, and how many bytes each rank may send; the next step begins with one all-gather of that size.

Clock offsets are measured by pings between rank 0 and one rank of each other host:

    rank 0    t0 ───────────►  answer: its own time   t1
              t3 ◄───────────

If both ways take equally long, t1 was at (t0 + t3) / 2. The quickest of several rounds errs least: by less than half of
its duration.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from parallel3d.rank_mesh import Mesh
from parallel3d.runs.commands import Command
from process_groups.group import Group
from process_groups.work import Work
from runtime.control import MAX_MESSAGE_BYTES, Message, decode, encode

INTERVAL = 1.0  # seconds
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 2 * MAX_MESSAGE_BYTES, 4 << 20
"""Per rank and gathering. One message always fits."""
_ALL_BLOCKS_BYTES = 64 << 20  # every rank receives all ranks' blocks
_BEHIND_BYTES = 1 << 20  # above it the recorder keeps its events, and drops the oldest
_MAX_WAITING = 100_000  # messages
_CLOCK_EVERY = 60  # gatherings: quartz drifts by some milliseconds in a minute
_PAUSE, _MAX_LOOKS = 0.005, 40  # seconds between looks whether the engine computes, which it may not do again
PING_ROUNDS = 8

Clock = Callable[[], float]
Take = Callable[[int, Message], object]


class CommandBroadcast:
    """Rank 0's command reaches all ranks by the end of a step, because the broadcast runs beside it."""

    def __init__(self, mesh: Mesh) -> None:
        self._group, self._command = mesh.world, Command()
        self._shared = mesh.world.empty(4, dtype=torch.float64)
        self._under_way: Work | None = None

    def begin(self, command: Command) -> None:
        """When a step begins, on every rank; only rank 0's command counts."""
        self._command = command
        if self._group.size > 1:
            rate = math.nan if command.learning_rate is None else command.learning_rate
            if self._group.rank == 0:
                fields = [command.number, command.stops, rate, command.report_bytes]
                self._shared.copy_(torch.tensor(fields, dtype=torch.float64))
            self._under_way = self._group.broadcast(self._shared, root=0)

    async def end(self) -> Command:
        """When the step has ended: the command from the next step on, the same on every rank."""
        if self._under_way is None:
            return self._command
        await self._under_way
        number, stops, rate, report_bytes = self._shared.tolist()
        return Command(int(number), bool(stops), None if math.isnan(rate) else rate, int(report_bytes))


# Reports.


class Outbox:
    """Messages that wait for the next gathering, oldest first."""

    def __init__(self, max_messages: int = _MAX_WAITING) -> None:
        self._lines: deque[bytes] = deque()
        self._max_messages = max_messages
        self.num_bytes = 0

    def put(self, kind: str, fields: Mapping[str, object]) -> None:
        """Append a message, and drop the oldest one if there are too many."""
        line = encode(kind, fields)
        if len(line) > MAX_MESSAGE_BYTES:
            return
        if len(self._lines) == self._max_messages:
            self._pop()
        self._lines.append(line)
        self.num_bytes += len(line)

    def _pop(self) -> bytes:
        line = self._lines.popleft()
        self.num_bytes -= len(line)
        return line

    def take(self, num_bytes: int) -> bytes:
        """As many whole messages as fit."""
        taken = bytearray()
        while self._lines and len(taken) + len(self._lines[0]) <= num_bytes:
            taken += self._pop()
        return bytes(taken)

    @property
    def is_behind(self) -> bool:
        return self.num_bytes > _BEHIND_BYTES


class ReportGathering:
    """One rank's part of bringing all reports to rank 0, which passes the other ranks' messages to `take`."""

    def __init__(self, mesh: Mesh, outbox: Outbox, take: Take, clock: Clock = time.monotonic) -> None:
        self._mesh, self._outbox, self._take, self._clock = mesh, outbox, take, clock
        self._due, self._next_bytes = clock() + INTERVAL, MIN_BLOCK_BYTES
        self._max_bytes = max_block_bytes(mesh.world_size)
        self._under_way: Work | None = None
        self._num_gathered = 0
        self._beside: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._is_over = False

    @property
    def due_bytes(self) -> int:
        """Bytes per rank that rank 0 asks for now; 0: no gathering is due."""
        return self._next_bytes if self._under_way is None and self._clock() >= self._due else 0

    def begin(self, block_bytes: int) -> None:
        """On all ranks before the same step, with the bytes of rank 0's command; 0: do nothing."""
        if block_bytes == 0:
            return
        self._due = self._clock() + INTERVAL
        self._num_gathered += 1
        for kind, fields in self._mesh.reports():
            self._report(kind, fields)
        if self._mesh.world_size > 1:
            self._under_way = self._mesh.world.all_gather(self._block(block_bytes))
        if len(set(self._mesh.hosts)) > 1 and self._num_gathered % _CLOCK_EVERY == 0:
            self._start(self._measure_clocks())

    def _report(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._mesh.rank == 0:
            self._take(0, {"kind": kind, **fields})
        else:
            self._outbox.put(kind, fields)

    def _block(self, block_bytes: int) -> torch.Tensor:
        """This rank's messages; the last byte says whether some did not fit."""
        block = torch.zeros(1, block_bytes, dtype=torch.uint8)
        messages = self._outbox.take(block_bytes - 1)
        if messages:
            block[0, : len(messages)] = torch.frombuffer(bytearray(messages), dtype=torch.uint8)
        block[0, -1] = self._outbox.num_bytes > 0
        return block.to(self._mesh.world.device)

    async def end(self) -> None:
        """On all ranks, after the step that the gathering ran beside."""
        work, self._under_way = self._under_way, None
        if work is None:
            return
        rows = await work
        if self._mesh.rank == 0:
            rows = rows.cpu()
            size, has_more = rows.shape[1], bool(rows[:, -1].any())
            self._next_bytes = min(self._max_bytes, 2 * size) if has_more else max(MIN_BLOCK_BYTES, size // 2)
            self._start(self._pass_on(rows))

    def _start(self, beside: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(beside)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _pass_on(self, rows: torch.Tensor) -> None:
        async with self._turn:  # after earlier gatherings, whose messages are older
            await self._pass_on_in_order(rows)

    async def _pass_on_in_order(self, rows: torch.Tensor) -> None:
        """Rank by rank, while the engine computes: between steps other ranks would wait for this one."""
        for rank, row in enumerate(rows):
            for _ in range(_MAX_LOOKS):
                if self._mesh.is_computing or self._is_over:
                    break
                await asyncio.sleep(_PAUSE)
            for message in read_messages(row[:-1].numpy().tobytes().rstrip(b"\0")):
                self._take(rank, message)
            await asyncio.sleep(0)  # let other tasks run

    async def _measure_clocks(self) -> None:
        for rank, offset in enumerate(await measure_offsets(self._mesh) or ()):
            self._take(rank, {"kind": "clock", "offset": offset})

    async def close(self) -> None:
        """On all ranks, after the last step."""
        self._is_over = True  # the engine does not compute again, and other ranks wait for this one
        await self.end()
        while self._beside:
            await asyncio.gather(*self._beside)


def max_block_bytes(world_size: int) -> int:
    """Per rank: less in a large mesh than in a small one, because every rank receives all blocks."""
    return max(MIN_BLOCK_BYTES, min(MAX_BLOCK_BYTES, _ALL_BLOCKS_BYTES // world_size))


def read_messages(data: bytes) -> Iterator[Message]:
    """The messages in lines of JSON; skips other lines."""
    found: Iterable[Message | None] = map(decode, data.splitlines())
    return (message for message in found if message is not None)


async def gather_json(group: Group, value: Any) -> Iterator[Any]:
    """Every rank's value, on every rank. For small values: each block is as long as the longest."""
    data = json.dumps(value).encode()
    longest = torch.tensor([len(data)], device=group.device)
    await group.all_reduce(longest, op="max")
    padded = torch.frombuffer(bytearray(data.ljust(int(longest))), dtype=torch.uint8).to(group.device)
    rows = await group.all_gather(padded.unsqueeze(0))
    return (json.loads(row.numpy().tobytes()) for row in rows.cpu())


# Clocks.


class Ping(NamedTuple):
    """One round between rank 0 and another rank."""

    sent: float
    answered: float
    """By the other rank's clock."""
    received: float

    @property
    def seconds(self) -> float:
        return self.received - self.sent

    @property
    def offset(self) -> float:
        """Seconds to add to the other rank's times."""
        return (self.sent + self.received) / 2 - self.answered


def best_offset(pings: Sequence[Ping]) -> float:
    """The offset of the quickest round."""
    return min(pings, key=lambda ping: ping.seconds).offset


def answering_ranks(hosts: Sequence[str]) -> dict[str, int]:
    """The first rank of each host other than rank 0's."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    del first[hosts[0]]
    return first


async def measure_offsets(mesh: Mesh, clock: Clock = time.monotonic) -> list[float] | None:
    """On rank 0, the seconds to add to each rank's times to get rank 0's; None on other ranks. All ranks call it.

    It only sends and receives on `mesh.world`, so it may run beside collectives.
    """
    answering = answering_ranks(mesh.hosts)
    if mesh.rank == 0:
        of_host = {host: await _ping(mesh.world, rank, clock) for host, rank in answering.items()}
        return [of_host.get(host, 0.0) for host in mesh.hosts]
    if mesh.rank in answering.values():
        await _answer(mesh.world, clock)
    return None


async def clock_offset(mesh: Mesh, clock: Clock = time.monotonic) -> float:
    """The offset of this rank's clock. All ranks call it; 0 on a single host."""
    if len(set(mesh.hosts)) == 1:
        return 0.0
    found = await measure_offsets(mesh, clock)
    shared = torch.tensor(found or [0.0] * mesh.world_size, dtype=torch.float64, device=mesh.world.device)
    await mesh.world.broadcast(shared, root=0)
    return float(shared[mesh.rank])


async def _ping(world: Group, rank: int, clock: Clock) -> float:
    pings, word = [], torch.zeros(1, dtype=torch.float64, device=world.device)
    for _ in range(PING_ROUNDS):
        sent = clock()
        await world.send(word, rank)
        await world.recv(word, rank)
        pings.append(Ping(sent, float(word), clock()))
    return best_offset(pings)


async def _answer(world: Group, clock: Clock) -> None:
    word = torch.zeros(1, dtype=torch.float64, device=world.device)
    for _ in range(PING_ROUNDS):
        await world.recv(word, 0)
        word.fill_(clock())
        await world.send(word, 0)
