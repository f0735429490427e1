"""When events are sent, and what becomes of them while nobody listens."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from typing import Any

import pytest

from monitoring.events.events import Event, What, unpack
from monitoring.events.recorder import CAPACITY, Recorder
from parallel3d.data.batches import QueueDepths
from parallel3d.runs.event_sender import INTERVAL, EventSender
from runtime.control import MAX_MESSAGE_BYTES, encode


class Ear:
    """Hears all; is behind when told so."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.is_behind = False
        self.news = asyncio.Event()

    def send(self, kind: str, **fields: object) -> None:
        assert len(encode(kind, fields)) <= MAX_MESSAGE_BYTES
        self.heard.append({"kind": kind, **fields})
        self.news.set()

    def events(self) -> list[Event]:
        told = [message for message in self.heard if message["kind"] == "events"]
        return [event for message in told for event in unpack(b64decode(message["data"]))]


def filled(num_events: int) -> Recorder:
    recorder = Recorder()
    for step in range(num_events):
        recorder.record(What.STEP, step, 1.0, 2.0)
    return recorder


async def test_all_are_told_in_messages_that_fit():
    ear = Ear()
    sender = EventSender(filled(5000), ear, lambda: True)
    sender.send_some()
    some = len(ear.events())
    assert 0 < some < 5000, "the event loop has other things to do"
    sender.stop()
    assert [event.step for event in ear.events()] == list(range(5000))
    assert {message["dropped"] for message in ear.heard} == {0}


async def test_a_listener_that_is_behind_costs_the_oldest():
    ear, recorder = Ear(), Recorder()
    sender = EventSender(recorder, ear, lambda: True)
    ear.is_behind = True
    for step in range(CAPACITY + 100):
        recorder.record(What.STEP, step, 1.0, 2.0)
        if step % 1000 == 0:
            sender.send_some()
    assert ear.heard == []
    ear.is_behind = False
    sender.stop()
    assert [event.step for event in ear.events()] == list(range(100, CAPACITY + 100))
    assert {message["dropped"] for message in ear.heard} == {100}


async def test_nothing_new_is_no_message():
    ear = Ear()
    sender = EventSender(filled(1), ear, lambda: True, QueueDepths(2))
    for _ in range(3):
        sender.send_some()
    assert len(ear.heard) == 1


async def test_the_queue_is_told_as_a_mean():
    ear, queue = Ear(), QueueDepths(4)
    sender = EventSender(Recorder(), ear, lambda: True, queue)
    for depth in (4, 1):
        queue.note(depth)
    sender.send_some()
    sender.send_some()
    assert ear.heard == [{"kind": "queue", "mean": 2.5, "capacity": 4}]


@pytest.mark.parametrize("is_computing", [True, False])
async def test_between_steps_it_waits_but_not_for_ever(is_computing):
    ear, looks = Ear(), []

    def look() -> bool:
        looks.append(len(ear.heard))
        return is_computing

    # At each look this clock is half an interval further.
    sender = EventSender(filled(1), ear, look, clock=lambda: len(looks) * INTERVAL / 2)
    sender.start()
    async with asyncio.timeout(10):
        await ear.news.wait()
    assert len(ear.events()) == 1
    assert (len(looks) == 1) == is_computing
    sender.stop()
