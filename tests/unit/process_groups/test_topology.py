"""Topology: a bijection for every order and factorisation, and known places in known meshes."""

import random
import time
from collections.abc import Callable

import pytest

from process_groups.topology import AXES, ORDERS, Topology, auto_order
from runtime.errors import Coords, InvalidCall

FACTORISATIONS = [(dp, tp, n // dp // tp) for n in range(1, 25) for dp in range(1, n + 1) if n % dp == 0
                  for tp in range(1, n // dp + 1) if n // dp % tp == 0]  # fmt: skip


def test_known_places_of_the_default_order():
    mesh = Topology(2, 2, 2)
    assert [tuple(mesh.coords(r)) for r in (3, 5, 7)] == [(0, 1, 1), (1, 0, 1), (1, 1, 1)]
    assert mesh.rank((1, 1, 1)) == 7
    assert mesh.group("dp", 3) == (3, 7)
    assert mesh.group("tp", 3) == (1, 3)
    assert mesh.group("pp", 3) == (2, 3)
    assert mesh.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_pp_dp_tp_keeps_tensor_parallel_ranks_together():
    mesh = Topology(2, 2, 2, order="pp-dp-tp")
    assert mesh.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize("order", [*ORDERS, "table"])
def test_bijection_and_partition(order):
    for shape in FACTORISATIONS:
        check_bijection_and_partition(shuffled(shape) if order == "table" else Topology(*shape, order=order))


def shuffled(shape):
    rows = [Topology(*shape).coords(r) for r in range(Topology(*shape).world_size)]
    random.Random(repr(shape)).shuffle(rows)
    return Topology(*shape, table=tuple(rows))


def check_bijection_and_partition(mesh):
    everyone = list(range(mesh.world_size))
    assert [mesh.rank(mesh.coords(r)) for r in everyone] == everyone
    assert len({mesh.coords(r) for r in everyone}) == mesh.world_size
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(r for g in groups for r in g) == everyone
        assert all(mesh.group(axis, member) == group for group in groups for member in group)
        assert all([getattr(mesh.coords(r), axis) for r in g] == list(range(len(g))) for g in groups)


def test_stages_are_a_chain():
    mesh = Topology(2, 1, 3)
    assert [mesh.next_stage(r) for r in range(6)] == [1, 2, None, 4, 5, None]
    assert [mesh.previous_stage(r) for r in range(6)] == [None, 0, 1, None, 3, 4]
    assert [mesh.is_first_stage(r) for r in range(3)] == [True, False, False]
    assert [mesh.is_last_stage(r) for r in range(3)] == [False, False, True]


def test_crossing_names_the_groups_that_span_hosts():
    mesh = Topology(2, 2, 2)
    hosts = ["a"] * 4 + ["b"] * 4
    assert mesh.crossing("dp", hosts) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.crossing("tp", hosts) == mesh.crossing("pp", hosts) == []


def test_auto_keeps_a_replica_inside_a_host_when_it_fits():
    assert auto_order(tp=2, pp=4, ranks_per_host=8) == "dp-tp-pp"
    assert auto_order(tp=4, pp=4, ranks_per_host=8) == "pp-dp-tp"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(dp=0), "dp = 0: the size of an axis is a whole number from 1 up."),
        (lambda: Topology(tp=True), "tp = True: the size of an axis is a whole number from 1 up."),
        (
            lambda: Topology(order="tp-pp"),
            "order = 'tp-pp': give one of dp-tp-pp, dp-pp-tp, tp-dp-pp, tp-pp-dp, pp-dp-tp, pp-tp-dp, or a table.",
        ),
        (
            lambda: Topology(dp=2, table=(Coords(0, 0, 0), Coords(0, 0, 0))),
            "order: the table has 2 rows for 2 ranks; each coordinate of dp(2) x tp(1) x pp(1) must stand there "
            "exactly once; look at (dp=1 tp=0 pp=0).",
        ),
        (lambda: Topology(dp=2).coords(2), "rank 2 is outside the mesh: ranks go from 0 to 1."),
        (lambda: Topology(dp=2).coords(-1), "rank -1 is outside the mesh: ranks go from 0 to 1."),
        (
            lambda: Topology(pp=2).rank((0, 0, 2)),
            "(dp=0 tp=0 pp=2) is outside the mesh: pp goes from 0 to 1.",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InvalidCall) as caught:
        make()
    assert str(caught.value) == message


def processor_seconds(function: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return min(found)


def test_a_hundred_thousand_ranks():
    """The limits, 10 ms and 1 s, are the promise. The quickest of several counts: whatever disturbs makes it longer."""

    def make() -> Topology:
        mesh = Topology(dp=625, tp=8, pp=20, order="pp-dp-tp")
        mesh.coords(99_999)
        for axis in AXES:
            mesh.group(axis, 99_999)
        return mesh

    mesh = make()
    assert processor_seconds(make) < 0.010
    assert processor_seconds(lambda: [mesh.coords(rank) for rank in range(mesh.world_size)]) < 1.0
    assert len({mesh.coords(rank) for rank in range(mesh.world_size)}) == 100_000
