"""While a mesh of one host stands, nobody beyond that host can reach anything of it."""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import Launched, children, write_script

LISTEN = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


def listeners(pid: int) -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Protocol and address of each socket on which this process waits for others."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for protocol, state in LISTEN.items():
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                found.append((protocol, address(fields[1].partition(":")[0])))
    return found


def address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel prints each 32-bit word in this machine's byte order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


@pytest.fixture
def backend() -> str:
    return "auto"


@pytest.fixture
def mesh_of_four(tmp_path, backend):
    script = write_script(
        tmp_path,
        """
        import asyncio, os, parallel3d, torch

        async def main():
            async with parallel3d.mesh(dp=2, tp=2, backend=os.environ["BACKEND"]) as mesh:
                await mesh.world.all_reduce(torch.ones(1000))
                print("inside", flush=True)
                await asyncio.to_thread(lambda: os.read(os.open(os.environ["FIFO"], os.O_RDONLY), 1))

        parallel3d.run(main)
        """,
    )
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    before = set(os.listdir("/dev/shm"))
    with Launched("-n", "4", script, preload=None, FIFO=str(fifo), BACKEND=backend, TMPDIR=str(tmp_path)) as launched:
        for rank in range(4):
            launched.stdout.wait_for(rf"^\[{rank}\] inside$")
        yield launched
        with open(fifo, "r+b", buffering=0) as all_may_go:  # a byte for each, held until the last has read
            all_may_go.write(b"1234")
            assert launched.finish() == 0, launched.stderr.text
    assert set(os.listdir("/dev/shm")) <= before
    assert sorted(os.listdir(tmp_path)) == ["fifo", "script.py"]


def test_nobody_listens_where_memory_is_shared(mesh_of_four):
    assert [listeners(pid) for pid in mesh_of_four.left_behind()] == [[]] * 6


@pytest.mark.parametrize("backend", ["gloo"])
def test_only_gloo_listens_and_only_on_loopback(mesh_of_four, backend):
    ranks = children(mesh_of_four.server_pid)
    assert len(ranks) == 4
    found = {pid: listeners(pid) for pid in mesh_of_four.left_behind()}
    others = {pid: sockets for pid, sockets in found.items() if pid not in ranks}
    assert others == {mesh_of_four.process.pid: [], mesh_of_four.server_pid: []}
    # One socket for each group of two or more (world, dp, tp), each with the group's own address. A store of
    # torch's would add one, on every interface.
    addresses = Counter(where for pid in ranks for protocol, where in found[pid] if protocol == "tcp")
    assert [len(found[pid]) for pid in ranks] == [3] * 4
    assert sorted(addresses.values()) == [2, 2, 2, 2, 4]
    assert all(where in LOOPBACK for where in addresses)


def test_nothing_is_in_shared_memory_or_on_disk_meanwhile(mesh_of_four, tmp_path):
    assert sorted(os.listdir(tmp_path)) == ["fifo", "script.py"]
    for pid in mesh_of_four.left_behind():
        assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text()
