"""The adaptive choice, with ranks that go in step and a clock that only their calls move."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from process_groups.call import Call
from process_groups.reduction import combine
from process_groups.strategies import adaptive as module
from process_groups.strategies import measurements
from process_groups.strategies.adaptive import Adaptive, Pinned

KIB, MIB = 1 << 10, 1 << 20
Cost = Callable[[str, int], float]
"""Seconds of a strategy for so many bytes."""

# Made up: ring is best when large, tree when small; tree is hopeless when large, hierarchical never best.
FIXED = {"default": 20e-6, "ring": 60e-6, "tree": 5e-6, "hierarchical": 50e-6}
PER_BYTE = {"default": 1e-9, "ring": 0.5e-9, "tree": 3e-9, "hierarchical": 0.8e-9}


def usual(strategy: str, num_bytes: int) -> float:
    return FIXED[strategy] + PER_BYTE[strategy] * num_bytes


class Together:
    """The tables of some ranks. Their calls end together, `cost` after the last rank has come."""

    def __init__(self, cost: Cost = usual, pinned: Pinned = (), size: int = 3, layout: str = "test") -> None:
        self.cost, self.now = cost, 0.0
        self.runs: list[tuple[str, str, int]] = []
        """Kind, strategy and bytes of all that was carried out."""
        self._under_way: dict[int, tuple[Call, str]] = {}
        self.lag = [0.0] * size
        """Seconds that each rank comes late."""
        self.tables = [Adaptive(self._run_of(me), self._scratch, me, layout, pinned) for me in range(size)]

    def perf_counter(self) -> float:
        return self.now

    def _run_of(self, me: int):
        def run(call: Call, strategy: str) -> Iterator[None]:
            assert me not in self._under_way
            self._under_way[me] = call, strategy
            yield None

        return run

    @staticmethod
    def _scratch(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def _calls(self, num_bytes: int) -> list[Call]:
        """An adaptive call for every rank."""
        calls = []
        for _ in self.tables:
            values = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            calls.append(Call("all_reduce", values, values, "sum", strategy="adaptive"))
        return calls

    def all_reduce(self, num_bytes: int) -> str:
        """An adaptive call on every rank; the strategy that all of them took."""
        calls = self._calls(num_bytes)
        steps = [table.steps(call) for table, call in zip(self.tables, calls, strict=True)]
        while steps:
            ended = []
            for me, rank in enumerate(steps):
                ended.append(next(rank, "ended") == "ended")
                self.now += self.lag[me]
            if any(ended):
                assert all(ended), "some ranks have more to do"
                break
            self._carry_out()
        (strategy,) = {call.carried_out_by for call in calls}
        assert strategy is not None
        return strategy

    def _carry_out(self) -> None:
        found = [self._under_way.pop(me) for me in range(len(self.tables))]
        tensors = [call.target for call, _ in found if call.target is not None]
        assert len({(call.kind, call.op, strategy) for call, strategy in found}) == 1, "the ranks disagree"
        call, strategy = found[0]
        num_bytes = tensors[0].nbytes if tensors else 0
        assert all(tensor.nbytes == num_bytes for tensor in tensors)
        if tensors and not tensors[0].is_meta:
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                combine(total, tensor, call.op)
            for tensor in tensors:
                tensor.copy_(total)
        else:
            self.now += self.cost(strategy, num_bytes)
        self.runs.append((call.kind if num_bytes else "barrier", strategy, num_bytes))

    def explain(self, num_bytes: int) -> str:
        """What every rank says."""
        (text,) = {str(table.explain(num_bytes)) for table in self.tables}
        return text

    def measured(self) -> list[tuple[str, int]]:
        """What was not for coming to an agreement."""
        return [(strategy, num_bytes) for kind, strategy, num_bytes in self.runs if num_bytes > 100]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parallel3d" / "all-reduce.json"


@pytest.fixture
def together(monkeypatch):
    """Makes ranks whose clock is the module's, and whose periods are short."""
    monkeypatch.setattr(module, "_PERIOD", 64)

    def make(*args, **options) -> Together:
        made = Together(*args, **options)
        monkeypatch.setattr(module, "time", made)
        return made

    return make


def test_the_fastest_of_each_size_is_chosen_and_explained(together):
    ranks = together()
    assert ranks.explain(4 * KIB) == "default: not decided: the first adaptive call measures, unless an earlier run has"
    assert not ranks.tables[0].is_ready
    chosen = {size: ranks.all_reduce(size) for size in (100, 4 * KIB, 64 * KIB, MIB, 8 * MIB, 100 * MIB)}
    assert ranks.tables[0].is_ready
    assert list(chosen.values()) == ["tree", "tree", "default", "ring", "ring", "ring"]


def test_the_texts_of_explain(together):
    ranks = together()
    ranks.all_reduce(4)
    source = "the fastest of its size class, measured by this group's first adaptive call"
    assert ranks.explain(4 * KIB) == (f"tree: {source} (default 24 µs, ring 62 µs, tree 17 µs, hierarchical 53 µs)")
    assert ranks.explain(16 * MIB) == f"ring: {source} (default 16,797 µs, ring 8,449 µs, hierarchical 13,472 µs)"
    assert ranks.explain(8 * MIB) == ranks.explain(16 * MIB), "the nearest class that was measured"
    assert ranks.explain(4 * MIB) == ranks.explain(MIB), "of two that are as near, the smaller"
    assert ranks.explain(1 << 40) == ranks.explain(16 * MIB)
    assert ranks.explain(0) == ranks.explain(4 * KIB)
    for _ in range(128):
        ranks.all_reduce(16 * MIB)
    assert ranks.explain(16 * MIB) == (
        f"ring: {source} and refined by 128 calls (default 16,797 µs, ring 8,449 µs, hierarchical 13,472 µs)"
    )
    for _ in range(128):
        ranks.all_reduce(8 * MIB)
    assert ranks.explain(8 * MIB) == (  # default, which is not worth a try, as it was measured with 16 MiB
        f"ring: {source} and refined by 128 calls (default 16,797 µs, ring 4,254 µs, hierarchical 6,761 µs)"
    )


def test_what_is_measured(together):
    ranks = together()
    ranks.all_reduce(4)
    names = ("default", "ring", "tree", "hierarchical")
    # At 1 MiB tree takes more than 4 times as long as the best, so that it is left out at 16 MiB.
    assert ranks.measured() == [
        *[(name, 4 * KIB) for _ in range(5) for name in names for _ in range(2)],
        *[(name, 64 * KIB) for _ in range(5) for name in names for _ in range(2)],
        *[(name, MIB) for _ in range(5) for name in names for _ in range(2)],
        *[(name, 16 * MIB) for _ in range(5) for name in names if name != "tree" for _ in range(2)],
    ]
    assert [kind for kind, _, num_bytes in ranks.runs if num_bytes != 32].count("barrier") == len(ranks.measured())


def test_slow_sizes_are_measured_less_often_or_not(together):
    ranks = together(lambda strategy, num_bytes: 0.6 * num_bytes / MIB if num_bytes else 0.0)
    ranks.all_reduce(4)
    sizes = [num_bytes for _, num_bytes in ranks.measured()]
    # Four candidates of 64 KiB, each twice, take 0.3 s, of 1 MiB 4.8 s.
    assert {size: sizes.count(size) for size in dict.fromkeys(sizes)} == {4 * KIB: 8 * 5, 64 * KIB: 8 * 3}
    assert ranks.all_reduce(100 * MIB) == "default"


@pytest.mark.parametrize(
    ("seconds_per_mib", "repeats"),
    [
        (0.0018, {4 * KIB: 5, 64 * KIB: 5, MIB: 5, 16 * MIB: 4}),  # 8 x 16 x 0.0018 s = 0.23 s, 4 times within 1 s
        (0.0027, {4 * KIB: 5, 64 * KIB: 5, MIB: 5, 16 * MIB: 2}),  # 0.35 s
        (0.0075, {4 * KIB: 5, 64 * KIB: 5, MIB: 5, 16 * MIB: 1}),  # 0.96 s
        (0.0080, {4 * KIB: 5, 64 * KIB: 5, MIB: 5}),  # 1.02 s
        (0.0600, {4 * KIB: 5, 64 * KIB: 5, MIB: 2}),  # 8 x 0.06 s
    ],
)
def test_a_size_is_measured_as_often_as_a_second_allows(together, seconds_per_mib, repeats):
    ranks = together(lambda strategy, num_bytes: seconds_per_mib * num_bytes / MIB if num_bytes else 0.0)
    ranks.all_reduce(4)
    sizes = [num_bytes for _, num_bytes in ranks.measured()]
    assert {size: sizes.count(size) for size in dict.fromkeys(sizes)} == {size: 8 * n for size, n in repeats.items()}


def test_a_small_gain_is_not_worth_another_order_of_additions(together):
    for gain, chosen in ((0.95, "default"), (0.91, "default"), (0.89, "ring"), (0.85, "ring")):
        costs = {"default": 1e-3, "ring": gain * 1e-3, "tree": 2e-3, "hierarchical": 2e-3}
        ranks = together(lambda strategy, num_bytes, costs=costs: costs[strategy], layout=str(gain))
        assert ranks.all_reduce(MIB) == chosen


def test_ranks_that_come_late_do_not_change_the_choice(together):
    ranks = together()
    ranks.lag = [0.0, 3e-5, 0.004]
    assert ranks.all_reduce(8 * MIB) == "ring"
    for _ in range(200):
        ranks.all_reduce(8 * MIB)
    assert ranks.all_reduce(8 * MIB) == "ring"


def test_another_one_is_tried_at_the_end_of_a_period(together):
    ranks = together()
    taken = [ranks.all_reduce(16 * MIB) for _ in range(320)]
    others = {number + 1: name for number, name in enumerate(taken) if name != "ring"}
    # Those that take no more than twice as long, in turns, twice before notes are compared at 64, 128, …
    ends = {63: "hierarchical", 127: "default", 191: "hierarchical", 255: "default", 319: "hierarchical"}
    assert others == {number - earlier: name for number, name in ends.items() for earlier in (0, 1)}


def test_it_changes_its_mind_when_things_change(together):
    ranks = together()
    for _ in range(64):
        assert ranks.all_reduce(16 * MIB) in ("ring", "hierarchical")
    ranks.cost = lambda strategy, num_bytes: usual(strategy, num_bytes) * (5 if strategy == "ring" else 1)
    taken = [ranks.all_reduce(16 * MIB) for _ in range(64)]
    assert (set(taken[:61]), taken[61:]) == ({"ring"}, ["default", "default", "ring"])
    after = [ranks.all_reduce(16 * MIB) for _ in range(61)]
    assert set(after) == {"hierarchical"}, "the others are as they were"
    assert ranks.explain(16 * MIB).startswith("hierarchical: the fastest of its size class")
    assert ranks.explain(MIB).startswith("ring: "), "the smaller class has noticed nothing"


def test_what_was_measured_in_a_bad_moment_is_tried_again(together):
    """However slow it was then."""
    bad = {"default": 274e-6, "ring": 245e-6, "tree": 600e-6, "hierarchical": 500e-6}
    good = {"default": 45e-6, "ring": 78e-6, "tree": 100e-6, "hierarchical": 90e-6}
    ranks = together(lambda strategy, num_bytes: bad[strategy])
    assert ranks.all_reduce(MIB) == "ring"
    ranks.cost = lambda strategy, num_bytes: good[strategy]
    for _ in range(4 * 64):
        ranks.all_reduce(MIB)
    assert ranks.all_reduce(MIB) == "default"
    assert together().all_reduce(MIB) == "default", "kept for the next run too"


def test_what_was_too_slow_to_be_measured_is_tried_again_too(together):
    """Of 16 MiB nothing is known of a strategy that took more than 4 times as long with 1 MiB."""
    ranks = together(lambda strategy, num_bytes: usual(strategy, num_bytes) * (10 if strategy == "default" else 1))
    assert ranks.all_reduce(16 * MIB) == "ring"
    ranks.cost = lambda strategy, num_bytes: usual(strategy, num_bytes) * (0.2 if strategy == "default" else 1)
    for _ in range(3 * 4 * 64):
        ranks.all_reduce(16 * MIB)
    assert ranks.all_reduce(16 * MIB) == "default"


def test_the_same_one_is_tried_twice_whatever_other_classes_learn_meanwhile(together):
    ranks = together()
    for _ in range(62):
        ranks.all_reduce(4 * MIB)
    for _ in range(61):
        ranks.all_reduce(8 * MIB)
    first = ranks.all_reduce(8 * MIB)
    for _ in range(2):
        ranks.all_reduce(4 * MIB)
    assert (first, ranks.all_reduce(8 * MIB)) == ("hierarchical", "hierarchical")


def test_what_is_much_slower_is_tried_seldom(together):
    costs = {"default": 1e-3, "ring": 2.1e-3, "tree": 3e-3, "hierarchical": 3.5e-3}
    ranks = together(lambda strategy, num_bytes: costs[strategy])
    taken = [ranks.all_reduce(MIB) for _ in range(4 * 4 * 64)]
    others = {number + 1: name for number, name in enumerate(taken) if name != "default"}
    ends = {4 * 64: "ring", 8 * 64: "tree", 12 * 64: "hierarchical", 16 * 64: "ring"}
    assert others == {number - earlier: name for number, name in ends.items() for earlier in (1, 2)}


def test_a_try_is_not_judged_by_what_the_other_strategy_left_in_the_caches(together):
    ran = []

    def cost(strategy: str, num_bytes: int) -> float:
        ran.append(strategy)
        alone = ran[-2:] != [strategy] * 2
        return (5 if alone else 1) * {"default": 40e-6, "ring": 60e-6, "tree": 90e-6, "hierarchical": 90e-6}[strategy]

    ranks = together(lambda strategy, num_bytes: cost(strategy, num_bytes) if num_bytes else 0.0)
    assert [ranks.all_reduce(MIB) for _ in range(2)] == ["default"] * 2, "nor when it is measured"
    for found in (table._classes[MIB.bit_length()] for table in ranks.tables):
        found.chosen = 1
    for _ in range(3 * 64):
        ranks.all_reduce(MIB)
    assert ranks.all_reduce(MIB) == "default"


def test_every_size_class_learns_for_itself(together):
    ranks = together()
    ranks.all_reduce(4)
    ranks.cost = lambda strategy, num_bytes: 1e-6 if strategy == "hierarchical" else usual(strategy, num_bytes)
    for _ in range(64):
        ranks.all_reduce(8 * MIB)
    assert ranks.all_reduce(8 * MIB) == "hierarchical"
    assert ranks.all_reduce(MIB) == "ring"


def test_a_pinned_table_is_followed_and_nothing_is_measured(together):
    ranks = together(pinned=((64 * KIB, "tree"), (MIB, "ring")))
    assert ranks.tables[0].is_ready
    sizes = (1, 64 * KIB, 64 * KIB + 1, MIB, MIB + 1, 1 << 30)
    assert [ranks.all_reduce(size) for size in sizes] == ["tree", "tree", "ring", "ring", "ring", "ring"]
    assert [(strategy, num_bytes) for _, strategy, num_bytes in ranks.runs] == [
        ("tree", 1),
        ("tree", 64 * KIB),
        *[("ring", size) for size in sizes[2:]],
    ]
    assert ranks.explain(5) == "tree: pinned by comm.strategy_table"


# What an earlier run has kept.


def test_what_was_kept_is_used_instead_of_measuring(together, cache):
    together().all_reduce(4)
    ranks = together(lambda strategy, num_bytes: 1.0)
    assert ranks.all_reduce(16 * MIB) == "ring"
    assert ranks.measured() == [("ring", 16 * MIB)]
    assert ranks.explain(16 * MIB) == (
        "ring: the fastest of its size class, measured by an earlier run on this kind of host "
        "(default 16,797 µs, ring 8,449 µs, hierarchical 13,472 µs)"
    )


def test_a_choice_that_was_changed_is_kept_too(together):
    """Also of a size class that was not measured at first."""
    ranks = together()
    assert ranks.all_reduce(8 * MIB) == "ring"
    ranks.cost = lambda strategy, num_bytes: 1e-6 if strategy == "hierarchical" else usual(strategy, num_bytes)
    for _ in range(64):
        ranks.all_reduce(8 * MIB)
    later = together()
    assert [later.all_reduce(size) for size in (8 * MIB, 16 * MIB, 4 * KIB)] == ["hierarchical", "ring", "tree"]
    assert len(later.measured()) == 3


def test_the_call_that_measures_has_more_time(together):
    ranks = together()
    assert {table.extra_seconds for table in ranks.tables} == {10.0}
    ranks.all_reduce(4)
    assert {table.extra_seconds for table in ranks.tables} == {0.0}
    assert {table.extra_seconds for table in together(pinned=((KIB, "ring"),)).tables} == {0.0}


def test_only_the_first_rank_looks_and_tells_the_others(together, monkeypatch):
    together().all_reduce(4)
    asked = []
    load = measurements.load
    monkeypatch.setattr(measurements, "load", lambda *args: asked.append(1) or load(*args))
    assert together().all_reduce(8 * MIB) == "ring"
    assert asked == [1]


def test_only_the_first_rank_keeps(together, monkeypatch):
    kept = []
    monkeypatch.setattr(measurements, "save", lambda *args: kept.append(args))
    together().all_reduce(4)
    ((layout, candidates, rows),) = kept
    assert (layout, candidates, list(rows)) == ("test", module.CANDIDATES, [12, 16, 20, 24])
    assert rows[24][2] == math.inf


@pytest.mark.parametrize("row", [None, [1.0], [1.0, 2.0, 3.0, "x"], [0, 0, 0, 0]])
def test_a_broken_file_means_measuring(together, cache, row):
    together().all_reduce(4)
    everything = json.loads(cache.read_text())
    (entry,) = everything.values()
    entry["seconds"]["12"] = row
    cache.write_text(json.dumps(everything))
    ranks = together()
    assert ranks.all_reduce(8 * MIB) == "ring"
    assert len(ranks.measured()) == 2 * 5 * (4 + 4 + 4 + 3) + 1
    assert len(json.loads(cache.read_text())) == 1
