"""One TCP or TLS connection between worker and server: items in, bytes out without copying."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import Callable, Collection
from typing import TypeAlias, cast

from runtime.errors import InvalidCall, Parallel3DError
from runtime.gradient_server.wire.frames import FrameReader, Item, Side
from runtime.gradient_server.wire.messages import DEFAULT_PORT, MAX_CHUNK, Bytes, WireError

BUDGET_BYTES = 1 << 20
"""Unsent bytes above which `drain` waits."""
_HEAD_BYTES = 4096
"""Received at once where a vector may begin: little more than its head, so that the vector itself is received in place.
(With TLS it is copied anyway, and bytes left in small pieces may be lost when a connection breaks.)"""
RECEIVE_BYTES = MAX_CHUNK + _HEAD_BYTES
"""A whole chunk and the head of the next one, which still fit the processor's cache."""
CLOSE_SECONDS = 5.0
"""Time for a peer to read our last bytes and to close its end."""
HANDSHAKE_SECONDS = 10.0
_BACKLOG = 1024
_ADDRESS = re.compile(r"(?:\[(?P<bracketed>[^][]+)\]|(?P<host>[^][:\s]+))(?::(?P<port>\d{1,5}))?")


class LinkLost(Parallel3DError, ConnectionError):
    """The peer is gone, or did not answer. `is_mid_frame`: within a message."""

    def __init__(self, message: str, *, is_mid_frame: bool = False) -> None:
        super().__init__(message)
        self.is_mid_frame = is_mid_frame


class ReceiveBuffer:
    """Where bytes are received: one for all links of an event loop, since each link consumes its bytes at once."""

    def __init__(self, num_bytes: int = RECEIVE_BYTES) -> None:
        self.view = memoryview(bytearray(num_bytes))


OnLink: TypeAlias = Callable[["Link"], None]
OnItem: TypeAlias = Callable[[Item], memoryview | None]
"""For a vector that begins, may return memory to receive all of its bytes into; it yields no pieces then."""


class Link(asyncio.BufferedProtocol):
    """Made by `connect` and `serve`. Set `on_item` and `on_lost` before the event loop runs again."""

    def __init__(
        self,
        reader: FrameReader,
        buffer: ReceiveBuffer,
        on_link: OnLink | None = None,
        budget: int = BUDGET_BYTES,
        most_ahead: int = RECEIVE_BYTES,
    ) -> None:
        """most_ahead: bytes received at once while it is unknown what they are."""
        self.on_item: OnItem = _ignore
        """Called with each item; a piece's memory is valid only during the call. A WireError that it raises is handled
        like one of the reader's; any other exception is a bug, and aborts the link."""
        self.on_lost: Callable[[Exception | None], None] = _ignore
        """Called once. None: closed by this end. WireError: what it writes is still sent before the link closes."""
        self.peer = ""
        self.bytes_in = 0
        self.last_heard = time.monotonic()
        self._reader, self._buffer, self._on_link, self._budget = reader, buffer, on_link, budget
        self._most_ahead = most_ahead
        self._is_in_place = False
        """Whether bytes are being received in place, not in the buffer."""
        self._transport: asyncio.Transport | None = None
        self._written = 0
        self._unsent = 0  # unsent bytes when the link was lost
        self._is_paused = self._is_closing = self._is_reported = False
        self._room = asyncio.Event()
        self._room.set()
        self._gone = asyncio.Event()
        self._close_timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether written bytes may still arrive."""
        return self._transport is not None and not self._is_closing and not self._transport.is_closing()

    @property
    def is_mid_frame(self) -> bool:
        """Whether a part of a frame has come, and its end has not."""
        return self._reader.is_mid_frame

    @property
    def bytes_waiting(self) -> int:
        """Bytes written and not yet sent; 0 once the connection is gone."""
        transport = self._transport  # read once, since metrics call this from another thread
        return 0 if transport is None else transport.get_write_buffer_size()

    @property
    def bytes_out(self) -> int:
        """Bytes handed to the operating system."""
        return max(0, self._written - self._unsent - self.bytes_waiting)

    def joined(self, version: int) -> None:
        """Accept this version's frames from now on, also in what is already received."""
        self._reader.joined(version)

    def write(self, *parts: Bytes) -> None:
        """Send these after all unsent bytes. Views are not copied: their memory must not change until it is sent. On a
        lost link they are dropped; `drain` raises then."""
        if self._transport is None or self._is_closing or self._transport.is_closing():
            return
        self._written += sum(len(part) for part in parts)
        self._transport.writelines(parts)

    async def drain(self) -> None:
        """Wait until less than the budget is unsent. Raises LinkLost if the link is gone or closed."""
        await self._room.wait()
        if not self.is_open:
            raise LinkLost(f"{self.peer}: the connection is gone.", is_mid_frame=self._reader.is_mid_frame)

    def pause(self) -> None:
        """Stop reading, which slows the peer down. Items of bytes received before may still follow."""
        if self.is_open and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Send all unsent bytes, then close; what still arrives is ignored. The peer has CLOSE_SECONDS for that.

        If the socket were closed with unread bytes, the kernel would reset the connection and drop our last bytes.
        """
        if self._transport is None or self._is_closing:
            return
        self._is_closing = True
        self._room.set()
        self.resume()
        self._start_close_timer()
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def abort(self) -> None:
        """Close now; unsent bytes are dropped."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def _start_close_timer(self) -> None:
        if self._close_timer is None and self._transport is not None:
            self._close_timer = asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._transport.abort)

    async def closed(self) -> None:
        """Return when the connection is gone."""
        await self._gone.wait()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._budget)
        self.peer = _name(transport.get_extra_info("peername"))
        self.last_heard = time.monotonic()
        if self._on_link is not None:
            self._on_link(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        room = None if self._is_closing else self._reader.room
        self._is_in_place = room is not None
        if room is not None:
            return room
        begin = self._reader.num_split  # a split element is put there, so that elements stay aligned
        return self._buffer.view[begin : begin + max(self._most_ahead, self._reader.num_wanted)]

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        self.last_heard = time.monotonic()
        if self._is_closing:
            return
        reader = self._reader
        try:
            for item in reader.wrote(nbytes) if self._is_in_place else reader.feed(self._received(nbytes)):
                target = self.on_item(item)
                if target is not None:
                    reader.receive_into(target)
                if self._is_closing:
                    return
        except WireError as error:
            self._end(error, self.close)
        except Exception as error:
            self._end(error, self.abort)

    def _received(self, nbytes: int) -> memoryview:
        view, split = self._buffer.view, self._reader.take_split()
        view[: len(split)] = split
        return view[: len(split) + nbytes]

    def _end(self, error: Exception, hang_up: Callable[[], None]) -> None:
        try:
            self._report(error)
        finally:
            hang_up()

    def eof_received(self) -> bool:
        self._start_close_timer()  # it may have stopped reading too
        return False

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
        self._unsent, self._transport = self.bytes_waiting, None
        self._room.set()
        self._gone.set()
        self._report(None if self._is_closing else self._loss(exc))

    def _loss(self, exc: Exception | None) -> LinkLost:
        how = "the connection broke" if exc is not None else "it hung up"
        when = " within a message" if self._reader.is_mid_frame else ""
        why = f": {exc}" if exc is not None else ""
        return LinkLost(f"{self.peer}: {how}{when}{why}.", is_mid_frame=self._reader.is_mid_frame)

    def _report(self, error: Exception | None) -> None:
        if not self._is_reported:
            self._is_reported = True
            self.on_lost(error)


async def connect(
    address: str,
    *,
    timeout: float,  # noqa: ASYNC109 - the handshake is given it too
    tls: ssl.SSLContext | None = None,
    on_link: OnLink | None = None,
    buffer: ReceiveBuffer | None = None,
    budget: int = BUDGET_BYTES,
) -> Link:
    """A worker's link to the server at HOST[:PORT]. Raises LinkLost if it does not answer within `timeout` seconds."""
    host, port = split_address(address)
    shared, most_ahead = buffer or ReceiveBuffer(), _most_ahead(tls)
    try:
        async with asyncio.timeout(timeout):
            _, link = await asyncio.get_running_loop().create_connection(
                lambda: Link(FrameReader(Side.WORKER), shared, on_link, budget, most_ahead), host, port, ssl=tls
            )
    except TimeoutError:
        raise LinkLost(f"{address} did not answer within {timeout:g} s.") from None
    except OSError as error:
        raise LinkLost(f"{address} cannot be reached: {error}.") from error
    return link


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT, [HOST]:PORT or HOST."""
    found = _ADDRESS.fullmatch(address)
    port = int(found["port"] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port < 65_536:
        raise InvalidCall(f"{address!r} is no address: write HOST:PORT, or [HOST]:PORT for one with colons.")
    return found["bracketed"] or found["host"], port


async def serve(
    listener: socket.socket,
    on_link: OnLink,
    *,
    tls: ssl.SSLContext | None = None,
    versions: Collection[int] = (1, 2),
    buffer: ReceiveBuffer | None = None,
    budget: int = BUDGET_BYTES,
) -> asyncio.Server:
    """Call `on_link` with each new connection, after its TLS handshake. All share one buffer."""
    shared, most_ahead = buffer or ReceiveBuffer(), _most_ahead(tls)
    return await asyncio.get_running_loop().create_server(
        lambda: Link(FrameReader(Side.SERVER, versions=versions), shared, on_link, budget, most_ahead),
        sock=listener,
        ssl=tls,
        backlog=_BACKLOG,
        ssl_handshake_timeout=HANDSHAKE_SECONDS if tls is not None else None,
    )


def _most_ahead(tls: ssl.SSLContext | None) -> int:
    return _HEAD_BYTES if tls is None else RECEIVE_BYTES


def _ignore(_: object) -> None:
    pass


def _name(address: object) -> str:
    """HOST:PORT as in a URL."""
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return "a local socket"
