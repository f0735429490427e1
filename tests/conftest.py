"""What tests of several tiers are given, and the line at the end about those that the machine left out."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, require_hosts
from tests.support.processes import reset_signals
from tests.support.tools import left_out

_folders: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--left-out",
        type=Path,
        metavar="FILE",
        help="add the reasons of skipped tests to this file instead of printing them; tests.support.tools prints it",
    )


def pytest_configure() -> None:
    """Measurements that are kept are neither the user's nor left behind, and signals do what they do in a terminal.
    Processes of tests inherit both."""
    _folders.append(tempfile.mkdtemp(prefix="parallel3d-tests-"))
    os.environ["XDG_CACHE_HOME"] = _folders[-1]
    reset_signals()


def pytest_unconfigure() -> None:
    shutil.rmtree(_folders.pop(), ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started it counts its tests, too
        return
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in skipped]
    if (file := config.getoption("left_out")) is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.writelines(f"{reason}\n" for reason in reasons)
    elif reasons:
        terminalreporter.write_line(left_out(reasons))


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    """Two hosts with a network between them, of which nothing is left afterwards."""
    require_hosts()
    with Hosts(2) as hosts:
        yield hosts
    left = os.listdir("/run/netns")
    assert not [name for name in left if name.startswith(hosts.prefix)]
