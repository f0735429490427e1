"""Shared memory in which ranks read each other's calls: rings, pages, segments and pulses."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from process_groups.shared_memory import board
from process_groups.shared_memory.board import Page, Pulse, Ring, Segment
from runtime.errors import CommunicationError, Coords, GroupClosed, PeerLost


def ring(num_slots: int = 4) -> Ring:
    return Ring(memoryview(bytearray(Ring.size(num_slots))), num_slots)


def page(group_size: int = 3) -> Page:
    return Page(memoryview(bytearray(Page.size(group_size))), group_size)


def test_a_new_ring_is_empty():
    fresh = ring()
    assert (fresh.issued, fresh.finished) == (0, 0)
    assert fresh.read(1) is None
    assert fresh.differs(1, word(1, "anything")) is None


def test_calls_are_read_by_number_until_the_ring_has_gone_on():
    posted = ring(num_slots=4)
    for number in range(1, 11):
        posted.post(number, f"call {number}")
    assert posted.issued == 10
    assert [posted.read(number) for number in range(5, 12)] == [
        None, None, "call 7", "call 8", "call 9", "call 10", None
    ]  # fmt: skip


def test_a_shorter_text_replaces_a_longer_one_whole():
    posted = ring(num_slots=1)
    posted.post(1, "a long description")
    posted.post(2, "short")
    assert posted.read(2) == "short"


def test_finished_calls_are_counted():
    posted = ring()
    for _ in range(3):
        posted.finish()
    assert posted.finished == 3


def word(number, text):
    """What another ring has for the same call."""
    return ring().post(number, text)


def test_only_another_text_at_the_same_number_differs():
    posted = ring(num_slots=4)
    posted.post(1, "all_reduce(sum)")
    assert posted.differs(1, word(1, "all_reduce(sum)")) is None
    assert posted.differs(1, word(1, "barrier")) == "all_reduce(sum)"
    assert posted.differs(2, word(2, "barrier")) is None, "not called yet"
    posted.post(5, "broadcast")
    assert posted.differs(1, word(1, "barrier")) is None, "the ring has gone on"


def test_long_texts_are_cut_alike_on_both_sides():
    posted = ring(num_slots=2)
    posted.post(1, "x" * 500)
    posted.post(2, "neighbour")
    assert posted.differs(1, word(1, "x" * 500)) is None
    assert posted.differs(1, word(1, "y" + "x" * 499)) is not None
    assert posted.read(2) == "neighbour"


def test_the_parts_of_a_page_do_not_overlap():
    whole = page(group_size=3)
    rings = [whole.collectives, *whole.sends, *whole.receives]
    assert len(rings) == 7
    for index, each in enumerate(rings):
        for number in range(1, 17):
            each.post(number, f"ring {index} call {number}" + "." * 300)
    whole.close(PeerLost("x" * 3000, rank=1))
    for index, each in enumerate(rings):
        for number in range(1, 17):
            assert each.read(number).startswith(f"ring {index} call {number}.")


def test_a_page_is_open_until_its_owner_leaves():
    whole = page()
    assert not whole.has_left
    assert whole.broken_by() is None
    whole.close(None)
    assert whole.has_left
    assert whole.broken_by() is None


def test_a_page_says_why_the_group_was_given_up_and_the_first_word_stands():
    whole = page()
    error = PeerLost("gone", rank=3, coords=Coords(1, 0, 1), step=7, action="barrier")
    whole.close(error)
    whole.close(GroupClosed("later"))
    whole.close(None)
    found = whole.broken_by()
    assert type(found) is PeerLost
    assert found.to_wire() == error.to_wire()
    assert not whole.has_left


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f600", '"'])
def test_a_note_longer_than_its_room_keeps_kind_and_rank(letter):
    whole = page()
    whole.close(PeerLost(letter * 10_000, rank=3, coords=Coords(1, 0, 1), action="barrier"))
    found = whole.broken_by()
    assert type(found) is PeerLost
    assert (found.rank, found.coords, found.action) == (3, (1, 0, 1), "barrier")
    assert set(found.message) == {letter}
    assert whole.collectives.issued == 0


def test_a_note_with_a_long_action_fits_as_well():
    whole = page()
    whole.close(CommunicationError("m" * 5000, rank=1, action="a" * 5000))
    assert whole.broken_by().rank == 1
    assert whole.collectives.issued == 0


def test_a_peer_maps_the_same_memory():
    mine = Segment.create((3, 2))
    theirs = Segment.open(mine.address, (3, 2))
    assert [len(each.sends) for each in theirs.pages] == [3, 2]
    mine.pages[1].collectives.post(1, "barrier")
    assert theirs.pages[1].collectives.read(1) == "barrier"
    assert theirs.pages[0].collectives.issued == 0
    mine.close()
    theirs.close()


def test_only_the_very_same_segment_is_mapped():
    mine = Segment.create((2,))
    pid, fd, nonce = mine.address.split("/")
    other = "0" * len(nonce)
    assert Segment.open(f"{pid}/{fd}/{other}", (2,)) is None
    with open(os.devnull, "r+b") as file:
        assert Segment.open(f"{pid}/{file.fileno()}/{nonce}", (2,)) is None
    mine.close()
    assert Segment.open(mine.address, (2,)) is None, "its number is no file any more"


@pytest.fixture
def ended():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_a_dead_processs_segment_is_not_there(ended):
    assert Segment.open(f"{ended}/3/{'0' * 32}", (2,)) is None


def test_nothing_stays_open():
    gc.collect()  # closed groups are cycles, and their memory keeps its file open: those of other tests go first
    before = os.listdir("/proc/self/fd")
    mine = Segment.create((2,))
    theirs = Segment.open(mine.address, (2,))
    assert Segment.open(mine.address[:-1] + "x", (2,)) is None
    mine.close()
    theirs.close()
    del mine, theirs
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


def test_a_pulse_stops_with_its_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        segment = Segment.create((2,))
        segment.address = f"{process.pid}/3/{'0' * 32}"
        pulse = Pulse(segment)
        assert not pulse.is_dead()
        process.kill()
        process.wait()
        assert pulse.is_dead()
        pulse.close()
        segment.close()


def test_a_pulse_sees_whether_the_heart_beats(monkeypatch):
    now = 100.0
    monkeypatch.setattr(board.time, "monotonic", lambda: now)
    segment = Segment.create((2,))
    pulse = Pulse(segment)
    now = 103.0
    assert pulse.seconds_still() == 3.0
    segment.beat()
    assert pulse.seconds_still() == 0.0
    now = 104.5
    assert pulse.seconds_still() == 1.5
    pulse.close()
    segment.close()


def test_a_ring_has_room_while_its_owner_is_near():
    posted = ring(num_slots=4)
    assert posted.room_until == 4
    posted.post(1, "barrier")
    assert posted.room_until == 5
