"""What the test set-up does itself: find and install tools, say what is left out, reset inherited signals."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import tools
from tests.support.processes import ROOT, reset_signals


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Calls of apt-get, the only tool on PATH, by root. It has no package of the name chromium."""
    found: list[list[str]] = []

    def run(command: list[str], **_) -> subprocess.CompletedProcess[str]:
        found.append([word for word in command if word not in tools._APT_OPTIONS])
        failed = command[-1] == "chromium"
        return subprocess.CompletedProcess(command, 100 * failed, "", "W: old\nE: no chromium\n" * failed)

    put_on_path(tmp_path, monkeypatch, "apt-get")
    monkeypatch.setattr(tools.subprocess, "run", run)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return found


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, *tools: str) -> None:
    monkeypatch.setenv("PATH", str(folder))
    for tool in tools:
        (folder / tool).touch(0o755)


def test_what_is_missing_is_installed_and_a_failure_is_one_line(calls, tmp_path, monkeypatch, capsys):
    put_on_path(tmp_path, monkeypatch, "ip", "prometheus", "promtool", "objdump", "mpirun")
    tools.install()
    install = ["apt-get", "install", "--no-install-recommends", "--no-upgrade", "--yes"]
    expected = [["apt-get", "update"], *([*install, package] for package in ("iproute2", "nftables", "chromium"))]
    assert calls == expected
    assert capsys.readouterr().out.splitlines() == [
        "apt-get install iproute2 nftables chromium: tools that some tests need",
        "apt-get install chromium failed: E: no chromium",
    ]


@pytest.mark.parametrize("without", ["anything missing", "root", "apt-get"])
def test_nothing_is_installed_without(calls, tmp_path, monkeypatch, capsys, without):
    if without == "anything missing":
        put_on_path(tmp_path, monkeypatch, *tools.PACKAGE_OF)
    elif without == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    else:
        (tmp_path / "apt-get").unlink()
    tools.install()
    assert (calls, capsys.readouterr().out) == ([], "")


def test_reasons_name_what_is_missing_and_its_packages(tmp_path, monkeypatch):
    put_on_path(tmp_path, monkeypatch, "ip")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert tools.reason_without("ip") is None
    assert tools.reason_without("ip", "tc", "nft") == "needs tc, nft (iproute2, nftables)"
    assert tools.reason_without(tools.ROOT_USER, "ip") == "needs root"
    assert tools.reason_without(tools.ROOT_USER, "mpirun") == "needs root, mpirun (openmpi-bin)"


def test_what_is_left_out_is_one_line():
    reasons = ["needs root", "needs tc (iproute2)", "needs tc (iproute2)", "another reason"]
    assert tools.left_out(iter(reasons)) == (
        "left out: 4 tests: 2 that need tc (iproute2); 1 that needs root; 1 (another reason)"
    )
    assert tools.left_out(["needs root"]) == "left out: 1 test: 1 that needs root"
    assert tools.left_out([]) == ""


def test_programs_are_looked_for_in_one_place():
    """A test that looks by itself would skip without being told how to get the tool."""
    allowed = {"tools.py", "conftest.py", Path(__file__).name}
    found = [path.name for path in (ROOT / "tests").rglob("*.py") if "shutil.which" in path.read_text()]
    assert set(found) <= allowed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD])
def test_signals_that_were_ignored_are_heard(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        reset_signals()
        assert signal.getsignal(number) == (signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    finally:
        signal.signal(number, before)


def test_handlers_stay_and_blocked_signals_come_through():
    def handler(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGHUP, handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        reset_signals()
        assert signal.getsignal(signal.SIGHUP) is handler
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    finally:
        signal.signal(signal.SIGHUP, before)
