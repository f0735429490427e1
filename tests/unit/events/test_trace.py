"""The trace as viewers want it: one process a rank, rows whose spans nest, arrows from sends to receives."""

from __future__ import annotations

import gzip
import json

import pytest

from monitoring.events.collectives import CollectiveRecorder
from monitoring.events.trace import ACTIONS, COLLECTIVES, STEPS, Span, chrome_trace, to_bytes


def test_ranks_are_processes_and_time_begins_with_the_first_span():
    spans = {
        0: [Span(STEPS, "step 3", "step", 100.0, 100.5, {"loss": 2.0}), Span(ACTIONS, "0F0", "F", 100.1, 100.2)],
        1: [Span(ACTIONS, "1F0", "F", 100.25, 100.3)],
    }
    trace = chrome_trace(spans, {0: "rank 0 (dp=0 tp=0 pp=0)"})
    assert trace["displayTimeUnit"] == "ms"
    titles = [event["args"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert titles == [{"name": "rank 0 (dp=0 tp=0 pp=0)"}, {"name": "rank 1"}]
    found = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert found == [
        (0, STEPS, "step 3", 0.0, 500_000.0),
        (0, ACTIONS, "0F0", 100_000.0, 100_000.0),
        (1, ACTIONS, "1F0", 250_000.0, 50_000.0),
    ]


def test_a_message_is_an_arrow_inside_both_spans():
    spans = {
        0: [Span(ACTIONS, "0SEND_F0", "SEND_F", 1.0, 1.1, sends="0.0.0.1RECV_F0")],
        1: [Span(ACTIONS, "1RECV_F0", "RECV_F", 0.5, 1.2, receives="0.0.0.1RECV_F0")],
    }
    arrows = [event for event in chrome_trace(spans, {})["traceEvents"] if event["ph"] in "sf"]
    (start, end) = arrows
    assert start["id"] == end["id"] == 1
    assert (start["pid"], end["pid"], end["bp"]) == (0, 1, "e")
    assert 500_000 <= start["ts"] <= 600_000 <= end["ts"] < 700_000


def test_collectives_that_overlap_have_rows_of_their_own():
    def call(start: float, end: float) -> Span:
        return Span(COLLECTIVES, "all_reduce dp", "all_reduce", start, end)

    events = chrome_trace({0: [call(0, 2), call(1, 3), call(2, 4), call(3, 5)]}, {})["traceEvents"]
    assert [event["tid"] - COLLECTIVES for event in events if event["ph"] == "X"] == [0, 1, 0, 1]
    rows: dict[int, float] = {}
    for event in (event for event in events if event["ph"] == "X"):
        assert event["ts"] >= rows.get(event["tid"], 0.0)
        rows[event["tid"]] = event["ts"] + event["dur"]


def test_a_trace_without_spans_is_valid():
    assert json.loads(gzip.decompress(to_bytes(chrome_trace({}, {})))) == {"traceEvents": [], "displayTimeUnit": "ms"}
    assert to_bytes(chrome_trace({}, {})) == to_bytes(chrome_trace({}, {}))


def test_a_span_survives_the_trip():
    span = Span(ACTIONS, "0F0", "F", 1.0, 2.0, {"stage": 0}, "a", "b")
    assert Span.from_wire(json.loads(json.dumps(span.to_wire()))) == span


@pytest.mark.parametrize("row", [None, [], [1], [1, "a", "b", "x", 1.0, {}, "", ""]])
def test_a_span_that_is_none(row):
    with pytest.raises(ValueError, match="span"):
        Span.from_wire(row)


def test_calls_since_a_moment():
    recorder = CollectiveRecorder()
    for began, seconds in ((1.0, 0.5), (2.0, 0.5), (1.5, 2.0), (4.0, 0.1)):
        recorder.record("dp", "all_reduce", "default", "default", 8, 2, seconds, began)
    assert [event.began for event in recorder.since(2.6)] == [1.5, 4.0]
    assert recorder.since(5.0) == []
