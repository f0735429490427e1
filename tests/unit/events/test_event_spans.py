"""Events as a trace shows them."""

from __future__ import annotations

from monitoring.events.event_spans import spans_of
from monitoring.events.events import NO_MICROBATCH, Axis, Event, What
from monitoring.events.trace import ACTIONS, COLLECTIVES, STEPS, Span


def test_actions_carry_where_they_were_and_their_messages():
    events = [
        Event(What.F, 3, 1.0, 2.0, 1, 0, cpu=0.75, waited=0.25),
        Event(What.SEND_F, 3, 2.0, 2.5, 1, 0, num_bytes=64),
        Event(What.SEND_B, 3, 2.5, 3.0, 2, 1, num_bytes=64),
        Event(What.RECV_B, 3, 3.0, 4.0, 1, 1, num_bytes=64),
        Event(What.REDUCE_GRAD, 3, 4.0, 4.5, 1),
    ]
    forward, sent, back, received, handed_over = spans_of(events, "0.1", {})
    place = {"stage": 1, "microbatch": 0, "step": 3}
    assert forward == Span(ACTIONS, "1F0", "F", 1.0, 2.0, {**place, "waited": 0.25, "cpu": 0.75})
    assert (sent.name, sent.sends, sent.receives) == ("1SEND_F0", "3.0.1.2RECV_F0", "")
    assert (back.sends, received.receives) == ("3.0.1.1RECV_B1", "3.0.1.1RECV_B1")
    assert (handed_over.name, handed_over.facts["microbatch"]) == ("1REDUCE_GRAD", None)
    assert handed_over.sends == handed_over.receives == ""


def test_steps_have_facts_and_what_took_no_time_is_left_out():
    events = [
        Event(What.DATA, 3, 1.0, 1.25),
        Event(What.REDUCE, 3, 2.0, 2.0),
        Event(What.MEET, 3, 2.0, 2.5),
        Event(What.STEP, 3, 1.0, 3.0),
    ]
    found = list(spans_of(events, "0.0", {3: {"loss": 2.0}}, offset=10.0))
    assert [(span.row, span.name, span.start, span.end) for span in found] == [
        (STEPS, "data", 11.0, 11.25),
        (STEPS, "meet", 12.0, 12.5),
        (STEPS, "step 3", 11.0, 13.0),
    ]
    assert found[-1].facts == {"loss": 2.0}


def test_calls_tell_their_axis():
    one = Event(What.COLLECTIVE, 3, 1.0, 2.0, waited=1.0, num_bytes=8, axis=Axis.DP, strategy=1)
    several = one._replace(axis=Axis.TP, calls=36, waited=0.5, microbatch=NO_MICROBATCH)
    first, second = spans_of([one, several], "0.0", {})
    assert (first.row, first.name, first.category) == (COLLECTIVES, "all_reduce dp", "all_reduce")
    assert first.facts == {"bytes": 8, "strategy": "ring", "step": 3}
    assert (second.name, second.facts["calls"], second.facts["seconds"]) == ("all_reduce tp", 36, 0.5)
