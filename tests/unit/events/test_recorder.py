"""The ring of events: what goes in comes out, once, in order; the oldest go when nobody takes them."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from monitoring.events import events
from monitoring.events.collectives import CollectiveRecorder
from monitoring.events.events import OPS, RECORD_BYTES, Axis, Event, What, pack_into, unpack
from monitoring.events.recorder import Recorder


def steps_of(data: bytes) -> list[int]:
    return [event.step for event in unpack(data)]


def filled(num_events: int, capacity: int = 8) -> Recorder:
    recorder = Recorder(capacity)
    for step in range(num_events):
        recorder.record(What.STEP, step, 1.0, 2.0)
    return recorder


def test_every_field_comes_out_as_it_went_in():
    event = Event(What.RECV_B, 7, 1.5, 2.5, 3, 4, 0.25, 0.125, 1 << 40, Axis.TP, 5, 2, 36)
    recorder = Recorder()
    recorder.record(*event)
    (found,) = unpack(recorder.take().data)
    assert found == event
    assert (found.what, found.axis, found.action) == (What.RECV_B, Axis.TP, "3RECV_B4")


def test_columns_that_are_checked_are_the_fields_of_an_event():
    assert events._COLUMNS.names == Event._fields
    assert events._COLUMNS.itemsize == RECORD_BYTES


def test_what_is_taken_is_gone_and_nothing_is_twice():
    recorder = filled(5)
    assert steps_of(recorder.take(2).data) == [0, 1]
    recorder.record(What.STEP, 5, 1.0, 2.0)
    assert steps_of(recorder.take().data) == [2, 3, 4, 5]
    assert recorder.take() == (b"", 0)


@pytest.mark.parametrize("num_events", [8, 9, 15, 16, 17, 100])
def test_the_oldest_go_when_nobody_takes_them(num_events):
    recorder = filled(num_events)
    batch = recorder.take()
    assert steps_of(batch.data) == list(range(num_events - 8, num_events))
    assert batch.dropped == num_events - 8
    for step in range(3):
        recorder.record(What.STEP, step, 1.0, 2.0)
    assert recorder.take()[1] == num_events - 8, "counted from the start, each once"


def test_the_latest_stay_when_they_are_taken():
    recorder = filled(11)
    recorder.take()
    assert steps_of(recorder.latest()) == list(range(3, 11))
    assert steps_of(filled(2).latest()) == [0, 1]
    assert Recorder().latest() == b""


def test_threads_do_not_write_over_each_other():
    recorder, each = Recorder(1 << 12), 500

    def write(thread: int) -> None:
        for number in range(each):
            recorder.record(What.F, number, 1.0, 2.0, thread, number, 0.5, 0.0, number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    found = list(unpack(recorder.take().data))
    for thread in range(4):
        mine = [event for event in found if event.stage == thread]
        assert [event.step for event in mine] == list(range(each))
        assert all(event.num_bytes == event.microbatch == event.step for event in mine)


def test_calls_of_groups_leave_events():
    calls, recorder = CollectiveRecorder(), Recorder()
    calls.record("dp", "all_reduce", "ring", "adaptive", 64, 2, 0.5, 10.0)
    calls.events_into, recorder.step = recorder, 3
    calls.record("tp", "all_gather", "default", "default", 4096, 2, 0.25, 11.0)
    calls.record("pairs", "barrier", "of a user", "default", 0, 2, -1e-9, 12.0)
    gathered, met = unpack(recorder.take().data)
    assert (gathered.what, gathered.step, gathered.axis, OPS[gathered.op]) == (
        What.COLLECTIVE,
        3,
        Axis.TP,
        "all_gather",
    )
    assert (gathered.start, gathered.end, gathered.waited, gathered.num_bytes) == (11.0, 11.25, 0.25, 4096)
    assert (met.axis, met.strategy, met.waited) == (Axis.WORLD, 0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 3.0},
        {"start": -1.0},
        {"end": math.nan},
        {"end": math.inf},
        {"cpu": -1.0},
        {"cpu": math.nan},
        {"waited": math.inf},
        {"op": len(OPS)},
        {"strategy": 9},
        {"what": 16},
        {"axis": 4},
    ],
    ids=json.dumps,
)
def test_what_nobody_could_have_written_is_refused(changes):
    buffer = bytearray(RECORD_BYTES)
    pack_into(buffer, 0, Event(What.F, 0, 1.0, 2.0)._replace(**changes))
    with pytest.raises(ValueError):  # noqa: PT011
        list(unpack(bytes(buffer)))


def test_half_an_event_is_refused():
    with pytest.raises(ValueError, match="59 bytes are no whole number of events"):
        list(unpack(filled(1).take().data[:-1]))
