"""Log lines: for people on a terminal, JSON elsewhere; a copy of each goes to the launcher.

Does not change structlog's global configuration, which belongs to the user's program.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from datetime import datetime
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from runtime.control import RankControl, rank_control
from runtime.environment import is_rank
from runtime.log_settings import LogFormat, log_format, log_level

_FIRST = ("time", "level", "event", "rank", "coords", "step")
_LONGEST = 8192  # characters of a value that is sent on: a message has room for 64 KiB
_MOST_FIELDS = 32

Record = dict[str, Any]
OnRecord = Callable[[Record], object]


def logger(name: str | None = None, **fields: Any) -> FilteringBoundLogger:
    """A logger whose lines carry rank, coordinates and step, and these fields: `logger().info("saved", path=path)`.

    Lines go to stderr, and to the run's page and folder where this process is a rank of a run. Levels below info are
    left out, unless PARALLEL3D_LOG_LEVEL says otherwise.
    """
    control = rank_control()
    on_record = None if control is None else _Sender(control)
    bound = fields if name is None else {"logger": name, **fields}
    if is_rank() and os.environ.get("RANK", "").isdecimal():
        bound = {"rank": int(os.environ["RANK"]), **bound}  # also before there is a mesh
    form = log_format(sys.stderr is not None and sys.stderr.isatty())
    return make_logger(form, on_record=on_record, level=log_level()).bind(**bound)


def make_logger(
    form: LogFormat,
    *,
    on_record: OnRecord | None = None,
    level: int = logging.INFO,
    write: Callable[[str], object] | None = None,
) -> FilteringBoundLogger:
    """on_record: called with a copy of each record. write: called with each line; default: the current stderr."""
    steps: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _in_order,
    ]
    if on_record is not None:
        steps.append(_Copy(on_record))
    steps += _renderers(form)
    wrapper = structlog.make_filtering_bound_logger(level)
    lines = structlog.wrap_logger(
        _Lines(write or to_stderr), processors=steps, wrapper_class=wrapper, context_class=dict
    )
    return cast(FilteringBoundLogger, lines.bind())


def _renderers(form: LogFormat) -> list[Processor]:
    if form is LogFormat.JSON:
        return [structlog.processors.JSONRenderer(default=repr)]
    console = structlog.dev.ConsoleRenderer(
        colors=form is LogFormat.COLOUR, exception_formatter=structlog.dev.plain_traceback, sort_keys=False
    )
    return [_for_people, console]


# Processors.


def _in_order(_: Any, __: str, event: MutableMapping[str, Any]) -> Record:
    """Common fields first; values that JSON does not have become text."""
    event["time"] = round(time.time(), 6)
    record = {key: event.pop(key) for key in _FIRST if key in event}
    return {key: _plain(value) for key, value in {**record, **event}.items()}


def _plain(value: Any, depth: int = 4) -> Any:
    """A value that JSON has: not NaN, and of few types."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, dict) and depth:
        return {str(key): _plain(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [_plain(each, depth - 1) for each in value]
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


def _for_people(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    event["timestamp"] = f"{datetime.fromtimestamp(event.pop('time')):%H:%M:%S}"
    if isinstance(coords := event.get("coords"), dict):
        event["coords"] = " ".join(f"{axis}={place}" for axis, place in coords.items())
    return event


class _Copy:
    """Passes on a copy of each record; errors of the receiver do not reach the code that logs."""

    def __init__(self, on_record: OnRecord) -> None:
        self._on_record = on_record

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        with suppress(Exception):
            self._on_record(dict(event))
        return event


class _Sender:
    """Sends records over the control channel, which drops and counts those it has no room for."""

    def __init__(self, control: RankControl) -> None:
        self._control = control

    def __call__(self, record: Record) -> None:
        fields = list(record.items())[:_MOST_FIELDS]
        # `kind` is a field of the message itself.
        self._control.send("log", **{"kind_" if key == "kind" else key: _shortened(value) for key, value in fields})


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}… ({len(value):,} letters)"
    if isinstance(value, dict | list) and len(text := repr(value)) > _LONGEST:
        return f"{text[:_LONGEST]}…"
    return value


class _Lines:
    """Receives rendered lines: structlog calls the method named like the level."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.msg = self.debug = self.info = self.warning = self.error = self.critical = self.fatal = write
        self.log = self.err = self.exception = self.warn = self.failure = write


def to_stderr(line: str) -> None:
    """Write a line in one call, so that lines of several threads do not mix. Ignores a closed stderr."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
