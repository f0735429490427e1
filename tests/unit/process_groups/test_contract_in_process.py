"""The transport contract with ranks that are tasks of this process."""

import pytest

import parallel3d
from tests.support.contract import RANKS, SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
async def test_contract(name):
    await parallel3d.in_process(SCENARIOS[name], ranks=RANKS)
