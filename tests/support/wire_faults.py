"""Lets this very process die at an exact frame of the gradient server's wire: before it, half of it sent, or after."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from runtime.gradient_server.wire.frames import FrameReader, Item, VectorBegins, VectorEnds, VectorPiece
from runtime.gradient_server.wire.link import Link
from runtime.gradient_server.wire.messages import LAYOUTS, Kind, decode
from tests.support.ranks import Tell

_KIND_AND_STEP = struct.Struct("<BQ")  # which tables and chunks begin with
_FLUSH_SECONDS = 10.0  # a deadline: what was written before is sent within milliseconds


class Point(NamedTuple):
    """The `number`th frame of this class on all of the process's links together, of this kind and step if given."""

    way: str
    """`out` or `in`; `call`: a place in the test's own code that has this name."""
    name: str
    moment: str = "before"
    """`before`, `middle` or `after`."""
    step: int | None = None
    kind: Kind | None = None
    number: int = 1


class Injector:
    """For one process, from `arm` on. What `tell` is given after its death has begun, it never said."""

    def __init__(self, point: Point | None, tell: Tell) -> None:
        self._point, self._tell = point, tell
        self._num_met = 0
        self._is_dying = self._is_in_it = False
        self._links: dict[Link, int] = {}
        """With the bytes that are still to be written of a frame whose beginning was."""
        self._write, self._feed = Link.write, FrameReader.feed

    def tell(self, word: object) -> None:
        if not self._is_dying:
            self._tell(word)

    def arm(self) -> None:
        if self._point is None:
            return
        injector = self

        def write(link: Link, *parts: bytes | memoryview) -> None:
            injector._on_write(link, b"".join(parts), parts)

        def feed(reader: FrameReader, data: memoryview) -> Iterator[Item]:
            return injector._on_feed(reader, data)

        Link.write, FrameReader.feed = write, feed  # type: ignore[method-assign]

    def at(self, name: str, step: int) -> None:
        """A place in the test's own code."""
        if self._meets("call", name, step, None):
            _die()

    def _meets(self, way: str, name: str, step: int | None, kind: Kind | None) -> bool:
        point = self._point
        if point is None or (way, name) != (point.way, point.name) or self._is_dying:
            return False
        if point.step not in (None, step) or point.kind not in (None, kind):
            return False
        self._num_met += 1
        return self._num_met == point.number

    # Frames that go out.

    def _on_write(self, link: Link, data: bytes, parts: tuple[bytes | memoryview, ...]) -> None:
        if self._is_dying:
            return
        at = self._links.get(link, 0)
        while at < len(data):
            length = 4 + int.from_bytes(data[at : at + 4], "big")
            if self._meets("out", *_described(data[at + 4 : at + length])):
                assert self._point is not None
                share = {"before": 0, "middle": length // 2, "after": length}[self._point.moment]
                self._write(link, data[: at + share])
                self._die_when_all_is_sent(link)
                return
            at += length
        self._links[link] = at - len(data)
        self._write(link, *parts)

    def _die_when_all_is_sent(self, link: Link) -> None:
        self._is_dying = True
        self._links[link] = 0
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + _FLUSH_SECONDS

        def look() -> None:
            if time.monotonic() > deadline or not any(each.bytes_waiting for each in self._links):
                _die()
            loop.call_later(0.001, look)

        loop.call_soon(look)

    # Frames that come in.

    def _on_feed(self, reader: FrameReader, data: memoryview) -> Iterator[Item]:
        for item in self._feed(reader, data):
            if self._is_dying:
                return
            self._look_at(item)
            yield item
            if self._is_in_it and not isinstance(item, VectorBegins | VectorPiece):
                _die()  # after it

    def _look_at(self, item: Item) -> None:
        assert self._point is not None
        if self._is_in_it:
            if self._point.moment == "middle":
                _die()  # at the first piece
            return
        if isinstance(item, VectorPiece | VectorEnds):
            return
        message: Any = item.head if isinstance(item, VectorBegins) else item
        step, kind = getattr(message, "step", None), getattr(message, "kind", None)
        if self._meets("in", type(message).__name__, step, kind):
            if self._point.moment == "before":
                _die()
            self._is_in_it = True


def _described(body: bytes) -> tuple[str, int | None, Kind | None]:
    """Name, step and kind."""
    name = LAYOUTS[body[0]].kind.__name__
    if name in ("Table", "Chunk"):
        kind, step = _KIND_AND_STEP.unpack_from(body, 1)
        return name, step, Kind(kind)
    if LAYOUTS[body[0]].streamed is not None:  # version 1: all of them begin with the step
        return name, struct.unpack_from("<Q", body, 1)[0], None
    return name, getattr(decode(body), "step", None), None


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
