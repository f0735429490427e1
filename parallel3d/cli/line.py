"""A line that says how something gets on, drawn again and again on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TextIO

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 1.0
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Line:
    """On a terminal one line that is drawn again and again; elsewhere a line now and then, first and last always."""

    def __init__(
        self,
        stream: TextIO,
        environment: Mapping[str, str],
        columns: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._columns, self._now = stream, columns, now
        self._redraws = stream.isatty() and environment.get("TERM") != "dumb"
        self._colours = self._redraws and not environment.get("NO_COLOR")
        self._shown_at = float("-inf")
        self._latest = self._shown = ""

    def tell(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Names and values, as they are now."""
        text = "  ".join(f"{name} {value}" for name, value in pairs)
        if self._redraws and len(text) >= self._columns:
            text = text[: self._columns - 1]
        elif self._colours:
            text = "  ".join(f"{_DIM}{name}{_PLAIN} {value}" for name, value in pairs)
        self._latest = text
        if self._now() - self._shown_at >= (_REDRAW_SECONDS if self._redraws else _LINE_SECONDS):
            self._draw()

    def _draw(self) -> None:
        self._shown, self._shown_at = self._latest, self._now()
        self._write(f"\r\x1b[K{self._latest}" if self._redraws else f"{self._latest}\n")

    def close(self) -> None:
        """No step comes any more."""
        if self._latest != self._shown:
            self._draw()
        if self._redraws and self._shown:
            self._write("\n")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # its reader left; the run goes on without
            self._stream.write(text)
            self._stream.flush()
