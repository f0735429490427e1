"""One connection of a gradient server: a stranger until it has joined, a worker from then on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from monitoring.http.addresses import is_loopback, without_port
from runtime.gradient_server.desk import Desk
from runtime.gradient_server.intake_v1 import IntakeV1
from runtime.gradient_server.intake_v2 import IntakeV2
from runtime.gradient_server.outbox import Outbox
from runtime.gradient_server.voice import Voice, VoiceV1, VoiceV2
from runtime.gradient_server.wire.auth import Admission, check_node_id
from runtime.gradient_server.wire.frame_reader import Item
from runtime.gradient_server.wire.link import Link
from runtime.gradient_server.wire.messages import Hello, JoinRequest, Proof, Reason, WireError

OnJoin = Callable[["Connection", Hello | JoinRequest, bytes], None]
"""Given the mac for its welcome too."""
OnFailure = Callable[["Connection", BaseException], None]
"""Of what sends to it: a bug."""


class Connection:
    """What belongs to it ends with it: nothing here outlives the link."""

    def __init__(self, link: Link, admission: Admission, on_join: OnJoin, on_failure: OnFailure) -> None:
        self.link, self.outbox = link, Outbox(link)
        self.version: int | None = None
        self.worker: int | None = None
        self.voice: Voice | None = None
        self.intake: IntakeV1 | IntakeV2 | None = None
        self.asked = 0
        """The number of the latest state that it was asked for."""
        self.since = self.spoke = self.moved = time.monotonic()
        """When it began, when anything was said last, and when bytes were last sent or there were none to send."""
        self._sent = 0
        self._admission, self._on_join, self._on_failure = admission, on_join, on_failure
        self._sending: asyncio.Task[None] | None = None
        link.on_item = self._knock

    @property
    def is_local(self) -> bool:
        """From this very host."""
        return is_loopback(without_port(self.link.peer))

    def _knock(self, item: Item) -> None:
        """Before it has joined. Raises WireError."""
        match item:
            case Hello():
                self.version = 2
                self.outbox.put(self._admission.challenge(item))
            case Proof():
                self._on_join(self, *self._admission.check(item))
            case JoinRequest():
                self.version = 1
                check_node_id(item.node_id)
                self._on_join(self, item, b"")
            case _:
                raise WireError(Reason.NOT_JOINED, f"{type(item).__name__}.")

    def become(self, worker: int, desk: Desk, *, assigns_v1: bool) -> Voice:
        """It has joined under this id."""
        assert self.version is not None
        self.worker = worker
        self.voice = VoiceV1(self.outbox, assigns_v1) if self.version == 1 else VoiceV2(self.outbox)
        self.intake = IntakeV1(desk, worker) if self.version == 1 else IntakeV2(desk, worker)
        self.link.on_item = self.intake.take
        self.link.joined(self.version)
        self._sending = asyncio.create_task(self.outbox.run(), name=f"to worker {worker}")
        self._sending.add_done_callback(self._stopped_sending)
        return self.voice

    def _stopped_sending(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(self, error)

    def note_moves(self, now: float) -> bool:
        """Whether bytes were sent since this was asked before."""
        sent = self.link.bytes_out
        has_moved, self._sent = sent != self._sent, sent
        if has_moved or not self.link.bytes_waiting:
            self.moved = now
        return has_moved

    def end(self) -> None:
        """Say what waits to be said, then hang up. What it still sends is passed over."""
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
