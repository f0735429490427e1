"""Where ranks' messages go: a thread of its own that observes the run and serves what it sees. The run never waits
for it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from monitoring.events.events import RECORD_BYTES
from monitoring.http.endpoint import Endpoint
from monitoring.http.service import Service, complain
from monitoring.live.scrapes import Scrapes

if TYPE_CHECKING:
    from aiohttp import web

T = TypeVar("T")

MOST_BYTES = 32 << 20
"""Of messages that wait: a minute's of eight busy ranks."""
_MESSAGE_BYTES = 512  # of one without its texts, about
_PAUSE = 1.0  # seconds: messages that come meanwhile are taken together, for the price of one wake-up
_AT_ONCE = 64  # messages, then whoever asks is answered

Message = Mapping[str, Any]
MakeApp = Callable[["Station"], "web.Application"]


class Observes(Protocol):
    """Takes in what ranks tell, in the station's thread."""

    def take(self, rank: int, message: Message) -> object: ...


class Inbox:
    """Messages until somebody takes them: bounded, and it forgets the oldest; a rank's next events then tell of those
    that were dropped here too. Safe between threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._waiting: deque[tuple[int, Message, int]] = deque()
        self._lock = threading.Lock()
        self._lost_events: Counter[int] = Counter()
        self.lost_messages = 0

    def put(self, rank: int, message: Message) -> bool:
        """Whether it is the first that waits."""
        size = _size(message)
        with self._lock:
            is_first = not self._waiting
            self._waiting.append((rank, message, size))
            self._num_bytes += size
            while self._num_bytes > self._most_bytes:
                self._forget_oldest()
        return is_first

    def _forget_oldest(self) -> None:
        rank, message, size = self._waiting.popleft()
        self._num_bytes -= size
        self.lost_messages += 1
        data = message.get("data")
        if message.get("kind") == "events" and isinstance(data, str):
            self._lost_events[rank] += len(data) * 3 // 4 // RECORD_BYTES

    def get(self, at_most: int) -> list[tuple[int, Message]]:
        """The oldest that wait."""
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(at_most, len(self._waiting)))]
            self._num_bytes -= sum(size for _, _, size in taken)
            return [(rank, self._with_losses(rank, message)) for rank, message, _ in taken]

    def _with_losses(self, rank: int, message: Message) -> Message:
        lost, dropped = self._lost_events[rank], message.get("dropped")
        if lost and message.get("kind") == "events" and isinstance(dropped, int):
            return {**message, "dropped": dropped + lost}
        return message


def _size(message: Message) -> int:
    """About. What makes a message large is text: events, or a log line."""
    return _MESSAGE_BYTES + sum(len(value) for value in message.values() if isinstance(value, str))


class Station:
    """Made and closed by whoever runs the ranks; `take` and `set_status` come from its event loop or any thread."""

    def __init__(
        self,
        *observers: Observes,
        endpoint: Endpoint | None = None,
        make_app: MakeApp | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        """observers: each is given every message, in their order. make_app: what the endpoint answers; called in the
        station's thread, before the first message is given to anybody."""
        self._observers = observers
        self.status, self.error = "running", ""
        self.inbox = inbox or Inbox()
        self.scrapes = Scrapes()
        self.failures = 0
        """Of observers: bugs of ours, which must not end a run."""
        self.on_status: list[Callable[[str, str], None]] = []
        """Called in the station's thread."""
        self.on_close: list[Callable[[], None]] = []
        """The same, before the server ends: whoever is being told of the run hears the last of it."""
        served = endpoint if make_app is not None else None
        self._service = Service("parallel3d-station", served, lambda: _app(make_app, self), self._end)
        self._background = self._service.background

    def take(self, rank: int, message: Message) -> None:
        """A rank's message; never waits, and never raises."""
        if self.inbox.put(rank, message):
            self._background.call(self._background.call_later, _PAUSE, self._drain)

    def set_status(self, status: str, error: str = "") -> None:
        """How the run is."""
        self._background.call(self._set_status, status, error)

    def _set_status(self, status: str, error: str) -> None:
        self.status, self.error = status, error
        for tell in self.on_status:
            self._attempt(tell, status, error)

    async def settle(self, then: Callable[[], T]) -> T:
        """Call something in the station's thread, once all that was taken before is with the observers."""
        return await asyncio.wrap_future(self._background.run(self._settled(then)))

    async def _settled(self, then: Callable[[], T]) -> T:
        there_is_more = True
        while there_is_more:
            there_is_more = self._hand_over()
            await asyncio.sleep(0)  # whoever asks is answered meanwhile
        return then()

    async def close(self) -> None:
        """Answer nobody any more, and end the thread. What has not been taken in by now is left."""
        await self._service.close()

    def close_now(self) -> None:
        """The same, for those without an event loop; waits some seconds at most."""
        self._service.close_now()

    # In the thread.

    def _end(self) -> None:
        for end in self.on_close:
            self._attempt(end)

    def _drain(self) -> None:
        if self._hand_over():
            self._background.call(self._drain)

    def _hand_over(self) -> bool:
        """Whether there were as many as are taken at a time, so that there may be more."""
        taken = self.inbox.get(_AT_ONCE)
        for rank, message in taken:
            for observer in self._observers:
                self._attempt(observer.take, rank, message)
        return len(taken) == _AT_ONCE

    def _attempt(self, function: Callable[..., object], *args: Any) -> None:
        try:
            function(*args)
        except Exception:
            self.failures += 1
            if self.failures == 1:  # one is enough to find the bug by, and more would bury the run's own output
                complain()


def _app(make_app: MakeApp | None, station: Station) -> web.Application:
    assert make_app is not None
    return make_app(station)
