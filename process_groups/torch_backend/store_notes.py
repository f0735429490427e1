"""Notes in the store between ranks that share no memory: what each has called, which have left, why one aborted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch.distributed as dist

from process_groups.call import Call, not_made, peer_lost
from process_groups.shared_memory.ledger import Member
from runtime.errors import CommunicationError
from runtime.threads import DaemonThreads

_PUBLISH_INTERVAL = 0.25  # seconds between two notes of what this rank has called
_MOST_FOLLOWED = 64  # members whose calls are read while one waits; more would load the store


class StoreNotes:
    """One rank's view of a group's notes. A store may block, so a thread reads it; this keeps the last answer."""

    def __init__(
        self, store: dist.Store, group_name: str, members: Sequence[Member], me: int, threads: DaemonThreads
    ) -> None:
        self._store, self._group_name, self._members, self._me = store, group_name, members, me
        self._threads = threads
        self._remote = [i for i, member in enumerate(members) if member.page is None]
        self._made: dict[str, int] = {}
        self._last_terms: str | None = None
        self._publishing: asyncio.TimerHandle | None = None
        self._reading: Future[None] | None = None
        # Written by the reading thread, each in one assignment:
        self._broken: CommunicationError | None = None
        self._made_by: dict[int, dict[str, int]] = {}
        self._terms_of: dict[int, str | None] = {}
        self._left: frozenset[int] = frozenset()
        self._store_is_gone = False

    def made(self, call: Call) -> None:
        """Note one of this rank's calls; published within a quarter of a second."""
        self._made[_channel(call, self._me)] = call.number
        if not call.is_point_to_point:
            self._last_terms = call.terms
        if self._publishing is None:
            self._publish()
            self._publishing = asyncio.get_running_loop().call_later(_PUBLISH_INTERVAL, self._publish_last)

    def _publish_last(self) -> None:
        self._publishing = None
        self._publish()

    def _publish(self) -> Future[None]:
        note = json.dumps({"made": self._made, "terms": self._last_terms})
        return self._threads.submit(self._store.set, f"made/{self._me}", note)

    def broken(self, error: CommunicationError) -> None:
        """Publish why this rank aborts the group."""
        self._stop_publishing()
        self._threads.submit(self._store.set, "broken", json.dumps(error.to_wire()))

    def _stop_publishing(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()

    def trouble(self, call: Call) -> CommunicationError | None:
        """As of the last answer; asks again."""
        self._refresh()
        if self._broken is not None:
            return self._broken
        gone = next((peer for peer in self._unmade(call) if peer in self._left), None)
        if gone is None:
            return None
        return peer_lost(self._group_name, call, self._members[gone].place, "left the mesh")

    def culprit(self, call: Call) -> tuple[int, str] | None:
        """A peer on another host that had not made the call when last heard of."""
        peer = next(iter(self._unmade(call)), None)
        if peer is None:
            return None
        num_made = self._made_by.get(peer, {}).get(_channel(call, self._me), 0)
        return peer, not_made(call, num_made, self._terms_of.get(peer))

    def _unmade(self, call: Call) -> list[int]:
        channel = _channel(call, self._me)
        partners = [call.peer] if call.is_point_to_point else self._remote
        return [i for i in self._remote if i in partners and self._made_by.get(i, {}).get(channel, 0) < call.number]

    def _refresh(self) -> Future[None]:
        if self._reading is None or self._reading.done():
            self._reading = self._threads.submit(self._read)
        return self._reading

    def _read(self) -> None:
        if self._store_is_gone:  # it never comes back, and torch prints a page for each attempt
            return
        try:
            self._read_all()
        except RuntimeError:  # gone with its host: connections will tell of those who wait for us
            self._store_is_gone = True

    def _read_all(self) -> None:
        if self._store.check(["broken"]):
            self._broken = CommunicationError.from_wire(json.loads(self._store.get("broken")))
        if self._store.add("num_left", 0) > len(self._left):
            self._left = frozenset(i for i in range(len(self._members)) if self._store.check([f"left/{i}"]))
        for peer in self._remote[:_MOST_FOLLOWED]:
            if self._store.check([f"made/{peer}"]):
                note = json.loads(self._store.get(f"made/{peer}"))
                self._made_by[peer], self._terms_of[peer] = note["made"], note["terms"]

    async def wait_for_peers(self, deadline: float) -> None:
        """Publish that this rank is done, and wait until all are: a closed socket may lose what a peer has not read."""
        self._stop_publishing()
        with contextlib.suppress(RuntimeError, TimeoutError):  # behind a cut link, a store never answers
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.wrap_future(self._publish())
                await asyncio.wrap_future(self._threads.submit(self._store.set, f"left/{self._me}", "1"))
                await asyncio.wrap_future(self._threads.submit(self._store.add, "num_left", 1))
        while time.monotonic() < deadline and not self._is_over():
            await asyncio.wait([asyncio.wrap_future(self._refresh())], timeout=max(0.0, deadline - time.monotonic()))
            await asyncio.sleep(0.01)

    def _is_over(self) -> bool:
        return self._broken is not None or self._store_is_gone or len(self._left) == len(self._members)


def _channel(call: Call, me: int) -> str:
    """The same text at both ends."""
    if not call.is_point_to_point:
        return "collectives"
    return f"{me}>{call.peer}" if call.kind == "send" else f"{call.peer}>{me}"
