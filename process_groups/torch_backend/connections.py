"""The sockets of one gloo backend: found by their addresses, and cut when its group is aborted.

gloo has no abort: a call under way waits for its own timeout, and a process that ends before then crashes in
gloo's threads. A cut socket ends the call at once, as a lost peer would.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

Endpoint = tuple[str, int]


def loopback_address(seed: str) -> str:
    """A loopback address of the group's own, the same on each of its ranks: 127.x.y.z, never 127.0.y.z."""
    x, y, z = hashlib.blake2b(seed.encode(), digest_size=3).digest()
    return f"127.{x % 255 + 1}.{y}.{z % 254 + 1}"


@dataclass(frozen=True, slots=True)
class Connections:
    """The connected sockets that have a given address, or one of the given endpoints, at either end."""

    address: str | None = None
    endpoints: frozenset[Endpoint] = frozenset()

    def cut(self) -> None:
        """End every connection; both ends see it closed."""
        for sock in _own_sockets():
            with contextlib.suppress(OSError):  # not connected: gloo's listening socket must stay as it is
                ends = (sock.getpeername(), sock.getsockname())
                if any(end[0] == self.address or tuple(end[:2]) in self.endpoints for end in ends):
                    sock.shutdown(socket.SHUT_RDWR)


def listening_endpoints() -> set[Endpoint]:
    """Where this process listens."""
    found = set()
    for sock in _own_sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.add(tuple(sock.getsockname()[:2]))
    return found


def exchange_endpoints(
    store: dist.Store, me: int, size: int, mine: set[Endpoint], timeout: float
) -> frozenset[Endpoint]:
    """Tell the other ranks of a group where this one listens, and learn where they do."""
    store.set(f"endpoints/{me}", json.dumps(sorted(mine)))
    keys = [f"endpoints/{i}" for i in range(size)]
    store.wait(keys, timedelta(seconds=timeout))
    return frozenset((host, port) for key in keys for host, port in json.loads(store.get(key)))


def _own_sockets() -> Iterator[socket.socket]:
    """A duplicate of each internet socket of this process; closing it leaves the socket as it is."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:  # its number means another file now
            os.close(copy)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock
