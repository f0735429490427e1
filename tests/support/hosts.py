"""Several hosts on one machine: network namespaces, joined by a bridge that has a namespace of its own.

    p3d-4f1c-0            p3d-4f1c-bridge             p3d-4f1c-1
    eth0 10.77.0.1/24 --- port0 [ bridge ] port1 --- eth0 10.77.0.2/24

The machine's own interfaces are never touched, so any number of these stand side by side. Processes, files and
shared memory are still common to all: PARALLEL3D_HOST keeps the ranks from finding each other there.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Self

import pytest

from tests.support.processes import SECONDS
from tests.support.ranks import NETWORK
from tests.support.tools import ROOT_USER, reason_without

BURST = 128 * 1024  # bytes that a rate limit lets through at once: two of the kernel's largest segments
_QUEUE = 1024 * 1024  # bytes that wait in front of it; TCP slows down where more are dropped
_PORT = "29500"  # free: nothing else is in a new namespace
_UP = ("addrgenmode", "none", "up")  # without IPv6 nothing but the ranks' bytes crosses, and gloo sees one address


class Refused(Exception):
    """A tool could not do what it was asked for."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@cache
def _why_not() -> str | None:
    """Why hosts can't be made here; None where they can."""
    if (reason := reason_without(ROOT_USER, "ip", "tc", "nft")) is not None:
        return reason
    try:
        with Hosts(2, rate="1gbit") as hosts:
            hosts.cut()
    except Refused as error:
        return f"needs network namespaces, which can't be made here: {error}"
    return None


def require_hosts() -> None:
    """Skip the test that is being set up where hosts can't be made."""
    if (reason := _why_not()) is not None:
        pytest.skip(reason)


class Hosts:
    """Some hosts, numbered from 0; all are gone at the end of the `with`."""

    def __init__(self, num_hosts: int, rate: str | None = None) -> None:
        self._rate = rate
        self.prefix = f"p3d-{secrets.token_hex(4)}"
        self.names = [f"{self.prefix}-{host}" for host in range(num_hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(num_hosts)]
        self._bridge = f"{self.prefix}-bridge"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        left = self._remove()
        if kind is None and left:
            raise Refused(f"could not be deleted: {', '.join(left)}")

    def _make(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge", *_UP)
        for host, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            cable = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", self._bridge, "link", "add", f"port{host}", *cable)
            _run("ip", "-n", self._bridge, "link", "set", f"port{host}", "master", "bridge", *_UP)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", *_UP)
        if self._rate is not None:
            self.limit(self._rate)

    def _remove(self) -> list[str]:
        """Delete what there is; which could not be."""
        left = []
        for name in (*self.names, self._bridge):
            if os.path.exists(_path(name)):
                try:
                    _run("ip", "netns", "delete", name)
                except Refused:
                    left.append(name)
        return left

    def variables(self, ranks_per_host: Sequence[int], **more: str) -> list[dict[str, str]]:
        """What torchrun would set for each rank, and the host that it lives on; rank 0 serves the store."""
        homes = [(host, local) for host, num_ranks in enumerate(ranks_per_host) for local in range(num_ranks)]
        return [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(homes)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks_per_host[host]),
                "MASTER_ADDR": self.addresses[homes[0][0]],
                "MASTER_PORT": _PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
                "PARALLEL3D_HOST": self.names[host],
                NETWORK: _path(self.names[host]),
                **more,
            }
            for rank, (host, local) in enumerate(homes)
        ]

    def inside(self, host: int) -> tuple[str, ...]:
        """What starts a command on this host."""
        return ("ip", "netns", "exec", self.names[host])

    # What the network does.

    def limit(self, rate: str, link: str = "eth0") -> None:
        """Let each host send no faster than this (`100mbit`), and so receive from one other no faster either. On the
        link `lo`: let the ranks of a host send each other no faster."""
        bucket = ("tbf", "rate", rate, "burst", str(BURST), "limit", str(_QUEUE))
        for name in self.names:
            _run("tc", "-n", name, "qdisc", "replace", "dev", link, "root", *bucket)

    def cut(self) -> None:
        """Lose every packet between hosts without a word, as a broken switch would: connections just hang."""
        self._filter("add table bridge cut")
        self._filter("add chain bridge cut between_hosts { type filter hook forward priority 0; policy drop; }")

    def unplug(self) -> None:
        """Pull the cables: each host sees at once that its interface has no carrier."""
        self._set_ports("down")

    def mend(self) -> None:
        """Undo `cut` and `unplug`."""
        self._set_ports("up")
        self._filter("flush ruleset")

    def _set_ports(self, state: str) -> None:
        for host in range(len(self.names)):
            _run("ip", "-n", self._bridge, "link", "set", f"port{host}", state)

    def _filter(self, rules: str) -> None:
        _run("ip", "netns", "exec", self._bridge, "nft", rules)

    def bytes_sent(self, host: int) -> int:
        """What has left this host so far, headers included. Ranks of one host talk over `lo`, which is not here."""
        return self._bytes(host, "tx")

    def bytes_received(self, host: int) -> int:
        """What has reached this host so far, headers included."""
        return self._bytes(host, "rx")

    def _bytes(self, host: int, way: str) -> int:
        (link,) = json.loads(_run("ip", "-n", self.names[host], "-s", "-j", "link", "show", "dev", "eth0"))
        return int(link["stats64"][way]["bytes"])

    def wait_until_sent(self, host: int, num_bytes: int) -> None:
        """Until this host has sent so much in all. Counters have no events, so we look again and again."""
        deadline = time.monotonic() + SECONDS
        while (sent := self.bytes_sent(host)) < num_bytes:
            assert time.monotonic() < deadline, f"{self.names[host]} has sent only {sent} bytes"


def _path(name: str) -> str:
    return f"/run/netns/{name}"
