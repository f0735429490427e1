"""Where a log line comes from: rank, coordinates and step, bound to the context that the code runs in.

structlog adds every context variable of a certain name to its lines, also those of a program that configures structlog
in its own way. They are made here by that name, because importing structlog takes a tenth of a second.
"""

from __future__ import annotations

from contextvars import ContextVar

from runtime.errors import Coords

_PREFIX = "structlog_"
_RANK: ContextVar[int] = ContextVar(f"{_PREFIX}rank")
_COORDS: ContextVar[dict[str, int]] = ContextVar(f"{_PREFIX}coords")
_STEP: ContextVar[int] = ContextVar(f"{_PREFIX}step")


def bind_rank(rank: int, coords: Coords) -> None:
    """From here on, lines of this task, and of what it starts, are of this rank."""
    _RANK.set(rank)
    _COORDS.set(coords._asdict())


def bind_step(step: int) -> None:
    """From here on, lines of this task, and of what it starts, are of this step."""
    _STEP.set(step)
