"""Log lines: for people on a terminal, JSON elsewhere; a copy of each goes to whoever supervises this process.

Nothing is configured for the whole process: a program that uses structlog in its own way keeps that way.
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
_LONGEST = 8192  # letters of one value that is sent on: a message has room for 64 KiB
_MOST_FIELDS = 32

Record = dict[str, Any]
Tell = Callable[[Record], object]


def logger(name: str | None = None, **fields: Any) -> FilteringBoundLogger:
    """A logger whose lines carry rank, coordinates and step, and these fields: `logger().info("saved", path=path)`.

    Lines go to stderr, and to the run's page and folder where this process is a rank of a run. Levels below info are
    left out, unless PARALLEL3D_LOG_LEVEL says otherwise.
    """
    control = rank_control()
    tell = None if control is None else _Sender(control)
    bound = fields if name is None else {"logger": name, **fields}
    if is_rank() and os.environ.get("RANK", "").isdecimal():
        bound = {"rank": int(os.environ["RANK"]), **bound}  # also before there is a mesh
    form = log_format(sys.stderr is not None and sys.stderr.isatty())
    return make_logger(form, tell=tell, level=log_level()).bind(**bound)


def make_logger(
    form: LogFormat,
    *,
    tell: Tell | None = None,
    level: int = logging.INFO,
    write: Callable[[str], object] | None = None,
) -> FilteringBoundLogger:
    """tell: is given a copy of each record. write: a line's way out; stderr, as it is at that moment, where none is
    given."""
    steps: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _in_order,
    ]
    if tell is not None:
        steps.append(_Teller(tell))
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


# On the way.


def _in_order(_: Any, __: str, event: MutableMapping[str, Any]) -> Record:
    """What every line has comes first; values that JSON has no word for become text."""
    event["time"] = round(time.time(), 6)
    record = {key: event.pop(key) for key in _FIRST if key in event}
    return {key: _plain(value) for key, value in {**record, **event}.items()}


def _plain(value: Any, depth: int = 4) -> Any:
    """JSON has no NaN, and knows few types."""
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


class _Teller:
    """Gives away a copy; whoever takes it must not hurt whoever logs."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        with suppress(Exception):
            self._tell(dict(event))
        return event


class _Sender:
    """Sends records over the control channel. What finds no room there is lost, and counted by the channel."""

    def __init__(self, control: RankControl) -> None:
        self._control = control

    def __call__(self, record: Record) -> None:
        fields = list(record.items())[:_MOST_FIELDS]
        # `kind` is the message's own.
        self._control.send("log", **{"kind_" if key == "kind" else key: _shortened(value) for key, value in fields})


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}… ({len(value):,} letters)"
    if isinstance(value, dict | list) and len(text := repr(value)) > _LONGEST:
        return f"{text[:_LONGEST]}…"
    return value


class _Lines:
    """Where rendered lines go; structlog calls the method that is named like the level."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.msg = self.debug = self.info = self.warning = self.error = self.critical = self.fatal = write
        self.log = self.err = self.exception = self.warn = self.failure = write


def to_stderr(line: str) -> None:
    """A whole line at once, so that lines of several threads stay whole; nobody ends for want of a reader."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
