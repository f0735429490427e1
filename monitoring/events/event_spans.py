"""Converts events to spans of a trace: one row for steps and their phases, one for actions, then collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from monitoring.events.events import ACTIONS, NO_MICROBATCH, OPS, STRATEGIES, Axis, Event, What
from monitoring.events.trace import ACTIONS as ACTION_ROW
from monitoring.events.trace import COLLECTIVES, STEPS, Span

_RECEIVE_OF: dict[int, tuple[What, int]] = {What.SEND_F: (What.RECV_F, 1), What.SEND_B: (What.RECV_B, -1)}
_PHASES = frozenset((What.DATA, What.REDUCE, What.MEET, What.OPTIMIZER, What.CHECKPOINT))


def spans_of(
    events: Iterable[Event], pipeline: str, facts: Mapping[int, Mapping[str, Any]], offset: float = 0.0
) -> Iterator[Span]:
    """The spans of one rank.

    pipeline: name of the rank's pipeline, part of its messages' names. facts: by step, shown with the step's span.
    offset: seconds added to all times.
    """
    for event in events:
        start, end = event.start + offset, event.end + offset
        if event.what in ACTIONS:
            yield _of_action(event, pipeline, start, end)
        elif event.what == What.COLLECTIVE:
            yield _of_collective(event, start, end)
        elif event.what == What.STEP:
            yield Span(STEPS, f"step {event.step}", "step", start, end, facts.get(event.step, {}))
        elif event.what in _PHASES and end > start:
            name = What(event.what).name.lower()
            yield Span(STEPS, name, name, start, end, {"step": event.step})


def _of_action(event: Event, pipeline: str, start: float, end: float) -> Span:
    microbatch = None if event.microbatch == NO_MICROBATCH else event.microbatch
    where: dict[str, Any] = {"stage": event.stage, "microbatch": microbatch, "step": event.step}
    if event.waited:
        where["waited"] = event.waited
    if event.cpu:
        where["cpu"] = event.cpu
    if event.num_bytes:
        where["bytes"] = event.num_bytes
    sends, receives = _messages(event, pipeline)
    return Span(ACTION_ROW, event.action, What(event.what).name, start, end, where, sends, receives)


def _messages(event: Event, pipeline: str) -> tuple[str, str]:
    """(sent, received) message names; each is made of the step, the pipeline and the receive action."""
    if event.what in _RECEIVE_OF:
        receive, further = _RECEIVE_OF[event.what]
        return f"{event.step}.{pipeline}.{event.stage + further}{receive.name}{event.microbatch}", ""
    return "", f"{event.step}.{pipeline}.{event.action}" if event.what in (What.RECV_F, What.RECV_B) else ""


def _of_collective(event: Event, start: float, end: float) -> Span:
    kind = OPS[event.op]
    facts: dict[str, Any] = {"bytes": event.num_bytes, "strategy": STRATEGIES[event.strategy], "step": event.step}
    if event.calls > 1:
        facts |= {"calls": event.calls, "seconds": event.waited}
    return Span(COLLECTIVES, f"{kind} {Axis(event.axis).label}", kind, start, end, facts)
