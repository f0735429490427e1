"""Where a log line comes from: rank, coordinates and step, bound to the context that the code runs in.

structlog adds every context variable of a certain name to its lines, also those of a program that configures structlog
in its own way. They are made here by that name, because importing structlog takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from runtime.errors import Coords

_PREFIX = "structlog_"
_RANK: ContextVar[int] = ContextVar(f"{_PREFIX}rank")
_COORDS: ContextVar[dict[str, int]] = ContextVar(f"{_PREFIX}coords")
_STEP: ContextVar[int] = ContextVar(f"{_PREFIX}step")


@contextmanager
def rank_bound(rank: int, coords: Coords) -> Iterator[None]:
    """Lines of this block, and of what it starts, are of this rank."""
    tokens = _RANK.set(rank), _COORDS.set(dict(coords._asdict()))
    try:
        yield
    finally:
        _COORDS.reset(tokens[1])
        _RANK.reset(tokens[0])


@contextmanager
def step_bound(step: int) -> Iterator[None]:
    """Lines of this block are of this step."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)
