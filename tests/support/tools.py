"""What tests need of the machine and pip does not bring: Debian's tools, root, IPv6, control groups.

`python -m tests.support.tools install` installs the tools, `... report FILE` prints what several runs left out.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

PACKAGE_OF = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "mpirun": "openmpi-bin",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "objdump": "binutils",
}
"""The Debian package of each tool. Tests find tools by PATH, and nowhere else."""

CPU_QUOTA = "control groups, version 1"
IPV6 = "IPv6"
ROOT_USER = "root"
_CONDITIONS: dict[str, Callable[[], bool]] = {
    ROOT_USER: lambda: os.geteuid() == 0,
    IPV6: socket.has_dualstack_ipv6,
    CPU_QUOTA: lambda: os.access("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", os.W_OK),
}
_APT_OPTIONS = ("-qq", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=60")
_APT_SECONDS = 900


def missing(*names: str) -> list[str]:
    """Those of these tools and conditions that are not there."""
    return [name for name in names if not (_CONDITIONS[name]() if name in _CONDITIONS else shutil.which(name))]


def reason_without(*names: str) -> str | None:
    """Why a test that needs these is skipped, such as `needs tc, nft (iproute2, nftables)`; None when all are there."""
    if not (absent := missing(*names)):
        return None
    packages = _packages_of(name for name in absent if name in PACKAGE_OF)
    return f"needs {', '.join(absent)}" + (f" ({', '.join(packages)})" if packages else "")


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark for tests: they are skipped where one of these tools or conditions is missing."""
    reason = reason_without(*names)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def require(*names: str) -> None:
    """The same for fixtures."""
    if (reason := reason_without(*names)) is not None:
        pytest.skip(reason)


def left_out(reasons: Iterable[str]) -> str:
    """One line about skipped tests, by the reason of each; empty when there are none."""
    counted = Counter(reasons)
    if not counted:
        return ""
    parts = []
    for reason, number in counted.most_common():
        verb, _, what = reason.partition(" ")
        parts.append(f"{number} that need{'s' * (number == 1)} {what}" if verb == "needs" else f"{number} ({reason})")
    total = counted.total()
    return f"left out: {total} test{'s' * (total != 1)}: {'; '.join(parts)}"


def install() -> None:
    """Install the tools that are missing, as root and with apt-get. Without a network tests go on without them."""
    packages = _packages_of(missing(*PACKAGE_OF))
    if not packages or missing(ROOT_USER, "apt-get"):
        return
    print(f"apt-get install {' '.join(packages)}: tools that some tests need", flush=True)
    # One by one: a package that this distribution lacks must not keep the others out.
    for arguments in (
        ["update"],
        *(["install", "--no-install-recommends", "--no-upgrade", "--yes", each] for each in packages),
    ):
        if (problem := _apt_get(*arguments)) is not None:
            print(f"apt-get {arguments[0]} {arguments[-1]} failed: {problem}", flush=True)


def _apt_get(*arguments: str) -> str | None:
    """Why it failed, in one line; None when it did not."""
    try:
        done = subprocess.run(
            ["apt-get", *_APT_OPTIONS, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_APT_SECONDS,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_APT_SECONDS} seconds"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _packages_of(tools: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(PACKAGE_OF[tool] for tool in tools))


def _report(path: Path) -> None:
    if line := left_out(path.read_text(encoding="utf-8").splitlines()):
        print(line)
    path.unlink()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install"]:
            install()
        case ["report", file]:
            _report(Path(file))
        case _:
            sys.exit(__doc__)
