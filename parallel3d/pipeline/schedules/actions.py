"""Schedule actions: a stage, a kind and a microbatch, written as `2F0` (stage 2, forward, microbatch 0)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from runtime.errors import InvalidCall


class Kind(StrEnum):
    """The kind of an action."""

    F = "F"
    """Forward."""
    B = "B"
    """The full backward: input and weight gradients."""
    I = "I"  # noqa: E741  # the usual name in pipeline schedules
    """Backward, input gradient only: what the previous stage waits for."""
    W = "W"
    """Backward, weight gradients only: no other stage waits for them."""
    SEND_F = "SEND_F"
    """Send the stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Receive the stage's input from the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradient of the stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient of the stage's output from the next stage."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Reduce the stage's gradients over the data-parallel replicas; once, after its last backward."""


COMPUTE = frozenset((Kind.F, Kind.B, Kind.I, Kind.W))
SENDS = frozenset((Kind.SEND_F, Kind.SEND_B))
RECEIVES = frozenset((Kind.RECV_F, Kind.RECV_B))
BACKWARD_FIRST = frozenset((Kind.B, Kind.I))
"""The kinds that compute the input gradient, which the previous stage waits for."""


class Action(NamedTuple):
    """One cell of a table."""

    stage: int
    kind: Kind
    microbatch: int | None = None
    """None only for REDUCE_GRAD."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE


_WAYS = ((Kind.SEND_F, Kind.RECV_F, 1), (Kind.SEND_B, Kind.RECV_B, -1))
_RECEIVE_OF = {send: (receive, step) for send, receive, step in _WAYS}
_SEND_OF = {receive: (send, -step) for send, receive, step in _WAYS}


def receive_of(send: Action) -> Action | None:
    """The receive that matches a send; None for other actions."""
    return _other_end(send, _RECEIVE_OF)


def send_of(receive: Action) -> Action | None:
    """The send that matches a receive; None for other actions."""
    return _other_end(receive, _SEND_OF)


def _other_end(action: Action, ends: Mapping[Kind, tuple[Kind, int]]) -> Action | None:
    if action.kind not in ends:
        return None
    kind, step = ends[action.kind]
    return Action(action.stage + step, kind, action.microbatch)


_KINDS = "|".join(sorted(Kind, key=len, reverse=True))
# At most 9 digits: int() raises its own error for numbers of thousands of digits.
_ACTION = re.compile(rf"(\d{{1,9}})({_KINDS})(\d{{0,9}})", re.ASCII)
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def parse_actions(text: str) -> tuple[Action, ...]:
    """The actions of one cell: one action, or two for an overlapped pair such as `(0F3;0B1)OVERLAP_F_B`."""
    text = text.strip()
    pair = _OVERLAPPED.fullmatch(text)
    return tuple(_parse(part) for part in (pair.group(1).split(";") if pair else [text]))


def _parse(text: str) -> Action:
    found = _ACTION.fullmatch(text.strip())
    if found is None or (found.group(2) == Kind.REDUCE_GRAD) != (found.group(3) == ""):
        raise InvalidCall(
            f"{text[:40]!r} is no action: write a stage, one of {', '.join(Kind)}, and a microbatch, such as 2F0; "
            "REDUCE_GRAD has no microbatch."
        )
    stage, kind, microbatch = found.groups()
    return Action(int(stage), Kind(kind), int(microbatch) if microbatch else None)
