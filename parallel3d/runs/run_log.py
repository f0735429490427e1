"""What a run itself logs: its start and its end, slow ranks, bottlenecks. All in the monitor thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from monitoring.analysis.facts import Status
from runtime.log_settings import LogFormat, log_format

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

_SERIOUS = ("high", "critical")


class Notes(Protocol):
    """Where records are kept: the run's observer, from which its folder and its page have them."""

    def note(self, record: Mapping[str, Any]) -> object: ...


class RunLog:
    """Warnings are also shown on stderr; the rest is in the folder and on the page."""

    def __init__(self, notes: Notes, write: Callable[[str], object] | None = None) -> None:
        self._notes, self._write = notes, write
        self._has_started = False

    @cached_property
    def _warnings(self) -> FilteringBoundLogger:
        """Made with the first of them: importing structlog takes a tenth of a second, which a run does not wait for."""
        from runtime.logs import make_logger

        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        form = log_format(is_terminal)
        write = self._write or (_over_live_line if is_terminal and form is not LogFormat.JSON else None)
        return make_logger(form, on_record=self._notes.note, write=write)

    def _note(self, level: str, event: str, **fields: Any) -> None:
        """Without showing it."""
        self._notes.note({"time": round(time.time(), 6), "level": level, "event": event, **fields})

    def note(self, kind: str, payload: Any) -> None:
        """What the observer has found."""
        if kind == "stragglers":
            for each in payload:
                self._note_straggler(**each)
        elif kind == "bottlenecks":
            for each in payload:
                self._note_bottleneck(each)

    def _note_straggler(self, state: str, rank: int, **fields: Any) -> None:
        if state == "found":
            score = round(fields.pop("score"), 3)
            self._warnings.warning(f"rank {rank} is slow", straggler=rank, score=score, **_known(fields))
        else:
            self._note("info", f"rank {rank} is no longer slow", straggler=rank)

    def _note_bottleneck(self, found: Mapping[str, Any]) -> None:
        if found["state"] == "gone":
            self._note("info", "a bottleneck is gone", bottleneck=found["kind"])
            return
        fields = _known({key: found[key] for key in ("severity", "key", "value", "gain", "host", "axis")})
        said = {"bottleneck": found["kind"], **fields, "remedy": found["remedy"]}
        if found["severity"] in _SERIOUS:
            self._warnings.warning(found["message"], **said)
        else:
            self._note("info", found["message"], **said)

    def note_status(self, status: str, error: str) -> None:
        """How the run is, when that changes. Whoever has started it says so on stderr."""
        if not self._has_started:
            self._has_started = True
            self._note("info", "the run started")
        if status != "running":
            level = "error" if Status(status).is_broken else "info"
            self._note(level, "the run ended", status=str(status), **_known({"error": error or None}))


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _over_live_line(line: str) -> None:
    """Where the live line stands, which is drawn again with the next step."""
    from runtime.logs import to_stderr

    to_stderr(f"\r\x1b[K{line}")
