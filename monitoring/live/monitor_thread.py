"""The thread that observes a run and serves the results. Passing a message to it never blocks the run."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from monitoring.http.endpoint import Endpoint
from monitoring.http.service import Service, complain
from monitoring.messages import Events, LogLine, Message

if TYPE_CHECKING:
    from aiohttp import web

T = TypeVar("T")

MOST_BYTES = 32 << 20
"""Limit for waiting messages: about a minute of eight busy ranks."""
_MESSAGE_BYTES = 512  # approximate size of a message without its texts
_PAUSE = 1.0  # seconds: messages that arrive meanwhile are taken with one wake-up
_AT_ONCE = 64  # messages taken before HTTP requests get a turn

MakeApp = Callable[["MonitorThread"], "web.Application"]


class Observes(Protocol):
    """Receives the ranks' messages, in the monitor thread."""

    def take(self, rank: int, message: Message | None) -> object: ...


class Inbox:
    """Thread-safe queue of messages for the monitor thread. When it is full, the oldest are dropped; events lost that
    way are added to `dropped` in the same rank's later `Events`."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._waiting: deque[tuple[int, Message | None, int]] = deque()
        self._lock = threading.Lock()
        self._lost_events: Counter[int] = Counter()
        self.lost_messages = 0

    def put(self, rank: int, message: Message | None) -> bool:
        """Add a message; returns whether the inbox was empty."""
        size = _size(message)
        with self._lock:
            is_first = not self._waiting
            self._waiting.append((rank, message, size))
            self._num_bytes += size
            while self._num_bytes > self._most_bytes:
                self._drop_oldest()
        return is_first

    def _drop_oldest(self) -> None:
        rank, message, size = self._waiting.popleft()
        self._num_bytes -= size
        self.lost_messages += 1
        if isinstance(message, Events):
            self._lost_events[rank] += message.num_events

    def get(self, at_most: int) -> list[tuple[int, Message | None]]:
        """Remove and return the oldest messages."""
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(at_most, len(self._waiting)))]
            self._num_bytes -= sum(size for _, _, size in taken)
            return [(rank, self._with_losses(rank, message)) for rank, message, _ in taken]

    def _with_losses(self, rank: int, message: Message | None) -> Message | None:
        lost = self._lost_events[rank]
        if lost and isinstance(message, Events):
            return replace(message, dropped=message.dropped + lost)
        return message


def _size(message: Message | None) -> int:
    """Approximate bytes. Only events and log lines can be large."""
    if isinstance(message, Events):
        return _MESSAGE_BYTES + len(message.data)
    if isinstance(message, LogLine):
        return _MESSAGE_BYTES + sum(len(value) for value in message.record.values() if isinstance(value, str))
    return _MESSAGE_BYTES


class Scrapes:
    """Whether the run's metrics have been scraped, and a future for the next scrape. For the monitor thread only."""

    def __init__(self) -> None:
        self._were_any = False
        self._next: Future[None] | None = None

    def note(self) -> None:
        """Call this after each scrape."""
        self._were_any = True
        if self._next is not None and not self._next.done():
            self._next.set_result(None)

    def next(self) -> Future[None] | None:
        """A future that is done at the next scrape; None if there has been none so far."""
        self._next = Future() if self._were_any else None
        return self._next


class MonitorThread:
    """Created and closed by the process that runs the ranks; `take` and `set_status` may be called from any thread."""

    def __init__(
        self,
        observer: Observes,
        *,
        endpoint: Endpoint | None = None,
        make_app: MakeApp | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        """make_app: builds the endpoint's application; called in the thread, before the observer's first message."""
        self._observer = observer
        self.status, self.error = "running", ""
        self.inbox = inbox or Inbox()
        self.scrapes = Scrapes()
        self.failures = 0
        """Number of exceptions in the observer and the callbacks. They are our bugs, and must not end a run."""
        self.on_status: list[Callable[[str, str], None]] = []
        """Called in the thread with status and error."""
        self.on_close: list[Callable[[], None]] = []
        """Called in the thread before the server stops, so that open streams get the last state."""
        served = endpoint if make_app is not None else None
        self._service = Service("parallel3d-monitor", served, lambda: _app(make_app, self), self._end)
        self._background = self._service.background

    def take(self, rank: int, message: Message | None) -> None:
        """Queue a rank's message; None only shows that the rank is alive. Never blocks, never raises."""
        if self.inbox.put(rank, message):
            self._background.call(self._background.call_later, _PAUSE, self._drain)

    def set_status(self, status: str, error: str = "") -> None:
        """Set a `Status`, and the error's text if there is one."""
        self._background.call(self._set_status, status, error)

    def _set_status(self, status: str, error: str) -> None:
        self.status, self.error = status, error
        for callback in self.on_status:
            self._attempt(callback, status, error)

    async def settle(self, then: Callable[[], T]) -> T:
        """Call `then` in the thread, after the observer has processed all messages queued before."""
        return await asyncio.wrap_future(self._background.run(self._settled(then)))

    async def _settled(self, then: Callable[[], T]) -> T:
        there_is_more = True
        while there_is_more:
            there_is_more = self._hand_over()
            await asyncio.sleep(0)  # lets HTTP requests run
        return then()

    async def close(self) -> None:
        """End the server and the thread. Messages that still wait are dropped."""
        await self._service.close()

    def close_now(self) -> None:
        """Like `close`, for callers without an event loop; blocks for a few seconds at most."""
        self._service.close_now()

    # In the thread.

    def _end(self) -> None:
        for callback in self.on_close:
            self._attempt(callback)

    def _drain(self) -> None:
        if self._hand_over():
            self._background.call(self._drain)

    def _hand_over(self) -> bool:
        """Pass one batch of messages to the observer; returns whether there may be more."""
        taken = self.inbox.get(_AT_ONCE)
        for rank, message in taken:
            self._attempt(self._observer.take, rank, message)
        return len(taken) == _AT_ONCE

    def _attempt(self, function: Callable[..., object], *args: Any) -> None:
        try:
            function(*args)
        except Exception:
            self.failures += 1
            if self.failures == 1:  # more than one would bury the run's own output
                complain()


def _app(make_app: MakeApp | None, monitor: MonitorThread) -> web.Application:
    assert make_app is not None
    return make_app(monitor)
