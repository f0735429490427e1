"""Calls on groups: recorded, added up, and sent to the launcher."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

import parallel3d
from monitoring.events.collectives import KINDS, CollectiveEvent, CollectiveRecorder, CollectiveTotal
from parallel3d import GroupClosed
from process_groups.group import Group
from process_groups.transport import Transport
from runtime.errors import Coords


def event(kind: str = "all_reduce", num_bytes: int = 1000, num_ranks: int = 4, seconds: float = 0.5) -> CollectiveEvent:
    return CollectiveEvent("world", kind, "default", "default", num_bytes, num_ranks, seconds, began=7.0)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "bus_bandwidth"),
    [
        ("all_reduce", 1, 0.0),
        ("all_reduce", 2, 2000.0),
        ("all_reduce", 4, 3000.0),
        ("all_reduce", 8, 3500.0),
        ("reduce_scatter", 4, 1500.0),
        ("all_gather", 4, 1500.0),
        ("all_to_all", 8, 1750.0),
        ("broadcast", 4, 2000.0),
        ("send", 4, 2000.0),
        ("recv", 4, 2000.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(kind, num_ranks, bus_bandwidth):
    found = event(kind, num_ranks=num_ranks)
    assert (found.algorithm_bandwidth, found.bus_bandwidth) == (2000.0, bus_bandwidth)


@pytest.mark.parametrize("found", [event("barrier", num_bytes=0), event(num_bytes=0), event(seconds=0.0)])
def test_without_bytes_or_time_there_is_no_bandwidth(found):
    assert (found.algorithm_bandwidth, found.bus_bandwidth) == (None, None)


def recorder_of_some_calls() -> CollectiveRecorder:
    recorder = CollectiveRecorder()
    recorder.record("dp", "all_reduce", "ring", "adaptive", 1000, 4, 0.5, 1.0)
    recorder.record("dp", "all_reduce", "ring", "ring", 3000, 4, 0.25, 2.0)
    recorder.record("dp", "all_reduce", "tree", "adaptive", 8, 4, 0.125, 3.0)
    recorder.record("world", "barrier", "default", "default", 0, 8, 2.0, 4.0)
    return recorder


TOTALS = {
    ("dp", "all_reduce", "ring"): CollectiveTotal(calls=2, num_bytes=4000, seconds=0.75, bus_bytes=6000.0),
    ("dp", "all_reduce", "tree"): CollectiveTotal(calls=1, num_bytes=8, seconds=0.125, bus_bytes=12.0),
    ("world", "barrier", "default"): CollectiveTotal(calls=1, num_bytes=0, seconds=2.0, bus_bytes=0.0),
}


def test_totals_are_by_group_kind_and_the_strategy_used():
    found = recorder_of_some_calls().totals()
    assert found == TOTALS
    assert [total.bus_bandwidth for total in found.values()] == [8000.0, 96.0, None]


def test_the_bus_factor_follows_the_number_of_ranks():
    recorder = CollectiveRecorder()
    recorder.record("dp", "all_gather", "default", "default", 600, 2, 1.0, 0.0)
    recorder.record("dp", "all_gather", "default", "default", 600, 3, 1.0, 0.0)
    assert recorder.totals() == {("dp", "all_gather", "default"): CollectiveTotal(2, 1200, 2.0, 300.0 + 400.0)}


def test_only_the_latest_calls_are_kept_and_all_are_counted():
    recorder = CollectiveRecorder()
    for number in range(3000):
        recorder.record("tp", "send", "default", "default", 1, 2, 1.0, float(number))
    assert [each.began for each in recorder.events()] == [float(number) for number in range(1976, 3000)]
    assert recorder.totals() == {("tp", "send", "default"): CollectiveTotal(3000, 3000, 3000.0, 3000.0)}


def test_totals_travel_as_json():
    for recorder, totals in ((recorder_of_some_calls(), TOTALS), (CollectiveRecorder(), {})):
        assert CollectiveRecorder.from_wire(json.loads(json.dumps(recorder.to_wire()))) == totals


ROW = ["dp", "all_reduce", "ring", 2, 4000, 0.75, 6000.0]


@pytest.mark.parametrize(
    ("totals", "message"),
    [
        (None, "totals are a list of rows"),
        ({}, "totals are a list of rows"),
        (["dp"], "a row is group, kind, strategy, calls, bytes, seconds, bus bytes"),
        ([ROW, ROW[:-1]], "a row is group, kind, strategy, calls, bytes, seconds, bus bytes"),
        ([[*ROW[:3], True, *ROW[4:]]], "a row is group, kind, strategy, calls, bytes, seconds, bus bytes"),
        ([[*ROW[:5], "0.75", 0.0]], "a row is group, kind, strategy, calls, bytes, seconds, bus bytes"),
        ([["dp", "all_recude", *ROW[2:]]], "there are no calls of such a group, kind and strategy"),
        ([["\ud800", *ROW[1:]]], "there are no calls of such a group, kind and strategy"),
        ([[*ROW[:3], -1, *ROW[4:]]], "totals are numbers from 0 up"),
        ([[*ROW[:3], 10**400, *ROW[4:]]], "totals are numbers from 0 up"),
        ([[*ROW[:5], float("nan"), 0.0]], "totals are numbers from 0 up"),
        ([[*ROW[:5], 0.75, float("inf")]], "totals are numbers from 0 up"),
    ],
)
def test_what_no_rank_can_have_sent_is_refused(totals, message):
    with pytest.raises(ValueError, match=rf"^collectives: {message}$"):
        CollectiveRecorder.from_wire({"totals": totals})


class Clock:
    """Stands in for the time module, and moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class SlowTransport(Transport):
    """Starting a call takes a quarter of a second, ending it half a second; adaptive means tree."""

    name, device = "slow", torch.device("cpu")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def extra_seconds(self, num_bytes):
        return 10.0

    def start(self, call):
        self._clock.now += 0.25
        self.ended_at = self._clock.now + 0.5
        if call.strategy == "adaptive":
            call.carried_out_by = "tree"
        return self

    def ended_well(self, seconds):
        self._clock.now += 0.5
        return True

    def finished(self, call):
        pass


async def test_a_call_takes_from_the_call_to_its_end_and_names_the_strategy_chosen(monkeypatch):
    clock, recorder = Clock(), CollectiveRecorder()
    monkeypatch.setattr("process_groups.issuing.time", clock)
    group = Group(
        "dp",
        (0, 1),
        0,
        SlowTransport(clock),
        coords_of=lambda rank: Coords(rank, 0, 0),
        timeout=30.0,
        device=torch.device("cpu"),
        recorder=recorder,
    )
    await (first := group.all_reduce(torch.ones(3), strategy="adaptive", timeout=0.5))
    work = group.all_reduce(torch.ones(3), strategy="ring", timeout=0.5)
    assert (first.call.timeout, work.call.timeout) == (10.5, 0.5), "the first one may have to measure"
    assert len(recorder.events()) == 1, "the second has not ended"
    clock.now += 10.0
    await work
    await work
    assert recorder.events() == [
        CollectiveEvent("dp", "all_reduce", "tree", "adaptive", 12, 2, seconds=0.75, began=100.0),
        CollectiveEvent("dp", "all_reduce", "ring", "ring", 12, 2, seconds=0.75, began=100.75),
    ]


async def test_calls_of_every_kind_are_recorded():
    async def main():
        async with parallel3d.mesh(dp=2, tp=2) as mesh:
            assert mesh.collectives.events() == []
            three, four = torch.ones(3), torch.ones(4, dtype=torch.float64)
            await mesh.world.all_reduce(three)
            await mesh.world.all_reduce(three, strategy="ring")
            await mesh.dp.all_reduce(torch.ones(4, 6)[:, ::2], strategy="hierarchical")
            await mesh.dp.reduce_scatter(four)
            await mesh.tp.all_gather(three)
            await mesh.tp.broadcast(four, root=1)
            await mesh.world.all_to_all(four)
            if mesh.dp.rank == 0:
                await mesh.dp.send(three, 1)
            else:
                await mesh.dp.recv(three, 0)
            await mesh.world.barrier()
            await mesh.pp.all_reduce(four)  # a group of one
            await mesh.world.all_reduce(torch.ones(0))
        return mesh.collectives, mesh.coords.dp

    for recorder, dp in await parallel3d.in_process(main, 4):
        events = recorder.events()
        assert {each.kind for each in events} == set(KINDS) - ({"recv"} if dp == 0 else {"send"})
        assert all(each.seconds >= 0.0 and each.requested == each.strategy for each in events)
        assert [each.began for each in events] == sorted(each.began for each in events)
        assert [(each.group, each.kind, each.strategy, each.num_bytes, each.num_ranks) for each in events] == [
            ("world", "all_reduce", "default", 12, 4),
            ("world", "all_reduce", "ring", 12, 4),
            ("dp", "all_reduce", "hierarchical", 48, 2),
            ("dp", "reduce_scatter", "default", 32, 2),
            ("tp", "all_gather", "default", 24, 2),
            ("tp", "broadcast", "default", 32, 2),
            ("world", "all_to_all", "default", 32, 4),
            ("dp", "send" if dp == 0 else "recv", "default", 12, 2),
            ("world", "barrier", "default", 0, 4),
            ("pp", "all_reduce", "default", 32, 1),
            ("world", "all_reduce", "default", 0, 4),
        ]


async def test_a_call_that_fails_is_not_counted():
    async def main():
        async with parallel3d.mesh(dp=2, tp=2) as mesh:
            await mesh.tp.barrier()
            if mesh.dp.rank == 0:
                waiting = asyncio.ensure_future(mesh.dp.recv(torch.ones(1), 1))
                later = mesh.dp.barrier()
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(GroupClosed):
                    await later
            await mesh.tp.barrier()
        return mesh.collectives.totals()

    for totals in await parallel3d.in_process(main, 4):
        assert [(key, total.calls) for key, total in totals.items()] == [(("tp", "barrier", "default"), 2)]
