"""Notes between ranks that share no memory: who gave the group up, and who has left it, kept in the store."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import torch.distributed as dist

from process_groups.ledger import Member
from process_groups.transport import Call, peer_lost
from runtime.errors import CommunicationError
from runtime.threads import DaemonThreads


class StoreNotes:
    """One rank's view of a group's notes. Asking a store may block, so a thread does it and we look at the last answer."""

    def __init__(
        self, store: dist.Store, group_name: str, members: Sequence[Member], me: int, threads: DaemonThreads
    ) -> None:
        self._store, self._group_name, self._members, self._me = store, group_name, members, me
        self._threads = threads
        self._made: Counter[str] = Counter()
        self._broken: CommunicationError | None = None
        self._made_by_left: dict[int, dict[str, int]] = {}
        self._reading: Future[None] | None = None

    def made(self, call: Call) -> None:
        """Count this rank's calls: when it leaves, peers learn which ones it has made."""
        self._made[_channel(call, self._me)] = call.number

    def broken(self, error: CommunicationError) -> None:
        self._threads.submit(self._store.set, "broken", json.dumps(error.to_wire()))

    def trouble(self, call: Call) -> CommunicationError | None:
        """As of the last answer; asks again."""
        self._refresh()
        if self._broken is not None:
            return self._broken
        partners = [call.peer] if call.is_point_to_point else list(self._made_by_left)
        for peer in partners:
            made = self._made_by_left.get(peer) if peer is not None else None
            if peer is not None and made is not None and made.get(_channel(call, self._me), 0) < call.number:
                return peer_lost(self._group_name, call, self._members[peer].place, "left the mesh")
        return None

    def _refresh(self) -> Future[None]:
        if self._reading is None or self._reading.done():
            self._reading = self._threads.submit(self._read)
        return self._reading

    def _read(self) -> None:
        try:
            if self._store.check(["broken"]):
                self._broken = CommunicationError.from_wire(json.loads(self._store.get("broken")))
            if self._store.add("num_left", 0) > len(self._made_by_left):
                self._read_left()
        except RuntimeError:  # the store is gone with its host; connections and deadlines will tell
            pass

    def _read_left(self) -> None:
        for peer in range(len(self._members)):
            if peer not in self._made_by_left and self._store.check([f"left/{peer}"]):
                self._made_by_left[peer] = json.loads(self._store.get(f"left/{peer}"))

    async def farewell(self, deadline: float) -> None:
        """Say that this rank is done, and wait until all are: a closed socket may lose what a peer has not read."""
        self._threads.submit(self._store.set, f"left/{self._me}", json.dumps(self._made))
        self._threads.submit(self._store.add, "num_left", 1)
        while time.monotonic() < deadline and self._broken is None and len(self._made_by_left) < len(self._members):
            await asyncio.wait([asyncio.wrap_future(self._refresh())], timeout=max(0.0, deadline - time.monotonic()))
            await asyncio.sleep(0.01)


def _channel(call: Call, me: int) -> str:
    """The same text at both ends."""
    if not call.is_point_to_point:
        return "collectives"
    return f"{me}>{call.peer}" if call.kind == "send" else f"{call.peer}>{me}"
