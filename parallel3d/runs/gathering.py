"""Brings what ranks without a supervisor tell to rank 0, about once a second, beside a step that is under way.

Rank 0 says with its wishes that it is time, and how much room each rank gets (see wishes.py). All ranks know that when
the step ends; the next one begins with one all-gather of so many bytes a rank, and ends with everything on rank 0.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping

import torch

from parallel3d.rank_mesh import Mesh
from parallel3d.runs.clock_offsets import Clock, measure_offsets
from process_groups.work import Work
from runtime.control import MAX_MESSAGE_BYTES, Message, decode, encode

INTERVAL = 1.0  # seconds
LEAST_ROOM, MOST_ROOM = 2 * MAX_MESSAGE_BYTES, 4 << 20
"""Bytes of a rank. One message always fits."""
_MOST_BYTES = 64 << 20  # of all ranks together, which each rank has room for
_BEHIND = 1 << 20  # bytes that wait: from here on the recorder keeps its events, and forgets the oldest
_MOST_WAITING = 100_000  # messages
_CLOCK_EVERY = 60  # gatherings: quartz drifts by some milliseconds in a minute
_PAUSE, _MOST_LOOKS = 0.005, 40  # seconds between looks whether the engine computes, which it may not do again

Take = Callable[[int, Message], object]


class Outbox:
    """Messages that wait for the next gathering, oldest first."""

    def __init__(self, most: int = _MOST_WAITING) -> None:
        self._lines: deque[bytes] = deque()
        self._most = most
        self.num_bytes = 0

    def put(self, kind: str, fields: Mapping[str, object]) -> None:
        """The oldest has to go where there are too many."""
        line = encode(kind, fields)
        if len(line) > MAX_MESSAGE_BYTES:
            return
        if len(self._lines) == self._most:
            self._pop()
        self._lines.append(line)
        self.num_bytes += len(line)

    def _pop(self) -> bytes:
        line = self._lines.popleft()
        self.num_bytes -= len(line)
        return line

    def take(self, room: int) -> bytes:
        """As many as fit, whole ones."""
        taken = bytearray()
        while self._lines and len(taken) + len(self._lines[0]) <= room:
            taken += self._pop()
        return bytes(taken)

    @property
    def is_behind(self) -> bool:
        return self.num_bytes > _BEHIND


class Gathering:
    """Of one rank. `take` is called on rank 0, with each other rank's messages."""

    def __init__(self, mesh: Mesh, outbox: Outbox, take: Take, clock: Clock = time.monotonic) -> None:
        self._mesh, self._outbox, self._take, self._clock = mesh, outbox, take, clock
        self._due, self._next_room = clock() + INTERVAL, LEAST_ROOM
        self._most_room = most_room(mesh.world_size)
        self._under_way: Work | None = None
        self._num_gathered = 0
        self._beside: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._is_over = False

    @property
    def wished_room(self) -> int:
        """What rank 0 wishes now; 0: nothing is due."""
        return self._next_room if self._under_way is None and self._clock() >= self._due else 0

    def begin(self, room: int) -> None:
        """All ranks at the same place, with the room that they agreed on; 0: nothing."""
        if room == 0:
            return
        self._due = self._clock() + INTERVAL
        self._num_gathered += 1
        for kind, fields in self._mesh.reports():
            self._tell(kind, fields)
        if self._mesh.world_size > 1:
            self._under_way = self._mesh.world.all_gather(self._block(room))
        if len(set(self._mesh.hosts)) > 1 and self._num_gathered % _CLOCK_EVERY == 0:
            self._start(self._look_at_clocks())

    def _tell(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._mesh.rank == 0:
            self._take(0, {"kind": kind, **fields})
        else:
            self._outbox.put(kind, fields)

    def _block(self, room: int) -> torch.Tensor:
        """This rank's messages; the last byte says whether there was too little room."""
        block = torch.zeros(1, room, dtype=torch.uint8)
        told = self._outbox.take(room - 1)
        if told:
            block[0, : len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        block[0, -1] = self._outbox.num_bytes > 0
        return block.to(self._mesh.world.device)

    async def end(self) -> None:
        """When the step has ended that it went on beside of, on all ranks."""
        work, self._under_way = self._under_way, None
        if work is None:
            return
        rows = await work
        if self._mesh.rank == 0:
            rows = rows.cpu()
            room, has_more = rows.shape[1], bool(rows[:, -1].any())
            self._next_room = min(self._most_room, 2 * room) if has_more else max(LEAST_ROOM, room // 2)
            self._start(self._give(rows))

    def _start(self, beside: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(beside)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _give(self, rows: torch.Tensor) -> None:
        """After all that was gathered before, which is older."""
        async with self._turn:
            await self._give_in_order(rows)

    async def _give_in_order(self, rows: torch.Tensor) -> None:
        """One rank's after the other while the engine computes: between steps other ranks would wait for this one."""
        for rank, row in enumerate(rows):
            for _ in range(_MOST_LOOKS):
                if self._mesh.is_computing or self._is_over:
                    break
                await asyncio.sleep(_PAUSE)
            for message in read(row[:-1].numpy().tobytes().rstrip(b"\0")):
                self._take(rank, message)
            await asyncio.sleep(0)  # the event loop has other things to do

    async def _look_at_clocks(self) -> None:
        for rank, offset in enumerate(await measure_offsets(self._mesh) or ()):
            self._take(rank, {"kind": "clock", "offset": offset})

    async def close(self) -> None:
        """After the last step, on all ranks."""
        self._is_over = True  # the engine does not compute again, and the others wait for this rank
        await self.end()
        while self._beside:
            await asyncio.gather(*self._beside)


def most_room(world_size: int) -> int:
    """Bytes of a rank: in a large mesh less than in a small one."""
    return max(LEAST_ROOM, min(MOST_ROOM, _MOST_BYTES // world_size))


def read(data: bytes) -> Iterator[Message]:
    """The messages in lines of JSON; what is none is left out."""
    found: Iterable[Message | None] = map(decode, data.splitlines())
    return (message for message in found if message is not None)
