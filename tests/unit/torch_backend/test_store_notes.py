"""Notes in a store that hangs, as behind a cut link, or that is gone."""

from __future__ import annotations

import threading
import time

import pytest

from process_groups.call import Call, Place
from process_groups.shared_memory.ledger import Member
from process_groups.torch_backend.store_notes import StoreNotes
from runtime.errors import Coords
from runtime.threads import DaemonThreads

BARRIER = Call("barrier", number=1, terms="barrier")


class HangingStore:
    """Never answers, until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __getattr__(self, _):
        return lambda *_: self.over.wait()


class LostStore:
    """Fails as torch's does when its server has died; counts who asks."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __getattr__(self, _):
        return self._fail

    def _fail(self, *_):
        self.num_asked += 1
        raise RuntimeError("Connection reset by peer")


@pytest.fixture
def threads():
    made = DaemonThreads("test-notes")
    yield made
    made.stop()


def notes_in(store: object, threads: DaemonThreads) -> StoreNotes:
    members = [Member(Place(rank, Coords(rank, 0, 0)), None, None) for rank in range(2)]
    return StoreNotes(store, "world", members, 0, threads)  # type: ignore[arg-type]


async def test_a_store_that_hangs_keeps_nobody_from_leaving(threads):
    store = HangingStore()
    try:
        await notes_in(store, threads).wait_for_peers(time.monotonic() + 0.01)
    finally:
        store.over.set()


async def test_a_store_that_is_gone_is_not_asked_again(threads):
    store = LostStore()
    notes = notes_in(store, threads)
    for _ in range(3):
        assert notes.trouble(BARRIER) is None
        notes._refresh().result()
    assert store.num_asked == 1
