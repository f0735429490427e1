"""The control channel: small JSON messages between a rank and its launcher. Sending never blocks.

A message is one record of a SOCK_SEQPACKET pair, so it arrives whole or is dropped whole.
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
from collections.abc import Iterator, Mapping
from typing import Any

MAX_MESSAGE_BYTES = 64 * 1024
CONTROL_FD = "PARALLEL3D_CONTROL_FD"
RANK_PID = "PARALLEL3D_RANK_PID"

Message = dict[str, Any]


class RankControl:
    """The rank's end. A message that cannot be sent at once is dropped and counted."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.dropped = 0
        self.is_open = True
        """False once a read has shown that the launcher is gone."""
        os.set_blocking(fd, False)

    def send(self, kind: str, **fields: object) -> bool:
        """Send a message to the launcher. False if it was dropped: the buffer is full, or the message too large."""
        sent = self._write(encode(kind, fields))
        self.dropped += not sent
        return sent

    def send_within(self, seconds: float, kind: str, **fields: object) -> bool:
        """As `send`, but wait up to `seconds` for room: for a rank's last message."""
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        poller.poll(seconds * 1000)
        return self.send(kind, **fields)

    def messages(self) -> Iterator[Message]:
        """The messages from the launcher that have arrived, without waiting."""
        while self.is_open:
            try:
                data = os.read(self.fd, MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.is_open = bool(data)
            message = decode(data)
            if message is not None:
                yield message

    def _write(self, data: bytes) -> bool:
        if len(data) > MAX_MESSAGE_BYTES:
            return False
        try:
            os.write(self.fd, data)
        except OSError:  # full, or the launcher is gone
            return False
        return True


def rank_control() -> RankControl | None:
    """This rank's channel; None if `parallel3d launch` did not start this process.

    Programs that a rank starts inherit the variables but not the descriptor, whose number may belong to another
    file there: hence the checks.
    """
    number, pid = os.environ.get(CONTROL_FD, ""), os.environ.get(RANK_PID)
    if not number.isdigit() or pid != str(os.getpid()):
        return None
    try:
        is_socket = stat.S_ISSOCK(os.fstat(int(number)).st_mode)
    except OSError:
        return None
    return RankControl(int(number)) if is_socket else None


def encode(kind: str, fields: Mapping[str, object]) -> bytes:
    """A message as a line of JSON; values that JSON does not have become their repr."""
    return json.dumps({"kind": kind, **fields}, default=repr).encode() + b"\n"


def decode(data: bytes) -> Message | None:
    """The message in these bytes; None if there is none, since a rank may send anything."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        return None
    return message


_TRUNCATED = int(socket.MSG_TRUNC)  # comparing with the enum member takes microseconds


class LauncherControl:
    """The launcher's end for one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.malformed = 0
        self.ended = False
        self.may_have_more = True
        self._room = memoryview(bytearray(MAX_MESSAGE_BYTES))

    def send(self, kind: str, **fields: object) -> bool:
        """Send a message to the rank; False if it has ended, or its buffer is full."""
        try:
            self.connection.send(encode(kind, fields))
        except OSError:
            return False
        return True

    def messages(self, at_most: int = 64) -> Iterator[Message]:
        """Up to `at_most` messages that have arrived, without waiting; so one rank cannot starve the others."""
        for _ in range(at_most):
            record = self._record()
            self.may_have_more = record is not None
            if record is None:
                return
            message = decode(record)
            if message is None:
                self.malformed += 1
            else:
                yield message

    def _record(self) -> bytes | None:
        try:
            num_bytes, _, flags, _ = self.connection.recvmsg_into([self._room])
        except BlockingIOError:
            return None
        except OSError:
            self.ended = True
            return None
        if not num_bytes and self._hung_up():
            self.ended = True
            return None
        return b"" if flags & _TRUNCATED else bytes(self._room[:num_bytes])

    def _hung_up(self) -> bool:
        """Tells the end of the stream from an empty record, which looks the same."""
        poller = select.poll()
        poller.register(self.connection, 0)
        return any(event & select.POLLHUP for _, event in poller.poll(0))
