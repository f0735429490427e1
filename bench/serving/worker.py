"""A worker of bench/gradient_server.py: moves the same bytes in each step, and computes nothing.

python worker.py KIND HOST PORT NUMBER BYTES STEPS: says `ready`, waits for a line, then says when it began to send each
step's bytes, and when it had all of those that came back, as seconds of time.monotonic; and stays until its input ends.
KIND: plain (to the relay), v1 (version 1 of the wire, byte by byte), v2 (the client that users have), paced (as v1, but
waits and says so before and after each step, for as long as there are lines; one that says `slow` has it read slowly,
and one that says `late` pause for as long as that takes).
"""

from __future__ import annotations

import socket
import struct
import sys
import time

_SLOW_BYTES, _SLOW_SECONDS = 256 << 10, 0.005  # what a slow one reads at a time, and how long it waits then
_GRADIENT, _AVERAGE, _ASSIGNMENT, _BEAT = 4, 5, 3, 6


class Plain:
    """As many bytes there as back."""

    def __init__(self, address: tuple[str, int], number: int, num_bytes: int) -> None:
        self._socket = socket.create_connection(address)
        self._out, self._back = bytes(num_bytes), memoryview(bytearray(num_bytes))

    def begin(self) -> None:
        pass

    def send(self) -> None:
        self._socket.sendall(self._out)

    def take(self) -> None:
        self._take(self._back)

    def _take(self, room: memoryview) -> None:
        while room:
            taken = self._socket.recv_into(room)
            if not taken:
                raise ConnectionError("the other end has left")
            room = room[taken:]


class VersionOne(Plain):
    """As the table of the wire has it."""

    def __init__(self, address: tuple[str, int], number: int, num_bytes: int) -> None:
        super().__init__(address, number, num_bytes)
        name = f"bench-{number}".encode()
        self._send(b"\x01" + struct.pack("<I", len(name)) + name + struct.pack("<I", 0) + struct.pack("<I", 3) + b"cpu")
        _, self._worker_id, _ = struct.unpack("<BII", self._frame())

    def begin(self) -> None:
        self._share = self._next_share()

    def _next_share(self) -> tuple[int, int, int]:
        step, start, end = struct.unpack("<QQQ", self._frame(_ASSIGNMENT)[1:])
        return step, start, end

    def send(self) -> None:
        step, start, end = self._share
        count = len(self._out) // 4
        head = struct.pack("<BQIQ", _GRADIENT, step, self._worker_id, count)
        tail = struct.pack("<fQQ", 1.0, 0, end - start)
        self._socket.sendall(struct.pack(">I", len(head) + len(self._out) + len(tail)) + head)
        self._socket.sendall(self._out)
        self._socket.sendall(tail)

    def take(self) -> None:
        length = self._head(_AVERAGE)
        assert length == 1 + 8 + 8 + len(self._back) + 4, length
        self._exactly(8 + 8)
        self._take(self._back)
        self._exactly(4)

    def _send(self, body: bytes) -> None:
        self._socket.sendall(struct.pack(">I", len(body)) + body)

    def _exactly(self, num_bytes: int) -> bytes:
        room = bytearray(num_bytes)
        self._take(memoryview(room))
        return bytes(room)

    def _head(self, tag: int) -> int:
        """The length of the next frame of this kind, whose tag was read already. Heartbeats may come before it."""
        while True:
            (length,) = struct.unpack(">I", self._exactly(4))
            found = self._exactly(1)[0]
            if found == tag:
                return int(length)
            assert found == _BEAT, found
            self._exactly(length - 1)

    def _frame(self, tag: int = 2) -> bytes:
        length = self._head(tag)
        return bytes([tag]) + self._exactly(length - 1)


class Paced(VersionOne):
    """Reads its average slowly, or at once and then pauses: whatever a step after a pause takes longer, it does so with
    both."""

    pace = ""

    def take(self) -> None:
        super().take()
        if self.pace == "late":
            time.sleep(len(self._back) // _SLOW_BYTES * _SLOW_SECONDS)

    def _take(self, room: memoryview) -> None:
        while self.pace == "slow" and len(room) >= _SLOW_BYTES:
            super()._take(room[:_SLOW_BYTES])
            room = room[_SLOW_BYTES:]
            time.sleep(_SLOW_SECONDS)
        super()._take(room)


def take_step(worker: Plain) -> tuple[float, float]:
    """When it began and when it had all."""
    begun = time.monotonic()
    worker.send()
    worker.take()
    return begun, time.monotonic()


def take_steps(worker: Plain, steps: int) -> None:
    wait_for_start()
    found: list[float] = []
    for _ in range(steps):
        worker.begin()
        found += take_step(worker)
    tell(found)


def take_steps_at_pace(worker: Paced) -> None:
    worker.begin()
    while line := wait_for_start():
        worker.pace = line.strip()
        print(*take_step(worker), flush=True)
        worker.begin()


def run_version_two(address: tuple[str, int], number: int, num_bytes: int, steps: int) -> None:
    from runtime.gradient_server.client.raw_parts import RawPart
    from runtime.gradient_server.client.worker import GradientClient
    from runtime.gradient_server.wire.messages import Dtype
    from runtime.loop import run

    async def main() -> None:
        out, back = memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))
        found: list[float] = []
        async with GradientClient(f"{address[0]}:{address[1]}", node_id=f"bench-{number}") as client:
            wait_for_start()
            for _ in range(steps):
                await client.next_share()
                found.append(time.monotonic())
                await client.average([RawPart(Dtype.FLOAT32, out)], [RawPart(Dtype.FLOAT32, back)], loss=1.0)
                found.append(time.monotonic())
            tell(found)

    run(main)


def wait_for_start() -> str:
    print("ready", flush=True)
    return sys.stdin.readline()


def tell(found: list[float]) -> None:
    """And stay connected: the server's memory is looked at meanwhile."""
    print(*found, flush=True)
    sys.stdin.read()


def main() -> None:
    kind, host, *numbers = sys.argv[1:]
    port, number, num_bytes, steps = map(int, numbers)
    if kind == "v2":
        run_version_two((host, port), number, num_bytes, steps)
    elif kind == "paced":
        take_steps_at_pace(Paced((host, port), number, num_bytes))
    else:
        make = Plain if kind == "plain" else VersionOne
        take_steps(make((host, port), number, num_bytes), steps)


if __name__ == "__main__":
    main()
