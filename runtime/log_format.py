"""How log lines look, and which are left out: what the environment and the terminal say. No structlog."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum

LOG_FORMAT, LOG_LEVEL = "PARALLEL3D_LOG_FORMAT", "PARALLEL3D_LOG_LEVEL"


class LogFormat(StrEnum):
    """How lines look."""

    COLOUR = "colour"
    PLAIN = "plain"
    """For people too, but without colours."""
    JSON = "json"


def log_format(is_terminal: bool, environ: Mapping[str, str] = os.environ) -> LogFormat:
    """What the environment says; else for people on a terminal, and for machines elsewhere."""
    with suppress(ValueError):
        return LogFormat(environ.get(LOG_FORMAT, ""))
    if not is_terminal:
        return LogFormat.JSON
    return LogFormat.PLAIN if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" else LogFormat.COLOUR


def log_environment(fd: int = 2, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For processes whose stderr is a pipe to this one, which shows what comes out of it on `fd`."""
    with suppress(OSError):
        return {LOG_FORMAT: log_format(os.isatty(fd), environ)}
    return {}


def log_level(environ: Mapping[str, str] = os.environ) -> int:
    """The least level that is logged: info, unless the environment names another."""
    found = logging.getLevelNamesMapping().get(environ.get(LOG_LEVEL, "").upper(), logging.NOTSET)
    return found or logging.INFO
