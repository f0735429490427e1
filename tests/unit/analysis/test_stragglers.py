"""A rank that is slow by itself is named, within three steps; one that only waits, or has a bad moment, is not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.analysis.facts import RankFacts
from monitoring.analysis.observations import Straggler
from monitoring.analysis.stragglers import StragglerDetector, crowded_hosts
from tests.support.observed import mesh_of, step_of


def feed(detector: StragglerDetector, ranks: dict[int, RankFacts], walls: list[list[float]], first: int = 0, **more):
    """Named ranks after each step."""
    named = []
    for step, each in enumerate(walls, first):
        detector.take(step_of(step, each, **more), ranks)
        named.append([straggler.rank for straggler in detector.stragglers])
    return named


def test_a_slow_replica_is_named_in_the_third_step_and_cleared_in_the_third_good_one():
    detector, ranks = StragglerDetector(), mesh_of(dp=2)
    assert feed(detector, ranks, [[0.9, 0.1], [0.5, 0.1]]) == [[], []], "warm-up"
    assert detector.scores == {}
    assert feed(detector, ranks, [[0.1, 0.2]] * 4, first=2) == [[], [], [1], [1]]
    assert detector.stragglers == (Straggler(1, pytest.approx(0.5), "peers", since_step=2),)
    assert detector.scores == {0: 1.0, 1: pytest.approx(0.5)}
    assert feed(detector, ranks, [[0.1, 0.14]] * 5, first=6) == [[1]] * 5, "neither slow nor fast"
    assert feed(detector, ranks, [[0.1, 0.11]] * 3, first=11) == [[1], [1], []]


def test_two_slow_steps_are_a_bad_moment():
    detector, ranks = StragglerDetector(), mesh_of(dp=2)
    assert not any(feed(detector, ranks, [[0.1, 0.1]] * 2 + [[0.1, 0.3], [0.1, 0.3], [0.1, 0.1]] * 20))


def test_without_a_rank_of_the_same_work_it_is_compared_with_its_own_past():
    detector, ranks = StragglerDetector(), mesh_of(pp=2)
    assert not any(feed(detector, ranks, [[0.1, 0.3]] * 10)), "stages are uneven, and that is another matter"
    assert feed(detector, ranks, [[0.2, 0.3]] * 3, first=10) == [[], [], [0]]
    assert detector.stragglers == (Straggler(0, pytest.approx(0.5), "itself", since_step=10),)


def test_a_stage_that_slows_down_on_all_replicas():
    detector, ranks = StragglerDetector(), mesh_of(dp=2, pp=2)
    ranks = {rank: replace(facts, host=f"stage {facts.place.pp}") for rank, facts in ranks.items()}
    assert not any(feed(detector, ranks, [[0.1, 0.1] * 2] * 10))
    assert feed(detector, ranks, [[0.1, 0.2] * 2] * 3, first=10)[-1] == [1, 3]
    assert {(each.compared_with, each.host) for each in detector.stragglers} == {("itself", "stage 1")}


def test_a_lucky_moment_of_the_past_makes_no_straggler_of_a_rank_that_keeps_up():
    detector, ranks = StragglerDetector(), mesh_of(dp=2)
    assert not any(feed(detector, ranks, [[0.2, 0.15]] * 10 + [[0.2, 0.25]] * 20))


def test_what_slows_all_of_them_makes_no_rank_a_straggler():
    detector, ranks = StragglerDetector(), mesh_of(pp=4)
    assert not any(feed(detector, ranks, [[0.1] * 4] * 10 + [[0.3, 0.31, 0.29, 0.3]] * 20))


def test_a_rank_alone_lags_behind_nobody():
    assert not any(feed(StragglerDetector(), mesh_of(), [[0.1]] * 10 + [[0.5]] * 10))


def test_without_a_core_from_the_start():
    """Nothing is known of the stage's usual time, but that it had a core for a third of it."""
    detector, ranks = StragglerDetector(), mesh_of(pp=2)
    named = feed(detector, ranks, [[0.1, 0.3]] * 5, cpus=[0.1, 0.1])
    assert named == [[], [], [], [], [1]]
    assert detector.stragglers[0].compared_with == "processor"
    unknown = {rank: replace(facts, num_cores=0) for rank, facts in ranks.items()}
    assert not any(feed(StragglerDetector(), unknown, [[0.1, 0.3]] * 9, cpus=[0.1, 0.1]))


def test_a_rank_that_comes_late_to_where_ranks_meet():
    detector, ranks = StragglerDetector(), mesh_of(dp=2)
    assert feed(detector, ranks, [[0.1, 0.1]] * 5, late={1: 0.03}) == [[]] * 5, "not by much"
    assert feed(detector, ranks, [[0.1, 0.1]] * 3, first=5, late={1: 0.05}) == [[], [], [1]]
    assert detector.stragglers == (Straggler(1, pytest.approx(0.5), "arrival", since_step=5),)
    assert detector.scores == {0: 1.0, 1: pytest.approx(0.5)}
    assert not any(feed(StragglerDetector(), mesh_of(dp=2, num_cores=1), [[0.1, 0.1]] * 9, late={1: 0.05}))


def test_where_ranks_take_turns_only_processor_time_counts():
    ranks = mesh_of(dp=2, num_cores=1)
    assert crowded_hosts(tuple(ranks.values())) == {"a"}
    assert crowded_hosts(tuple(mesh_of(dp=2, num_cores=2).values())) == frozenset()
    limited = {0: ranks[0], 1: replace(ranks[1], num_cores=2)}
    assert crowded_hosts(tuple(limited.values())) == frozenset(), "rank 0's own quota leaves the other core to rank 1"
    assert not any(feed(StragglerDetector(), ranks, [[0.1, 0.3]] * 9, cpus=[0.1, 0.1]))
    assert feed(StragglerDetector(), ranks, [[0.3, 0.3]] * 5, cpus=[0.1, 0.2])[-1] == [1]


def test_a_slow_host():
    ranks = {rank: replace(facts, host="ab"[rank // 2]) for rank, facts in mesh_of(dp=4).items()}
    detector = StragglerDetector()
    feed(detector, ranks, [[0.1, 0.1, 0.2, 0.2]] * 5)
    assert [(each.rank, each.host) for each in detector.stragglers] == [(2, "b"), (3, "b")]
    feed(detector, ranks, [[0.1, 0.2, 0.2, 0.2]] * 3, first=5)
    assert [(each.rank, each.host) for each in detector.stragglers] == [(1, None), (2, None), (3, None)]
    detector = StragglerDetector()
    feed(detector, ranks, [[0.1, 0.1, 0.1, 0.2]] * 5)
    assert [(each.rank, each.host) for each in detector.stragglers] == [(3, None)]


def noisy(chance: random.Random, usual: float, num_steps: int) -> list[float]:
    """Ten percent up and down, and now and then a step or two that something else disturbed."""
    walls: list[float] = []
    while len(walls) < num_steps:
        walls.append(usual * chance.uniform(0.9, 1.1))
        if chance.random() < 0.05:
            walls += [usual * chance.uniform(1.5, 5.0) for _ in range(chance.randint(1, 2))]
    return walls[:num_steps]


def noisy_mesh(chance: random.Random, ranks: dict[int, RankFacts], num_steps: int) -> list[list[float]]:
    """Stages further back have more to do."""
    columns = [noisy(chance, 0.01 * (1 + facts.place.pp), num_steps) for facts in ranks.values()]
    return [list(row) for row in zip(*columns, strict=True)]


meshes = st.sampled_from([(2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 2), (1, 1, 4)])


@settings(max_examples=40, deadline=None)
@given(meshes, st.integers(0, 2**32))
def test_none_is_named_in_200_noisy_steps(mesh, seed):
    chance, ranks = random.Random(seed), mesh_of(*mesh)
    assert not any(feed(StragglerDetector(), ranks, noisy_mesh(chance, ranks, 200)))


@settings(max_examples=80, deadline=None)
@given(meshes, st.data(), st.integers(0, 2**32))
def test_a_rank_that_becomes_twice_as_slow_is_named_within_three_steps(mesh, data, seed):
    chance, ranks = random.Random(seed), mesh_of(*mesh)
    rank = data.draw(st.sampled_from(sorted(ranks)))
    detector = StragglerDetector()
    feed(detector, ranks, noisy_mesh(chance, ranks, 20))
    calm = [[0.01 * (1 + f.place.pp) * chance.uniform(0.92, 1.08) for f in ranks.values()] for _ in range(3)]
    for each in calm:
        each[rank] *= 2
    assert rank in feed(detector, ranks, calm, first=20)[-1]
    assert detector.stragglers[0].since_step in (18, 19, 20), "a disturbed step may have come right before"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(0, 10), min_size=4, max_size=4), max_size=12))
def test_scores_are_shares_whatever_comes(walls):
    detector, ranks = StragglerDetector(), mesh_of(dp=2, pp=2)
    feed(detector, ranks, walls)
    assert all(0 <= score <= 1 for score in detector.scores.values())
