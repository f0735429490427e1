"""What waits to be sent to one worker: small messages and long averages in order, within the link's budget."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from runtime.gradient_server.wire.link import Link, LinkLost
from runtime.gradient_server.wire.messages import Bytes, Message, encode_parts

Frames: TypeAlias = Iterable[Sequence[Bytes]]
"""Each is written at once; before the next one there must be room again."""


class Outbox:
    """`run` it in a task of its own. Long frames are made when their turn comes, so that nothing piles up."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: deque[Iterator[Sequence[Bytes]]] = deque()
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._is_ending = self._is_over = False

    @property
    def is_empty(self) -> bool:
        """Nothing waits here; some may in the link."""
        return not self._waiting

    def put(self, message: Message) -> None:
        """A small one. At once, where nothing else waits."""
        parts = encode_parts(message)
        if self._waiting:
            self._waiting.append(iter((parts,)))
        else:
            self._link.write(*parts)

    def put_all(self, frames: Frames) -> None:
        """Long ones. Dropped where the link is gone, as nobody would send them."""
        if self._is_over:
            return
        self._waiting.append(iter(frames))
        self._empty.clear()
        self._wake.set()

    def end(self) -> None:
        """Hang up when everything was sent."""
        self._is_ending = True
        self._wake.set()

    async def emptied(self) -> None:
        """Until nothing waits here and the link has room, or is gone."""
        await self._empty.wait()

    async def run(self) -> None:
        """Until the link is gone, or everything was sent and `end` was called."""
        try:
            while True:
                await self._send()
                if self._is_ending:
                    self._link.close()
                    return
                self._wake.clear()
                await self._wake.wait()
        except LinkLost:
            pass  # the link tells the server too
        finally:
            self._is_over = True
            self._waiting.clear()
            self._empty.set()

    async def _send(self) -> None:
        while self._waiting:
            for parts in self._waiting[0]:
                self._link.write(*parts)
                await self._link.drain()
            self._waiting.popleft()
        self._empty.set()
