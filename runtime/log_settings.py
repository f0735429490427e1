"""Format, level and context (rank, coordinates, step) of log lines. No structlog: importing it takes 0.1 s.

structlog adds every context variable with its prefix to its lines, also in a program that configures structlog itself.
The variables are created here by that name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from enum import StrEnum

from runtime.errors import Coords

LOG_FORMAT, LOG_LEVEL = "PARALLEL3D_LOG_FORMAT", "PARALLEL3D_LOG_LEVEL"

_PREFIX = "structlog_"
_RANK: ContextVar[int] = ContextVar(f"{_PREFIX}rank")
_COORDS: ContextVar[dict[str, int]] = ContextVar(f"{_PREFIX}coords")
_STEP: ContextVar[int] = ContextVar(f"{_PREFIX}step")


class LogFormat(StrEnum):
    """How log lines look."""

    COLOUR = "colour"
    PLAIN = "plain"
    """For people too, but without colours."""
    JSON = "json"


def log_format(is_terminal: bool, environ: Mapping[str, str] = os.environ) -> LogFormat:
    """What the environment says; otherwise for people on a terminal, and JSON elsewhere."""
    with suppress(ValueError):
        return LogFormat(environ.get(LOG_FORMAT, ""))
    if not is_terminal:
        return LogFormat.JSON
    return LogFormat.PLAIN if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" else LogFormat.COLOUR


def log_environment(fd: int = 2, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for child processes whose stderr is piped to this process and shown on its `fd`."""
    with suppress(OSError):
        return {LOG_FORMAT: log_format(os.isatty(fd), environ)}
    return {}


def log_level(environ: Mapping[str, str] = os.environ) -> int:
    """The lowest level that is logged: info, unless the environment names another."""
    found = logging.getLevelNamesMapping().get(environ.get(LOG_LEVEL, "").upper(), logging.NOTSET)
    return found or logging.INFO


def bind_rank(rank: int, coords: Coords) -> None:
    """Log lines of this task, and of tasks it starts, carry this rank and its coordinates from now on."""
    _RANK.set(rank)
    _COORDS.set(coords._asdict())


def bind_step(step: int) -> None:
    """Log lines of this task, and of tasks it starts, carry this step from now on."""
    _STEP.set(step)
