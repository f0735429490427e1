"""What a mesh refuses; and one that fails when its groups are there already leaves nobody waiting, nothing behind."""

from __future__ import annotations

import asyncio

import pytest
import torch

from process_groups import manager
from process_groups.formation import MeshPlan
from process_groups.manager import form
from runtime.environment import Nowhere, PrivateFile, RankEnvironment
from runtime.errors import CommunicationError, Coords, InvalidCall, PeerLost


def test_a_table_of_strategies_names_none_that_asks_it_again():
    with pytest.raises(InvalidCall) as caught:
        MeshPlan(strategy="adaptive", strategy_table=((1024, "ring"), (4096, "adaptive")))
    assert str(caught.value) == (
        "strategy_table: 'adaptive' up to 4096 bytes: give one of default, ring, tree, hierarchical."
    )


class FailingGroup:
    size, device = 2, torch.device("cpu")

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def barrier(self) -> None:
        raise self._error

    async def all_reduce(self, tensor: torch.Tensor) -> None:
        raise self._error


class RecordedFormation:
    """Of rank 1; writes down what becomes of it."""

    rank = 1

    def __init__(self, error: BaseException) -> None:
        self.groups, self.topology = {"world": FailingGroup(error)}, self
        self.told: list[CommunicationError | str] = []

    def coords(self, rank: int) -> Coords:
        return Coords(rank, 0, 0)

    def abort(self, error: CommunicationError) -> None:
        self.told.append(error)

    def release(self) -> None:
        self.told.append("released")


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (CommunicationError("no way"), "failed with CommunicationError: no way"),
        (asyncio.CancelledError(), "was cancelled"),
    ],
)
@pytest.mark.parametrize("at", ["barrier", "measuring"])
async def test_a_failure_after_the_meeting(monkeypatch, at, error, how):
    formation = RecordedFormation(error)

    class Rendezvous:
        def __init__(self, *_) -> None:
            pass

        def form(self) -> RecordedFormation:
            return formation

    monkeypatch.setattr(manager, "Rendezvous", Rendezvous)
    place = PrivateFile("/nowhere/meeting") if at == "barrier" else Nowhere()
    plan = MeshPlan(dp=2, strategy="adaptive" if at == "measuring" else "default")
    with pytest.raises(type(error)):
        await form(plan, RankEnvironment(1, 2, meeting_place=place), 0)
    reason, last = formation.told
    assert (type(reason), str(reason), last) == (PeerLost, f"rank 1 (dp=1 tp=0 pp=0) {how}", "released")
