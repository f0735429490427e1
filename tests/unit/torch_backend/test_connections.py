"""The sockets of a group are found by its own address, and no others are cut."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from process_groups.torch_backend.connections import (
    Connections,
    exchange_endpoints,
    listening_endpoints,
    loopback_address,
)


@settings(deadline=None)
@given(st.text())
def test_an_address_is_loopback_and_not_the_usual_one(seed):
    address = ipaddress.ip_address(loopback_address(seed))
    assert address in ipaddress.ip_network("127.0.0.0/8")
    assert address not in ipaddress.ip_network("127.0.0.0/16")
    assert address.packed[-1] not in (0, 255)


def test_an_address_depends_on_the_seed_alone():
    assert loopback_address("a world 0") == loopback_address("a world 0") == "127.28.20.251"
    assert len({loopback_address(f"seed {number}") for number in range(1000)}) > 990


@contextmanager
def connected(host: str) -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listening socket and both ends of one connection to it."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((host, 0)))
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted = stack.enter_context(server.accept()[0])
        for each in (client, accepted):
            each.settimeout(30)
        yield server, client, accepted


def is_alive(client: socket.socket, accepted: socket.socket) -> bool:
    for one, other in ((client, accepted), (accepted, client)):
        try:
            one.sendall(b"x")
        except BrokenPipeError:
            return False
        if other.recv(1) != b"x":
            return False
    return True


def test_only_connections_with_that_address_are_cut():
    with connected("127.7.7.7") as (server, *ours), connected("127.7.7.8") as (_, *others):
        left, right = socket.socketpair()
        with left, right:
            Connections("127.7.7.7").cut()
            assert not is_alive(*ours)
            assert is_alive(*others)
            assert is_alive(left, right)
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()  # what listens goes on


def test_only_connections_with_those_endpoints_are_cut():
    with connected("127.0.0.1") as (server, *ours), connected("127.0.0.1") as (_, *others):
        Connections(None, frozenset([server.getsockname()])).cut()
        assert not is_alive(*ours)
        assert is_alive(*others)


def test_connections_of_nobody_are_none():
    with connected("127.0.0.1") as (_, *others):
        Connections().cut()
        assert is_alive(*others)


def test_where_this_process_listens():
    before = listening_endpoints()
    with connected("127.7.7.9") as (server, *_):
        assert listening_endpoints() - before == {server.getsockname()}
    assert listening_endpoints() == before


def test_endpoints_are_exchanged():
    store = dist.HashStore()
    store.set("endpoints/1", '[["10.0.0.2", 5]]')
    mine = {("10.0.0.1", 3), ("10.0.0.1", 4)}
    everyone = frozenset({*mine, ("10.0.0.2", 5)})
    assert exchange_endpoints(store, 0, 2, mine, timeout=5.0) == everyone
    with pytest.raises(dist.DistStoreError):
        exchange_endpoints(store, 0, 3, mine, timeout=0.01)
