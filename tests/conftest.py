"""What tests of several tiers are given."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.hosts import Hosts, why_not


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    """Two hosts with a network between them, of which nothing is left afterwards."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts(2) as hosts:
        yield hosts
    left = os.listdir("/run/netns")
    assert not [name for name in left if name.startswith(hosts.prefix)]
