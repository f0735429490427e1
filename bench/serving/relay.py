"""What the gradient server is measured against: plain sockets, and one process through which the same bytes go.

python relay.py WORKERS BYTES: prints its port; each round it takes so many bytes of every worker, then sends as many
back.
"""

from __future__ import annotations

import selectors
import socket
import sys
from collections.abc import Callable

MoveBytes = Callable[[socket.socket, int], int]
AT_ONCE = 1 << 20


class Relay:
    """One thread, no copies but the kernel's own."""

    def __init__(self, num_workers: int, num_bytes: int) -> None:
        self._num_workers, self._num_bytes = num_workers, num_bytes
        self._buffer = memoryview(bytearray(AT_ONCE))
        self._selector = selectors.DefaultSelector()
        self._left: dict[socket.socket, int] = {}
        """Bytes of this round that are still to come, or to go."""

    def accept(self, listener: socket.socket) -> None:
        for _ in range(self._num_workers):
            connection, _ = listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._left[connection] = 0

    def serve(self) -> None:
        """Until the workers leave."""
        while self._round(selectors.EVENT_READ, self._take) and self._round(selectors.EVENT_WRITE, self._give):
            pass

    def _round(self, event: int, move: MoveBytes) -> bool:
        for connection in self._left:
            self._left[connection] = self._num_bytes
            self._selector.register(connection, event)
        under_way = len(self._left)
        while under_way:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                moved = move(connection, min(AT_ONCE, self._left[connection]))
                if not moved:
                    return False
                self._left[connection] -= moved
                if not self._left[connection]:
                    self._selector.unregister(connection)
                    under_way -= 1
        return True

    def _take(self, connection: socket.socket, at_most: int) -> int:
        try:
            return connection.recv_into(self._buffer, at_most)
        except ConnectionError:
            return 0

    def _give(self, connection: socket.socket, at_most: int) -> int:
        return connection.send(self._buffer[:at_most])


def main() -> None:
    relay = Relay(*map(int, sys.argv[1:]))
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)
        relay.accept(listener)
    relay.serve()


if __name__ == "__main__":
    main()
