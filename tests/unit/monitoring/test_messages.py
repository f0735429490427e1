"""What ranks send is decoded once, and nothing that is malformed gets through."""

from __future__ import annotations

import math

import pytest

from monitoring.events.events import RECORD_BYTES, Event, What
from monitoring.messages import (
    ClockOffset,
    DataQueue,
    Events,
    Joined,
    LogLine,
    Malformed,
    Memory,
    NonFinite,
    RankEndpoint,
    Ready,
    RunStep,
    decode,
    receive,
)
from tests.support.observed import encoded

STEP = {"step": 3, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 100, "seconds": 0.5}
EVENT = Event(What.F, 0, 1.0, 2.0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("mesh", {"coords": [1, 0, 2]}, Joined(1, 0, 2)),
        ("ready", {"device": "cpu", "parameters": 7, "pid": 5}, Ready("", "cpu", 7, 0)),
        ("step", {**STEP, "bandwidth": 1.5}, RunStep(3, 2.5, 1.0, 1e-3, 100, 0.5, all_reduce_bandwidth=1.5)),
        ("step", {**STEP, "bandwidth": None}, RunStep(3, 2.5, 1.0, 1e-3, 100, 0.5)),
        ("events", {"data": "AAAA", "dropped": 2}, Events("AAAA", 2)),
        ("memory", {"bytes": 9, "kinds": {"weights": 4}}, Memory(9, {"weights": 4})),
        ("memory", {"bytes": 9}, Memory(9, {})),
        ("queue", {"mean": 1, "capacity": 2}, DataQueue(1.0, 2)),
        ("clock", {"offset": -0.5}, ClockOffset(-0.5)),
        ("log", {"event": "hello", "rank": 7}, LogLine({"event": "hello", "rank": 0})),
        ("nonfinite", {"step": 4}, NonFinite(4)),
        ("endpoint", {"target": "[::1]:4000", "scheme": "https"}, RankEndpoint("[::1]:4000", "https")),
        ("heartbeat", {}, None),
    ],
)
def test_each_kind(kind, fields, expected):
    assert decode(0, {"kind": kind, **fields}) == expected


def test_rank_0_reports_steps_for_all():
    assert decode(1, {"kind": "step"}) is None


def test_events_are_unpacked_with_the_ranks_offset():
    message = decode(0, {"kind": "events", "data": encoded([EVENT]), "dropped": 0})
    assert isinstance(message, Events)
    assert message.unpack(10.0) == [EVENT._replace(start=11.0, end=12.0)]
    assert message.num_events == 1
    assert Events.to_wire(bytes(RECORD_BYTES), 3)["dropped"] == 3


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mesh", {"coords": [0, 0]}),
        ("mesh", {"coords": [0, -1, 0]}),
        ("mesh", {"coords": ["a", 0, 0]}),
        ("mesh", {"coords": 3}),
        ("ready", {"device": 3, "parameters": 1}),
        ("step", {}),
        ("step", {**STEP, "loss": "low"}),
        ("step", {**STEP, "step": -1}),
        ("step", {**STEP, "tokens": True}),
        ("step", {**STEP, "seconds": math.nan}),
        ("step", {**STEP, "loss": 10**400}),
        ("step", {**STEP, "bandwidth": "fast"}),
        ("events", {"data": "AAAA", "dropped": -1}),
        ("events", {"data": 5, "dropped": 0}),
        ("memory", {"bytes": "much"}),
        ("memory", {"bytes": 1, "kinds": {"weights": "much"}}),
        ("memory", {"bytes": 1, "kinds": 7}),
        ("queue", {"mean": 1.0}),
        ("loop_lag", {"counts": [1]}),
        ("collectives", {"mesh": 0, "totals": 3}),
        ("clock", {"offset": math.inf}),
        ("nonfinite", {}),
        ("endpoint", {"target": "evil.example/path:4000", "scheme": "http"}),
        ("endpoint", {"target": "127.0.0.1:4002", "scheme": "file"}),
    ],
)
def test_a_malformed_message(kind, fields):
    with pytest.raises(ValueError, match=f"rank 0 sent a malformed message of kind {kind}: "):
        decode(0, {"kind": kind, **fields})
    assert receive(0, {"kind": kind, **fields}) == Malformed()
