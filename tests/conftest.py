"""What tests of several tiers are given."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.hosts import Hosts, why_not

_folders: list[str] = []


def pytest_configure() -> None:
    """What measurements are kept shall be neither the user's nor left behind, and Ctrl-C is heard; every process
    inherits this."""
    _folders.append(tempfile.mkdtemp(prefix="parallel3d-tests-"))
    os.environ["XDG_CACHE_HOME"] = _folders[-1]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in the background like this
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    shutil.rmtree(_folders.pop(), ignore_errors=True)


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    """Two hosts with a network between them, of which nothing is left afterwards."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts(2) as hosts:
        yield hosts
    left = os.listdir("/run/netns")
    assert not [name for name in left if name.startswith(hosts.prefix)]
