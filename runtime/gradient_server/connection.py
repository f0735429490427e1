"""A gradient server's connections: each from its accept through the join to its end, and a check that all are alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from monitoring.http.addresses import is_loopback, without_port
from runtime.gradient_server.receivers import GradientSink, ReceiverV1, ReceiverV2
from runtime.gradient_server.senders import Outbox, Sender, SenderV1, SenderV2
from runtime.gradient_server.settings import GradientServerSettings
from runtime.gradient_server.state_relay import StateRelay
from runtime.gradient_server.wire.auth import ServerHandshake, check_node_id
from runtime.gradient_server.wire.frames import Item
from runtime.gradient_server.wire.link import CLOSE_SECONDS, Link, LinkLost
from runtime.gradient_server.wire.messages import Hello, JoinRequest, Proof, Reason, WireError

_MOST_CHECK_SECONDS = 1.0

OnJoin = Callable[["Connection", Hello | JoinRequest, bytes], None]
"""Called with the MAC for the welcome."""
OnFailure = Callable[["Connection", BaseException], None]
"""Called when the task that sends to the connection fails, which is a bug."""


class Connection:
    """One connection. It has no worker id until it has joined; nothing here outlives its link."""

    def __init__(self, link: Link, handshake: ServerHandshake, on_join: OnJoin, on_failure: OnFailure) -> None:
        self.link, self.outbox = link, Outbox(link)
        self.version: int | None = None
        self.worker: int | None = None
        self.sender: Sender | None = None
        self.receiver: ReceiverV1 | ReceiverV2 | None = None
        self.state_request = 0
        """The number of the latest state that it was asked for; 0: none."""
        self.opened_at = self.sent_at = self.progress_at = time.monotonic()
        """When it was accepted, when it was last sent bytes, and when its unsent bytes last got fewer or were none."""
        self._num_sent = 0
        self._handshake, self._on_join, self._on_failure = handshake, on_join, on_failure
        self._sending: asyncio.Task[None] | None = None
        link.on_item = self._on_item_before_join

    @property
    def is_local(self) -> bool:
        """Whether the peer is on this host."""
        return is_loopback(without_port(self.link.peer))

    def _on_item_before_join(self, item: Item) -> None:
        """Raises WireError."""
        match item:
            case Hello():
                self.version = 2
                self.outbox.put(self._handshake.challenge(item))
            case Proof():
                self._on_join(self, *self._handshake.check(item))
            case JoinRequest():
                self.version = 1
                check_node_id(item.node_id)
                self._on_join(self, item, b"")
            case _:
                raise WireError(Reason.NOT_JOINED, f"{type(item).__name__}.")

    def joined(self, worker: int, sink: GradientSink, *, assigns_v1: bool) -> None:
        """The peer has joined as this worker; what it sends goes to `sink` from now on."""
        assert self.version is not None
        self.worker = worker
        self.sender = SenderV1(self.outbox, assigns_v1) if self.version == 1 else SenderV2(self.outbox)
        self.receiver = ReceiverV1(sink, worker) if self.version == 1 else ReceiverV2(sink, worker)
        self.link.on_item = self.receiver.take
        self.link.joined(self.version)
        self._sending = asyncio.create_task(self.outbox.run(), name=f"to worker {worker}")
        self._sending.add_done_callback(self._stopped_sending)

    def _stopped_sending(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(self, error)

    def note_progress(self, now: float) -> bool:
        """Whether bytes were sent since the previous call."""
        num_sent = self.link.bytes_out
        has_sent, self._num_sent = num_sent != self._num_sent, num_sent
        if has_sent or not self.link.bytes_waiting:
            self.progress_at = now
        return has_sent

    def end(self) -> None:
        """Send what is queued, then close. What the peer still sends is ignored."""
        self.link.on_item = _ignore
        if self._sending is None or self._sending.done():
            self.link.close()
        else:
            self.outbox.end()

    def forget(self) -> None:
        """The link is gone."""
        if self._sending is not None:
            self._sending.cancel()


def _ignore(_: Item) -> None:
    pass


class Monitored(Protocol):
    """What a `LivenessMonitor` needs to know of the server."""

    @property
    def connections(self) -> Iterable[Connection]: ...

    @property
    def relay(self) -> StateRelay | None: ...

    @property
    def relay_source(self) -> Connection | None: ...

    @property
    def is_ending(self) -> bool: ...

    def drop(self, connection: Connection, error: BaseException) -> None:
        """Close the connection and count it as lost."""


class LivenessMonitor:
    """Checks all connections periodically: drops those that are silent or stuck, sends heartbeats on idle ones."""

    def __init__(
        self, settings: GradientServerSettings, server: Monitored, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._server, self._clock = settings, server, clock
        shortest = min(settings.heartbeat_seconds, settings.timeout_seconds, settings.join_seconds)
        self._interval = min(_MOST_CHECK_SECONDS, shortest / 4)
        self._timer: asyncio.TimerHandle | None = None
        self._checked_at = clock()

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._on_timer)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        try:
            self.check()
        finally:
            self.start()

    def check(self) -> None:
        """Check every connection once."""
        now = self._clock()
        # If this event loop stalled, bytes that arrived meanwhile are not read yet: silence proves nothing.
        was_stalled, self._checked_at = now - self._checked_at > 2 * self._interval + 0.5, now
        for connection in list(self._server.connections):
            if connection.note_progress(now):
                connection.sent_at = now
            error = None if was_stalled else self._problem(connection, now)
            if error is not None:
                self._server.drop(connection, error)
            else:
                self._beat(connection, now)

    def _problem(self, connection: Connection, now: float) -> Exception | None:
        settings, peer = self._settings, connection.link.peer
        patience = CLOSE_SECONDS if self._server.is_ending else settings.timeout_seconds
        if connection.worker is None:
            is_late = now - connection.opened_at > settings.join_seconds
            return WireError(Reason.TOO_SLOW, f"no join within {settings.join_seconds:g} s.") if is_late else None
        if now - connection.progress_at > patience:
            return LinkLost(f"{peer}: it took nothing of what was sent for {patience:g} s.")
        if now - self._last_heard(connection, now) > settings.timeout_seconds:
            return LinkLost(f"{peer}: it was not heard for {settings.timeout_seconds:g} s.")
        return None

    def _last_heard(self, connection: Connection, now: float) -> float:
        """When it was last heard. While it waits for slow sinks of its state it is not read, which counts as heard."""
        relay = self._server.relay
        if relay is None or connection is not self._server.relay_source:
            return connection.link.last_heard
        return now if relay.is_held_up else max(connection.link.last_heard, relay.progress_at)

    def _beat(self, connection: Connection, now: float) -> None:
        is_idle = connection.outbox.is_empty and not connection.link.bytes_waiting
        if connection.sender is None or not is_idle or self._server.is_ending:
            return
        if now - connection.sent_at >= self._settings.heartbeat_seconds:
            connection.sender.beat()
            connection.sent_at = now
