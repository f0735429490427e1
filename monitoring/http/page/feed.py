"""What a page is told after it was loaded: steps and log lines in order, and the latest state once a second.

Each message has a number, so a browser that lost the connection goes on where it was. All in one event loop; a reader
that is too slow costs nobody anything: it is told to load the page's data anew.
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
"""Messages that a browser may have missed."""
MOST_LETTERS = 8 << 20
"""Of all of them: lines of a log may be long."""
_RETRY = "retry: 1000\n\n"  # milliseconds until a browser tries again
_HEARTBEAT = ": still here\n\n"  # how a connection that is gone is noticed


class Pace(NamedTuple):
    """In seconds."""

    messages: float = 1.0
    """At least so long between two writes to a browser."""
    state: float = 1.0
    heartbeat: float = 10.0


class Feed:
    """Of one run. `state` gives what has no history: it is asked for only while somebody reads."""

    def __init__(
        self,
        state: Callable[[], Mapping[str, Any]],
        *,
        capacity: int = CAPACITY,
        most_letters: int = MOST_LETTERS,
        pace: Pace | None = None,
    ) -> None:
        self._state, self._pace = state, pace or Pace()
        self._name = secrets.token_hex(4)  # numbers of another process's feed mean nothing here
        self._messages: deque[tuple[str, str]] = deque()
        self._capacity, self._most_letters = capacity, most_letters
        self._count = self._num_letters = 0
        self._version = 0
        self._made: _State | None = None
        self._readers: set[asyncio.Event] = set()
        self._closed = False

    # Who knows.

    def put(self, kind: str, payload: Mapping[str, Any]) -> None:
        """One more step, or line of the log."""
        text = to_text(payload)
        self._messages.append((kind, text))
        self._count += 1
        self._num_letters += len(text)
        while len(self._messages) > self._capacity or self._num_letters > self._most_letters:
            self._num_letters -= len(self._messages.popleft()[1])
        self._wake()

    def changed(self) -> None:
        """The state is another one."""
        self._version += 1
        self._wake()

    def close(self) -> None:
        """Nothing will come any more: readers get the last state, and end."""
        self._closed = True
        self.changed()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.set()

    # Who reads.

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def last_id(self) -> str:
        """Of the latest message; what was loaded now goes on after it."""
        return f"{self._name}-{self._count}"

    def _place(self, last_id: str) -> int | None:
        """How many messages a reader has seen; None where it can't go on from there."""
        name, _, digits = last_id.partition("-")
        if name != self._name or not (digits.isascii() and digits.isdecimal() and len(digits) < 16):
            return None
        seen = int(digits)
        return seen if self._count - len(self._messages) <= seen <= self._count else None

    async def blocks(self, last_id: str) -> AsyncGenerator[str]:
        """Server-sent events for a reader that has seen all up to `last_id`, until the feed is closed."""
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
        """What a reader has not seen; where that is not known any more, that it shall load all anew."""
        missed = None if seen is None else self._count - seen
        if missed is None or missed > len(self._messages):
            return f"event: reset\nid: {self.last_id}\ndata: {{}}\n\n"
        latest = reversed(list(islice(reversed(self._messages), missed)))
        return "".join(
            f"event: {kind}\nid: {self._name}-{number}\ndata: {text}\n\n"
            for number, (kind, text) in enumerate(latest, self._count - missed + 1)
        )

    def _current(self, is_last: bool) -> tuple[int, str]:
        """The state and its version: made once for all readers, and no more often than one of them is shown it."""
        now = asyncio.get_running_loop().time()
        old = self._made
        if old is None or (old.version != self._version and (is_last or now >= old.until)):
            old = self._made = _State(self._version, to_text(self._state()), now + self._pace.state / 2)
        return old.version, old.text


class _State(NamedTuple):
    version: int
    text: str
    until: float
    """It is good enough."""


async def _happens(news: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(news.wait(), max(0.0, seconds))
    except TimeoutError:
        return False
    return True
