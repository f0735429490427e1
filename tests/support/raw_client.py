"""A plain socket that talks to a gradient server in tests and sends any bytes: not one of our workers."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Self

from runtime.gradient_server.wire.auth import WorkerHandshake
from runtime.gradient_server.wire.messages import (
    Assignment,
    Beat,
    Challenge,
    Hello,
    Message,
    Proof,
    Welcome,
    decode,
    encode,
)
from tests.support.processes import SECONDS


class RawClient:
    """One connection, for `with`."""

    def __init__(self, port: int, *, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(SECONDS)
        self.socket.connect(("127.0.0.1", port))
        self.said = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Without a moment of waiting: there are more connections in a test than ports.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def send(self, data: bytes | Message) -> None:
        """A server that has heard enough may have hung up already."""
        said = data if isinstance(data, bytes) else encode(data)
        self.said += said
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(said)

    def end(self) -> bytes:
        """Say no more; what the server still says until it hangs up."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return b""  # it has hung up
        return self.hear_all()

    def hear_all(self) -> bytes:
        """Until the server hangs up."""
        heard = b""
        try:
            while data := self.socket.recv(1 << 16):
                heard += data
        except ConnectionResetError:
            pass
        return heard

    def hear(self) -> Message:
        """The next message but beats."""
        while isinstance(message := decode(self._take(int.from_bytes(self._take(4), "big"))), Beat):
            pass
        return message

    def hear_until(self, is_it: Callable[[Message], bool]) -> Message:
        while not is_it(message := self.hear()):
            pass
        return message

    def _take(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            piece = self.socket.recv(num_bytes - len(data))
            if not piece:
                raise ConnectionError(f"the server hung up after {len(data)} of {num_bytes} bytes")
            data += piece
        return bytes(data)

    # As a worker of version 2 would.

    def ask_to_join(self, name: str, token: bytes) -> Message:
        """What the server answers to it."""
        handshake = WorkerHandshake(token, name)
        self.send(handshake.hello)
        challenge = self.hear()
        assert isinstance(challenge, Challenge), challenge
        self.send(handshake.prove(challenge))
        return self.hear()

    def join(self, name: str, token: bytes) -> Assignment:
        """Its first share; weights that it is given before that are thrown away."""
        welcome = self.ask_to_join(name, token)
        assert isinstance(welcome, Welcome), welcome
        share = self.hear_until(lambda message: isinstance(message, Assignment))
        assert isinstance(share, Assignment)
        return share


def is_join(message: Message) -> bool:
    return isinstance(message, Hello | Proof)
