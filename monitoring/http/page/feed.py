"""Server-sent events for a loaded page: steps and log lines in order, and the latest state once a second.

Messages are numbered, so a browser that lost the connection continues where it stopped. A reader that is too slow does
not hold up others: it gets a `reset` and reloads the page's data. Use a feed from one event loop only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from monitoring.http.page.plain_json import to_text

CAPACITY = 4096
"""Messages kept for browsers that reconnect."""
MOST_LETTERS = 8 << 20
"""Characters kept in all messages together, because log lines can be long."""
_RETRY = "retry: 1000\n\n"  # milliseconds until a browser reconnects
_HEARTBEAT = ": still here\n\n"  # a write to a dead connection fails, which ends its reader


class Pace(NamedTuple):
    """Intervals, in seconds."""

    messages: float = 1.0
    """Shortest time between two writes to a browser."""
    state: float = 1.0
    heartbeat: float = 10.0


class Feed:
    """The feed of one run. `state` returns the current state, and is called only while there are readers."""

    def __init__(
        self,
        state: Callable[[], Mapping[str, Any]],
        *,
        capacity: int = CAPACITY,
        most_letters: int = MOST_LETTERS,
        pace: Pace | None = None,
    ) -> None:
        self._state, self._pace = state, pace or Pace()
        self._name = secrets.token_hex(4)  # tells our message numbers from those of another process's feed
        self._messages: deque[tuple[str, str]] = deque()
        self._capacity, self._most_letters = capacity, most_letters
        self._count = self._num_letters = 0
        self._version = 0
        self._made: _State | None = None
        self._readers: set[asyncio.Event] = set()
        self._closed = False

    # Writing.

    def put(self, kind: str, payload: Mapping[str, Any]) -> None:
        """Add a message that every reader gets, such as a step or a log line."""
        text = to_text(payload)
        self._messages.append((kind, text))
        self._count += 1
        self._num_letters += len(text)
        while len(self._messages) > self._capacity or self._num_letters > self._most_letters:
            self._num_letters -= len(self._messages.popleft()[1])
        self._wake()

    def changed(self) -> None:
        """The state has changed; readers get the new one at their next turn."""
        self._version += 1
        self._wake()

    def close(self) -> None:
        """Readers get the remaining messages and the last state, then end."""
        self._closed = True
        self.changed()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.set()

    # Reading.

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def last_id(self) -> str:
        """Id of the latest message. A page that loads its data now continues after it."""
        return f"{self._name}-{self._count}"

    def _place(self, last_id: str) -> int | None:
        """How many messages a reader has seen; None if it can't continue from there."""
        name, _, digits = last_id.partition("-")
        if name != self._name or not (digits.isascii() and digits.isdecimal() and len(digits) < 16):
            return None
        seen = int(digits)
        return seen if self._count - len(self._messages) <= seen <= self._count else None

    async def blocks(self, last_id: str) -> AsyncGenerator[str]:
        """Server-sent events for a reader that has seen everything up to `last_id`, until the feed is closed."""
        news = asyncio.Event()
        self._readers.add(news)
        try:
            yield _RETRY
            async for block in self._follow(self._place(last_id), news):
                yield block
        finally:
            self._readers.discard(news)

    async def _follow(self, seen: int | None, news: asyncio.Event) -> AsyncIterator[str]:
        now, shown, state_at = asyncio.get_running_loop().time, -1, 0.0
        while True:
            news.clear()
            is_last = self._closed
            text, seen = self._since(seen), self._count
            if shown != self._version and (is_last or now() >= state_at):
                shown, state = self._current(is_last)
                text += f"event: state\ndata: {state}\n\n"
                state_at = now() + self._pace.state
            if is_last:
                yield text + "event: end\ndata: {}\n\n"
                return
            if text:
                yield text
            await asyncio.sleep(self._pace.messages)
            is_shown = shown == self._version
            if not await _happens(news, self._pace.heartbeat if is_shown else state_at - now()) and is_shown:
                yield _HEARTBEAT

    def _since(self, seen: int | None) -> str:
        """The messages that a reader has not seen, or a `reset` if they are no longer kept."""
        missed = None if seen is None else self._count - seen
        if missed is None or missed > len(self._messages):
            return f"event: reset\nid: {self.last_id}\ndata: {{}}\n\n"
        latest = reversed(list(islice(reversed(self._messages), missed)))
        return "".join(
            f"event: {kind}\nid: {self._name}-{number}\ndata: {text}\n\n"
            for number, (kind, text) in enumerate(latest, self._count - missed + 1)
        )

    def _current(self, is_last: bool) -> tuple[int, str]:
        """(version, state as JSON): rendered once for all readers, and at most twice per `Pace.state`."""
        now = asyncio.get_running_loop().time()
        old = self._made
        if old is None or (old.version != self._version and (is_last or now >= old.until)):
            old = self._made = _State(self._version, to_text(self._state()), now + self._pace.state / 2)
        return old.version, old.text


class _State(NamedTuple):
    version: int
    text: str
    until: float
    """Time up to which readers get this text even if the state has changed."""


async def _happens(news: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(news.wait(), max(0.0, seconds))
    except TimeoutError:
        return False
    return True
