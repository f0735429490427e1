"""Ring, tree and hierarchical all-reduce: their programs as literal tables, the rules they keep, and their sums."""

from __future__ import annotations

from collections import Counter
from math import ceil, log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from process_groups.call import Call
from process_groups.in_process import carry_out, run_together
from process_groups.reduction import wide_dtype
from process_groups.strategies.algorithms import double_tree, hierarchical, ring, tree
from process_groups.strategies.program import Step, Transfer, split
from tests.support.program_rules import check_programs

SIZES = range(1, 10)
sizes, numels, chunks = st.integers(1, 9), st.integers(0, 50), st.integers(1, 7)
layouts = st.lists(st.integers(0, 3), min_size=1, max_size=9)
thorough = settings(max_examples=200, deadline=None)


def rings(size, numel):
    return [ring(size, rank, numel) for rank in range(size)]


def trees(size, numel, chunk):
    return [tree(size, rank, numel, chunk) for rank in range(size)]


def hierarchies(hosts, numel):
    return [hierarchical(len(hosts), rank, numel, hosts) for rank in range(len(hosts))]


def step(sends=(), reduces=(), replaces=()):
    """A step, each of its transfers as (peer, start, stop)."""
    return Step(*(tuple(Transfer(*one) for one in some) for some in (sends, reduces, replaces)))


# Literal tables


def test_ring_of_three_ranks_and_three_elements():
    assert rings(3, 3) == [
        (
            step(sends=[(1, 2, 3)], reduces=[(2, 1, 2)]),
            step(sends=[(1, 1, 2)], reduces=[(2, 0, 1)]),
            step(sends=[(1, 0, 1)], replaces=[(2, 2, 3)]),
            step(sends=[(1, 2, 3)], replaces=[(2, 1, 2)]),
        ),
        (
            step(sends=[(2, 0, 1)], reduces=[(0, 2, 3)]),
            step(sends=[(2, 2, 3)], reduces=[(0, 1, 2)]),
            step(sends=[(2, 1, 2)], replaces=[(0, 0, 1)]),
            step(sends=[(2, 0, 1)], replaces=[(0, 2, 3)]),
        ),
        (
            step(sends=[(0, 1, 2)], reduces=[(1, 0, 1)]),
            step(sends=[(0, 0, 1)], reduces=[(1, 2, 3)]),
            step(sends=[(0, 2, 3)], replaces=[(1, 1, 2)]),
            step(sends=[(0, 1, 2)], replaces=[(1, 0, 1)]),
        ),
    ]


def test_ring_of_more_ranks_than_elements_sends_no_empty_range():
    assert rings(3, 1) == [
        (step(reduces=[(2, 0, 1)]), step(sends=[(1, 0, 1)])),
        (step(sends=[(2, 0, 1)]), step(replaces=[(0, 0, 1)]), step(sends=[(2, 0, 1)])),
        (step(reduces=[(1, 0, 1)]), step(sends=[(0, 0, 1)]), step(replaces=[(1, 0, 1)])),
    ]


def test_tree_of_two_ranks_is_an_exchange_of_halves():
    assert trees(2, 4, chunk=2) == [
        (step(sends=[(1, 0, 2)], reduces=[(1, 2, 4)]), step(sends=[(1, 2, 4)], replaces=[(1, 0, 2)])),
        (step(sends=[(0, 2, 4)], reduces=[(0, 0, 2)]), step(sends=[(0, 0, 2)], replaces=[(0, 2, 4)])),
    ]


def test_tree_of_three_ranks_sends_a_chunk_while_it_receives_the_next():
    # Rank 1 is the root of the first tree, elements 0 to 3, rank 0 of the second, elements 4 to 7; rank 2 of neither.
    assert trees(3, 8, chunk=2) == [
        (
            step(sends=[(1, 0, 2)], reduces=[(2, 4, 6), (1, 4, 6)]),
            step(sends=[(1, 2, 4), (2, 4, 6), (1, 4, 6)], reduces=[(2, 6, 8), (1, 6, 8)], replaces=[(1, 0, 2)]),
            step(sends=[(2, 6, 8), (1, 6, 8)], replaces=[(1, 2, 4)]),
        ),
        (
            step(sends=[(0, 4, 6)], reduces=[(0, 0, 2), (2, 0, 2)]),
            step(sends=[(0, 6, 8), (0, 0, 2), (2, 0, 2)], reduces=[(0, 2, 4), (2, 2, 4)], replaces=[(0, 4, 6)]),
            step(sends=[(0, 2, 4), (2, 2, 4)], replaces=[(0, 6, 8)]),
        ),
        (
            step(sends=[(1, 0, 2), (0, 4, 6)]),
            step(sends=[(1, 2, 4), (0, 6, 8)], replaces=[(1, 0, 2), (0, 4, 6)]),
            step(replaces=[(1, 2, 4), (0, 6, 8)]),
        ),
    ]


def test_hierarchical_of_two_hosts_of_which_one_has_a_rank_more():
    assert hierarchies([0, 0, 0, 1, 1], 4) == [
        (
            step(sends=[(1, 2, 4)], reduces=[(1, 0, 2), (2, 0, 2)]),
            step(sends=[(3, 1, 2)], reduces=[(3, 0, 1)]),
            step(sends=[(3, 0, 1)], replaces=[(3, 1, 2)]),
            step(sends=[(1, 0, 2), (2, 0, 2)], replaces=[(1, 2, 4)]),
        ),
        (
            step(sends=[(0, 0, 2)], reduces=[(0, 2, 4), (2, 2, 4)]),
            step(sends=[(4, 3, 4)], reduces=[(4, 2, 3)]),
            step(sends=[(4, 2, 3)], replaces=[(4, 3, 4)]),
            step(sends=[(0, 2, 4), (2, 2, 4)], replaces=[(0, 0, 2)]),
        ),
        (step(sends=[(0, 0, 2), (1, 2, 4)]), step(replaces=[(0, 0, 2), (1, 2, 4)])),
        (
            step(sends=[(4, 2, 4)], reduces=[(4, 0, 2)]),
            step(sends=[(0, 0, 1)], reduces=[(0, 1, 2)]),
            step(sends=[(0, 1, 2)], replaces=[(0, 0, 1)]),
            step(sends=[(4, 0, 2)], replaces=[(4, 2, 4)]),
        ),
        (
            step(sends=[(3, 0, 2)], reduces=[(3, 2, 4)]),
            step(sends=[(1, 2, 3)], reduces=[(1, 3, 4)]),
            step(sends=[(1, 3, 4)], replaces=[(1, 2, 3)]),
            step(sends=[(3, 2, 4)], replaces=[(3, 0, 2)]),
        ),
    ]


@pytest.mark.parametrize("programs", [rings(1, 5), trees(1, 5, 2), hierarchies([3], 5), rings(4, 0), trees(4, 0, 1)])
def test_nothing_to_do(programs):
    assert set(programs) == {()}


@given(numels, sizes)
def test_split_is_that_of_torch(numel, parts):
    assert [list(part) for part in split(range(numel), parts)] == [
        part.tolist() for part in torch.arange(numel).tensor_split(parts)
    ]


# Rules


@thorough
@given(sizes, numels)
def test_ring_keeps_the_rules(size, numel):
    check_programs(rings(size, numel), numel)


@thorough
@given(sizes, numels, chunks)
def test_tree_keeps_the_rules(size, numel, chunk):
    check_programs(trees(size, numel, chunk), numel)


@thorough
@given(layouts, numels)
def test_hierarchical_keeps_the_rules(hosts, numel):
    check_programs(hierarchies(hosts, numel), numel)


@pytest.mark.parametrize("size", [16, 17, 31, 32, 33, 64])
def test_larger_groups_keep_the_rules(size):
    check_programs(rings(size, 70), 70)
    check_programs(trees(size, 70, 3), 70)
    check_programs(hierarchies([rank % 5 for rank in range(size)], 70), 70)


BROKEN = {
    "(a) from 0 to 1": [(step(sends=[(1, 0, 1)]),), ()],
    "(a) from 1 to 0": [(step(replaces=[(1, 0, 2)]),), (step(sends=[(0, 0, 1)]),)],
    "(a) Transfer(peer=0": [(step(sends=[(0, 0, 1)], replaces=[(0, 0, 1)]),), ()],
    "(b) Transfer(peer=1, start=1, stop=1)": [(step(sends=[(1, 1, 1)]),), (step(reduces=[(0, 1, 1)]),)],
    "(b) Transfer(peer=1, start=0, stop=3)": [(step(sends=[(1, 0, 3)]),), (step(reduces=[(0, 0, 3)]),)],
    "(b) a step": [(step(),), ()],
    "(c) ranks [0, 1]": [
        (step(reduces=[(1, 0, 2)]), step(sends=[(1, 0, 2)])),
        (step(reduces=[(0, 0, 2)]), step(sends=[(0, 0, 2)])),
    ],
    # Both give away what they have and add what comes: over shared memory, the slower one reads the other's sum.
    "(d) Transfer(peer=0, start=0, stop=2)": [
        (step(sends=[(1, 0, 2)], reduces=[(1, 0, 2)]),),
        (step(sends=[(0, 0, 2)], reduces=[(0, 0, 2)]),),
    ],
    # Rank 2 may have read the range by the time rank 0 writes into it, but nothing has told rank 0 so.
    "(d) Transfer(peer=1, start=0, stop=1)": [
        (step(sends=[(2, 0, 2)]), step(reduces=[(1, 0, 1)])),
        (step(sends=[(0, 0, 1)]),),
        (step(reduces=[(0, 0, 2)]),),
    ],
    "(e) not all": [(), ()],
    "(e) [0] are added twice": [
        (step(sends=[(1, 0, 2)], reduces=[(1, 0, 2)]),),
        (step(reduces=[(0, 0, 2)]), step(sends=[(0, 0, 2)])),
    ],
    # Element 0: ranks 0 and 1 have a + b, ranks 2 and 3 have c + d; then rank 0 adds c + d, and rank 2 adds a + b.
    # Element 1 is summed by rank 1; on its way it tells rank 3 that rank 2 has read, so that rule (d) is kept.
    "(e) an element was computed twice": [
        (
            step(sends=[(1, 0, 1)], replaces=[(1, 0, 1)]),
            step(sends=[(2, 0, 1)], reduces=[(3, 1, 2), (3, 0, 1)]),
            step(sends=[(1, 1, 2), (3, 0, 1)], replaces=[(1, 1, 2)]),
        ),
        (
            step(reduces=[(0, 0, 1)]),
            step(sends=[(0, 0, 1)], replaces=[(2, 0, 1)]),
            step(reduces=[(0, 1, 2)]),
            step(sends=[(0, 1, 2), (2, 1, 2), (3, 1, 2)]),
        ),
        (
            step(sends=[(3, 0, 1)], replaces=[(3, 0, 1)]),
            step(reduces=[(0, 0, 1)]),
            step(sends=[(1, 0, 1), (3, 1, 2)], replaces=[(1, 1, 2)]),
        ),
        (
            step(reduces=[(2, 0, 1)]),
            step(sends=[(2, 0, 1)], reduces=[(2, 1, 2)]),
            step(sends=[(0, 1, 2), (0, 0, 1)], replaces=[(0, 0, 1), (1, 1, 2)]),
        ),
    ],
}


@pytest.mark.parametrize("complaint", BROKEN)
def test_the_checker_finds_what_is_broken(complaint):
    with pytest.raises(AssertionError) as error:
        check_programs(BROKEN[complaint], 2)
    assert str(error.value).startswith(complaint)


# What they cost


def num_sent(program):
    return sum(send.stop - send.start for step in program for send in step.sends)


@given(sizes, numels)
def test_ring_sends_the_least_possible(size, numel):
    wanted = 2 * (size - 1) / size * numel
    for program in rings(size, numel):
        # One part is left out in each direction, and a part is less than one element away from an even share.
        assert num_sent(program) == wanted if numel % size == 0 else abs(num_sent(program) - wanted) < 2


def is_inner(node):
    return bool(node.children)


def test_no_rank_is_an_inner_node_of_both_trees():
    for size in range(2, 130):
        num_inner = [sum(map(is_inner, double_tree(size, rank))) for rank in range(size)]
        # Both trees of an odd number of ranks are full: they have one leaf more than they have inner nodes.
        assert num_inner == ([1] * (size - 1) + [0] if size % 2 else [1] * size)


def test_each_tree_is_a_binary_tree_over_all_ranks():
    for size in range(1, 130):
        for nodes in zip(*(double_tree(size, rank) for rank in range(size)), strict=True):
            check_tree(nodes)
            assert max(node.depth for node in nodes) <= ceil(log2(size))


def check_tree(nodes):
    assert [node.depth for node in nodes if node.parent is None] == [0]
    assert sum(len(node.children) for node in nodes) == len(nodes) - 1
    for rank, node in enumerate(nodes):
        assert len(node.children) <= 2
        for child in node.children:
            assert (nodes[child].parent, nodes[child].depth) == (rank, node.depth + 1)


def test_tree_of_seven_ranks_is_the_one_in_the_docstring():
    first, second = zip(*(double_tree(7, rank) for rank in range(7)), strict=True)
    assert [node.children for node in first] == [(), (0, 2), (), (1, 5), (), (4, 6), ()]
    assert [node.children for node in second] == [(6, 1), (), (0, 4), (), (3, 5), (), ()]


@given(sizes, numels)
def test_no_rank_of_the_tree_sends_more_than_twice_the_tensor(size, numel):
    # An inner node sends half of the tensor to its parent and to two children, and as a leaf the other half.
    assert all(num_sent(program) <= 2 * numel + 1 for program in trees(size, numel, 3))


@pytest.mark.parametrize("size", range(2, 18))
def test_a_rank_fills_the_tree_before_it_waits_for_a_result(size):
    num_chunks = 20
    for rank, program in enumerate(trees(size, 2 * num_chunks, chunk=1)):
        for which, node in enumerate(double_tree(size, rank)):
            if node.parent is None:
                continue
            wanted = range(which * num_chunks, (which + 1) * num_chunks)
            first_result = next(i for i, s in enumerate(program) for r in s.replaces if r.start in wanted)
            ahead = [s for step in program[: first_result + 1] for s in step.sends]
            assert sum(s.peer == node.parent and s.start in wanted for s in ahead) == 2 * node.depth


@pytest.mark.parametrize("size", SIZES)
def test_another_chunk_costs_the_tree_one_step(size):
    # The longest program has the chunks one after another, and besides only the way up and down once.
    height = max(node.depth for rank in range(size) for node in double_tree(size, rank))
    for num_chunks in (1, 2, 10, 11):
        longest = max(len(program) for program in trees(size, 2 * num_chunks, chunk=1))
        assert longest <= num_chunks + 2 * height


def crossing(programs, hosts):
    """How many elements go from host to host."""
    found = Counter()
    for rank, program in enumerate(programs):
        for send in (send for step in program for send in step.sends):
            if hosts[rank] != hosts[send.peer]:
                found[hosts[rank], hosts[send.peer]] += send.stop - send.start
    return found


def test_hierarchical_crosses_between_hosts_as_seldom_as_possible():
    hosts = [0, 0, 1, 1]
    assert crossing(hierarchies(hosts, 40), hosts) == {(0, 1): 40, (1, 0): 40}
    assert crossing(rings(4, 40), hosts) == {(0, 1): 60, (1, 0): 60}
    scattered = [2, 0, 2, 1, 1, 0, 2]
    # As a ring of three ranks: 2 (3 - 1) / 3 of the elements leave each host, to the next in the order 2, 0, 1.
    assert crossing(hierarchies(scattered, 60), scattered) == {(2, 0): 80, (0, 1): 80, (1, 2): 80}


@given(st.permutations(range(6)), numels)
def test_hierarchical_of_lonely_ranks_is_the_ring(hosts, numel):
    assert hierarchies(hosts, numel) == rings(6, numel)


def test_hierarchical_on_one_host_takes_two_steps():
    assert {len(program) for program in hierarchies([7] * 5, 50)} == {2}


# What they compute

DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXACTLY = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.sum(0),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
}
STRATEGIES = {
    "ring": rings,
    "tree": lambda size, numel: trees(size, numel, 4),
    "hierarchical": lambda size, numel: hierarchies([rank % 3 for rank in range(size)], numel),
}
every_strategy = pytest.mark.parametrize("programs_of", STRATEGIES.values(), ids=STRATEGIES)


@every_strategy
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(dtype, op) for dtype in DTYPES for op in EXACTLY if op != "mean" or dtype.is_floating_point],
    ids=str,
)
def test_whole_numbers_are_reduced_exactly(dtype, op, programs_of):
    for size in SIZES:
        for shape in [(), (0,), (5,), (3, 7)]:
            # Nine ranks' sums stay below 256: even bfloat16 holds them exactly.
            tensors = [torch.randint(-20, 20, shape).to(dtype) for _ in range(size)]
            expected = EXACTLY[op](torch.stack(tensors).to(torch.int64)).to(dtype)
            if op == "mean":
                expected = (expected.to(wide_dtype(dtype, op)) / size).to(dtype)
            run_together(programs_of(size, expected.numel()), tensors, op)
            assert all(torch.equal(tensor, expected) for tensor in tensors)


@every_strategy
def test_a_sum_of_short_floats_is_rounded_once(programs_of):
    tensors = [torch.rand(1000).to(torch.bfloat16) for _ in range(9)]
    exact = torch.stack(tensors).double().sum(0)
    run_together(programs_of(9, 1000), tensors, "sum")
    one_ulp = torch.finfo(torch.bfloat16).eps * 2.0 ** (torch.frexp(exact).exponent - 1)
    assert ((tensors[0].double() - exact).abs() <= one_ulp).all()


@every_strategy
def test_the_mean_of_large_short_floats_does_not_overflow(programs_of):
    tensors = [torch.full((10,), 60000.0, dtype=torch.float16) for _ in range(4)]
    run_together(programs_of(4, 10), tensors, "mean")
    assert all(tensor.tolist() == [60000.0] * 10 for tensor in tensors)


@every_strategy
def test_all_ranks_have_the_same_bits(programs_of):
    tensors = [torch.randn(1001) for _ in range(7)]
    run_together(programs_of(7, 1001), tensors, "sum")
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def test_short_floats_travel_as_they_are_where_nothing_adds_up():
    assert [wide_dtype(torch.bfloat16, op) for op in ("sum", "mean")] == [torch.float32] * 2
    assert [wide_dtype(torch.float16, op) for op in ("min", "max")] == [torch.float16] * 2
    assert [wide_dtype(dtype, "sum") for dtype in DTYPES[:4]] == list(DTYPES[:4])


@pytest.mark.parametrize(
    ("complaint", "programs"),
    [
        ("stuck: rank 0 waits for rank 1, rank 1 waits for rank 0", BROKEN["(c) ranks [0, 1]"]),
        ("sent and never received", BROKEN["(a) from 0 to 1"]),
        ("rank 0 got 1 elements", BROKEN["(a) from 1 to 0"]),
    ],
)
def test_a_program_that_cannot_end_is_refused(complaint, programs):
    with pytest.raises(AssertionError, match=complaint):
        run_together(programs, [torch.zeros(2), torch.zeros(2)], "sum")


@pytest.mark.parametrize("strategy", ["default", "adaptive", "ring", "tree", "hierarchical"])
@pytest.mark.parametrize("in_place", [True, False])
def test_ranks_of_one_process_follow_the_strategy(strategy, in_place):
    sources = [torch.full((3, 40_000), rank + 1.0) for rank in range(4)]
    targets = sources if in_place else [torch.empty_like(source) for source in sources]
    carry_out(
        [
            Call("all_reduce", source, target, "mean", strategy=strategy)
            for source, target in zip(sources, targets, strict=True)
        ]
    )
    assert all(torch.equal(target, torch.full((3, 40_000), 2.5)) for target in targets)
    assert in_place or [source[0, 0].item() for source in sources] == [1, 2, 3, 4]


@pytest.mark.parametrize("strategy", ["ring", "tree", "hierarchical"])
def test_the_strategy_is_not_the_default_in_disguise(strategy):
    # In rank order this is (1e8 - 1e8) + 1 = 1; whoever begins with another pair loses the 1 in float32.
    tensors = [torch.full((60,), value) for value in (1e8, -1e8, 1.0)]
    carry_out([Call("all_reduce", tensor, tensor, "sum", strategy=strategy) for tensor in tensors])
    assert tensors[0].eq(0).any()
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
