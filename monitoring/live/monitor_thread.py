"""The thread that observes a run and serves what it sees. The run never waits for it."""

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
"""Of messages that wait: a minute's of eight busy ranks."""
_MESSAGE_BYTES = 512  # of one without its texts, about
_PAUSE = 1.0  # seconds: messages that come meanwhile are taken together, for the price of one wake-up
_AT_ONCE = 64  # messages, then requests are answered

MakeApp = Callable[["MonitorThread"], "web.Application"]


class Observes(Protocol):
    """Takes ranks' messages, in the monitor thread."""

    def take(self, rank: int, message: Message | None) -> object: ...


class Inbox:
    """Messages until the thread takes them. Bounded: the oldest are dropped, and the events in them are added to the
    `dropped` of the same rank's next events. Safe between threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._waiting: deque[tuple[int, Message | None, int]] = deque()
        self._lock = threading.Lock()
        self._lost_events: Counter[int] = Counter()
        self.lost_messages = 0

    def put(self, rank: int, message: Message | None) -> bool:
        """Whether it is the first that waits."""
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
        """The oldest that wait."""
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
    """About. What makes a message large is text: events, or a log line."""
    if isinstance(message, Events):
        return _MESSAGE_BYTES + len(message.data)
    if isinstance(message, LogLine):
        return _MESSAGE_BYTES + sum(len(value) for value in message.record.values() if isinstance(value, str))
    return _MESSAGE_BYTES


class Scrapes:
    """Whether anybody asks for the run's metrics, and when the next time is. Used in the monitor thread alone."""

    def __init__(self) -> None:
        self._were_any = False
        self._next: Future[None] | None = None

    def note(self) -> None:
        """All metrics have been collected just now."""
        self._were_any = True
        if self._next is not None and not self._next.done():
            self._next.set_result(None)

    def next(self) -> Future[None] | None:
        """Done with the next scrape; None if there was none so far."""
        self._next = Future() if self._were_any else None
        return self._next


class MonitorThread:
    """Made and closed by the process that runs the ranks; `take` and `set_status` may be called from any thread."""

    def __init__(
        self,
        observer: Observes,
        *,
        endpoint: Endpoint | None = None,
        make_app: MakeApp | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        """make_app: what the endpoint answers; called in the thread, before the observer gets its first message."""
        self._observer = observer
        self.status, self.error = "running", ""
        self.inbox = inbox or Inbox()
        self.scrapes = Scrapes()
        self.failures = 0
        """Exceptions of the observer and the callbacks: bugs of ours, which must not end a run."""
        self.on_status: list[Callable[[str, str], None]] = []
        """Called in the thread."""
        self.on_close: list[Callable[[], None]] = []
        """The same, before the server ends, so that open streams get the last state."""
        served = endpoint if make_app is not None else None
        self._service = Service("parallel3d-monitor", served, lambda: _app(make_app, self), self._end)
        self._background = self._service.background

    def take(self, rank: int, message: Message | None) -> None:
        """A rank's message, or None for one that only shows that it lives; never waits, and never raises."""
        if self.inbox.put(rank, message):
            self._background.call(self._background.call_later, _PAUSE, self._drain)

    def set_status(self, status: str, error: str = "") -> None:
        """A `Status`, and what went wrong."""
        self._background.call(self._set_status, status, error)

    def _set_status(self, status: str, error: str) -> None:
        self.status, self.error = status, error
        for callback in self.on_status:
            self._attempt(callback, status, error)

    async def settle(self, then: Callable[[], T]) -> T:
        """Call something in the thread, once the observer has all messages that were taken before."""
        return await asyncio.wrap_future(self._background.run(self._settled(then)))

    async def _settled(self, then: Callable[[], T]) -> T:
        there_is_more = True
        while there_is_more:
            there_is_more = self._hand_over()
            await asyncio.sleep(0)  # requests are answered meanwhile
        return then()

    async def close(self) -> None:
        """End the server and the thread. Messages that still wait are dropped."""
        await self._service.close()

    def close_now(self) -> None:
        """The same without an event loop; waits some seconds at most."""
        self._service.close_now()

    # In the thread.

    def _end(self) -> None:
        for callback in self.on_close:
            self._attempt(callback)

    def _drain(self) -> None:
        if self._hand_over():
            self._background.call(self._drain)

    def _hand_over(self) -> bool:
        """Whether there were as many as are taken at a time, so that there may be more."""
        taken = self.inbox.get(_AT_ONCE)
        for rank, message in taken:
            self._attempt(self._observer.take, rank, message)
        return len(taken) == _AT_ONCE

    def _attempt(self, function: Callable[..., object], *args: Any) -> None:
        try:
            function(*args)
        except Exception:
            self.failures += 1
            if self.failures == 1:  # one is enough to find the bug by, and more would bury the run's own output
                complain()


def _app(make_app: MakeApp | None, monitor: MonitorThread) -> web.Application:
    assert make_app is not None
    return make_app(monitor)
