"""The transport contract with four real ranks: in shared memory, over gloo, and as if each had its own host."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from tests.support.contract import RANKS, SCENARIOS
from tests.support.made_once import made_once
from tests.support.processes import Launched

pytestmark = pytest.mark.slow
Outcomes = list[dict[str, str | None]]
RANK = str(Path(__file__).with_name("ranks") / "contract_rank.py")
TRANSPORTS = {
    "shared memory": {},
    "gloo": {"CONTRACT_BACKEND": "gloo"},
    "hosts apart": {"APART": "1", "GLOO_SOCKET_IFNAME": "lo"},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcomes]:
    """What each rank wrote, by transport. One launch runs all scenarios, when first asked."""

    @cache
    def outcomes(transport: str) -> Outcomes:
        folder = made_once(tmp_path_factory, f"contract {transport}", partial(launch, transport))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]

    return outcomes


def launch(transport: str, folder: Path) -> None:
    with Launched("-n", str(RANKS), RANK, str(folder), *SCENARIOS, preload=None, **TRANSPORTS[transport]) as launched:
        code = launched.finish(seconds=90)
        assert (code, launched.stdout.text, launched.stderr.text) == (0, "", "")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_contract(outcomes, name, transport):
    found = outcomes(transport)
    failures = [f"rank {rank}:\n{outcome[name]}" for rank, outcome in enumerate(found) if outcome[name]]
    assert not failures, "\n".join(failures)
