"""Every schedule's table: literally, against torch's, complete, without deadlock, and as quick and lean as promised."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from parallel3d.config import load_config
from parallel3d.pipeline.schedules import dualpipe_v, gpipe, interleaved, one_f_one_b, round_robin, zbv, zero_bubble
from parallel3d.pipeline.schedules.actions import parse_actions
from parallel3d.pipeline.schedules.build import SCHEDULES, build
from parallel3d.pipeline.schedules.limits import IMPLIES_TWO_VIRTUAL_STAGES, NEEDS_VIRTUAL_STAGES, better_microbatches
from parallel3d.pipeline.schedules.steps import in_steps
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation import find_deadlock
from runtime.errors import ConfigError, InvalidCall

FUNCTIONS = {
    "gpipe": gpipe.gpipe,
    "1f1b": one_f_one_b.one_f_one_b,
    "interleaved": interleaved.interleaved,
    "round-robin": round_robin.round_robin,
    "zero-bubble": zero_bubble.zero_bubble,
    "zbv": zbv.zbv,
    "dualpipe-v": dualpipe_v.dualpipe_v,
}
MOST_RANKS, MOST_MICROBATCHES, MOST_VIRTUAL_STAGES = 8, 32, 4
EQUAL_PARTS = {"F": 10, "B": 20, "I": 10, "W": 10}


def sizes(schedule: str) -> Iterator[tuple[int, int, int]]:
    """All that are possible: ranks, microbatches, virtual stages."""
    virtual = {True: range(2, MOST_VIRTUAL_STAGES + 1), False: (2 if schedule in IMPLIES_TWO_VIRTUAL_STAGES else 1,)}
    numbers = itertools.product(
        range(1, MOST_RANKS + 1), range(1, MOST_MICROBATCHES + 1), virtual[schedule in NEEDS_VIRTUAL_STAGES]
    )
    return ((p, m, v) for p, m, v in numbers if not better_microbatches(schedule, p, m))


def inputs(stage: int, kind: str, microbatch: int, stages: int) -> list[tuple[int, str, int]]:
    """What an action waits for. A gradient is there after B or I, noted as `grad`."""
    return {
        "F": [(stage - 1, "F", microbatch)] if stage else [],
        "W": [(stage, "I", microbatch)],
    }.get(kind, [(stage, "F", microbatch), *([(stage + 1, "grad", microbatch)] if stage + 1 < stages else [])])


def finish_times(table: Table, costs: dict[str, int]) -> list[int]:
    """When each rank is done. Fails when one never is."""
    done: dict[tuple[int, str, int], int] = {}
    at, clocks = [0] * table.num_ranks, [0] * table.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, column in enumerate(table.columns):
            while at[rank] < len(column):
                stage, kind, microbatch = column[at[rank]]
                times = [done.get(needed) for needed in inputs(stage, kind, microbatch, table.stages)]
                if None in times:
                    break
                clocks[rank] = done[stage, str(kind), microbatch] = max([clocks[rank], *times]) + costs[kind]
                if kind in "BI":
                    done[stage, "grad", microbatch] = clocks[rank]
                at[rank] += 1
                moved = True
    stuck = [str(column[at[rank]]) for rank, column in enumerate(table.columns) if at[rank] < len(column)]
    assert not stuck, f"deadlock at {stuck}"
    return clocks


def peaks(table: Table) -> list[int]:
    """The most microbatches of a stage that a rank holds at once: each from F to B or W."""
    return [
        max(itertools.accumulate({"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] for action in column))
        for column in table.columns
    ]


def assert_complete(table: Table) -> None:
    """Each stage and microbatch has one F and one backward, and each stage is on one rank."""
    found = Counter((action.stage, action.microbatch) for column in table.columns for action in column)
    assert found.keys() == set(itertools.product(range(table.stages), range(table.microbatches)))
    kinds: dict[tuple[int, int], str] = {}
    owners: dict[int, int] = {}
    for rank, column in enumerate(table.columns):
        for stage, kind, microbatch in column:
            kinds[stage, microbatch] = kinds.get((stage, microbatch), "") + kind
            assert owners.setdefault(stage, rank) == rank
    assert set(kinds.values()) <= {"FB", "FIW"}


def columns(text: str) -> tuple[tuple, ...]:
    """A table from its picture, with or without idle steps."""
    lines = [line.partition("|")[2].split() for line in text.strip().splitlines()]
    return tuple(tuple(action for word in line if word != "." for action in parse_actions(word)) for line in lines)


def picture(table: Table) -> str:
    """As docstrings have it."""
    rows = [["." if action is None else str(action) for action in row] for row in in_steps(table)]
    return "\n".join(f"rank {r} | {' '.join(word.ljust(3) for word in row)}".rstrip() for r, row in enumerate(rows))


# (schedule, ranks, microbatches, virtual stages, picture)
TABLES = [
    (
        "gpipe",
        2,
        3,
        None,
        """
        rank 0 | 0F0 0F1 0F2 .   .   0B0 0B1 0B2
        rank 1 | .   1F0 1F1 1F2 1B0 1B1 1B2
        """,
    ),
    (
        "gpipe",
        4,
        1,
        None,
        """
        rank 0 | 0F0 .   .   .   .   .   .   0B0
        rank 1 | .   1F0 .   .   .   .   1B0
        rank 2 | .   .   2F0 .   .   2B0
        rank 3 | .   .   .   3F0 3B0
        """,
    ),
    ("gpipe", 1, 2, None, "rank 0 | 0F0 0F1 0B0 0B1"),
    (
        "1f1b",
        4,
        5,
        None,
        """
        rank 0 | 0F0 0F1 0F2 0F3 .   .   .   0B0 0F4 0B1 .   0B2 .   0B3 .   0B4
        rank 1 | .   1F0 1F1 1F2 .   .   1B0 1F3 1B1 1F4 1B2 .   1B3 .   1B4
        rank 2 | .   .   2F0 2F1 .   2B0 2F2 2B1 2F3 2B2 2F4 2B3 .   2B4
        rank 3 | .   .   .   3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4
        """,
    ),
    (
        "1f1b",
        3,
        1,
        None,
        """
        rank 0 | 0F0 .   .   .   .   0B0
        rank 1 | .   1F0 .   .   1B0
        rank 2 | .   .   2F0 2B0
        """,
    ),
    (
        "1f1b",
        3,
        2,
        None,
        """
        rank 0 | 0F0 0F1 .   .   .   0B0 .   0B1
        rank 1 | .   1F0 1F1 .   1B0 .   1B1
        rank 2 | .   .   2F0 2B0 2F1 2B1
        """,
    ),
    (
        "interleaved",
        2,
        2,
        2,
        """
        rank 0 | 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
        rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
        """,
    ),
    (
        "interleaved",
        1,
        2,
        3,
        "rank 0 | 0F0 1F0 2F0 2B0 0F1 1B0 1F1 0B0 2F1 2B1 1B1 0B1",
    ),
    (
        "interleaved",
        3,
        3,
        2,
        """
        rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2 .   .   3B0 .   3B1 .   3B2 0B0 0B1 0B2
        rank 1 | .   1F0 1F1 1F2 4F0 4F1 4F2 4B0 .   4B1 .   4B2 1B0 1B1 1B2
        rank 2 | .   .   2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2B0 2B1 2B2
        """,
    ),
    (
        "round-robin",
        2,
        2,
        2,
        """
        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0
        rank 1 | .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
        """,
    ),
    (
        "round-robin",
        3,
        2,
        3,
        """
        rank 0 | 0F0 0F1 .   3F0 3F1 .   6F0 6F1 .   .   .   .   6B1 6B0 .   3B1 3B0 .   0B1 0B0
        rank 1 | .   1F0 1F1 .   4F0 4F1 .   7F0 7F1 .   .   7B1 7B0 .   4B1 4B0 .   1B1 1B0
        rank 2 | .   .   2F0 2F1 .   5F0 5F1 .   8F0 8F1 8B1 8B0 .   5B1 5B0 .   2B1 2B0
        """,
    ),
    (
        "zero-bubble",
        2,
        3,
        None,
        """
        rank 0 | 0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2
        rank 1 | .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
        """,
    ),
    (
        "zero-bubble",
        3,
        1,
        None,
        """
        rank 0 | 0F0 .   .   .   .   0I0 0W0
        rank 1 | .   1F0 .   .   1I0 1W0
        rank 2 | .   .   2F0 2I0 2W0
        """,
    ),
    (
        "zbv",
        2,
        3,
        None,
        """
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
        """,
    ),
    (
        "zbv",
        2,
        1,
        None,
        """
        rank 0 | 0F0 .   .   3F0 3I0 3W0 .   .   0I0 0W0
        rank 1 | .   1F0 2F0 .   .   2I0 2W0 1I0 1W0
        """,
    ),
    ("zbv", 1, 2, None, "rank 0 | 0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"),
    (
        "dualpipe-v",
        2,
        5,
        None,
        """
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 0I3 0W3 0I4 0W4
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 2B3 1B3 2I4 1I4 2W4 1W4
        """,
    ),
    ("dualpipe-v", 1, 2, None, "rank 0 | 0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1"),
]


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "virtual_stages", "text"),
    TABLES,
    ids=[f"{name} {p}x{m}" for name, p, m, *_ in TABLES],
)
def test_the_table_literally(schedule, ranks, microbatches, virtual_stages, text):
    table = build(schedule, ranks, microbatches, virtual_stages)
    assert table.columns == columns(text)
    assert picture(table).splitlines() == [line.strip() for line in text.strip().splitlines()]
    assert (table.schedule, table.microbatches) == (schedule, microbatches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_picture_in_the_docstring_is_the_table(schedule):
    lines = [line.strip() for line in FUNCTIONS[schedule].__doc__.splitlines() if " | " in line]
    drawn = columns("\n".join(lines))
    actions = [action for column in drawn for action in column]
    stages, microbatches = (1 + max(action[place] for action in actions) for place in (0, 2))
    table = build(schedule, len(drawn), microbatches, stages // len(drawn))
    assert picture(table).splitlines() == lines


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_possible_table_is_complete_and_ends(schedule):
    number = 0
    for ranks, microbatches, virtual_stages in sizes(schedule):
        table = build(schedule, ranks, microbatches, virtual_stages)
        assert (table.num_ranks, table.stages) == (ranks, ranks * virtual_stages)
        assert_complete(table)
        finish_times(table, EQUAL_PARTS)
        assert find_deadlock(table.with_communication()) is None, "what is run"
        number += 1
    assert number == {"interleaved": 3 * 85, "round-robin": 3 * 256, "dualpipe-v": 8 * 33 - 2 * 36}.get(schedule, 256)


def test_the_checks_of_this_file_can_fail():
    with pytest.raises(AssertionError, match=r"deadlock at \['0B0', '1F1'\]"):
        finish_times(Table("x", 2, 2, columns("|0F0 0B0 0F1 0B1\n|1F0 1F1 1B0 1B1")), EQUAL_PARTS)
    for wrong in ("|0F0 0F0 0B0", "|0F0", "|0F0 0I0", "|0F0 0I0 0W0 0B0", "|0F0 0B0\n|0F0 0B0", "|1F0 1B0"):
        with pytest.raises(AssertionError):
            assert_complete(Table("x", 1, 1, columns(wrong)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "round-robin", "zero-bubble"])
def test_stages_are_dealt_over_the_ranks_in_turn(schedule):
    for ranks, virtual_stages in itertools.product((1, 3, 8), (2, 3) if schedule in NEEDS_VIRTUAL_STAGES else (1,)):
        owners = build(schedule, ranks, ranks, virtual_stages).rank_of_stage
        assert owners == tuple(stage % ranks for stage in range(ranks * virtual_stages))


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe-v"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_stages_go_down_and_up_the_v(schedule, ranks):
    assert build(schedule, ranks, 2 * ranks).rank_of_stage == (*range(ranks), *reversed(range(ranks)))


# What torch computes itself


TORCH = {
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "round-robin": torch_schedules.ScheduleLoopedBFS,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": torch_schedules.ScheduleDualPipeV,
}


def torch_column(schedule: str, rank: int, ranks: int, microbatches: int, virtual_stages: int) -> list[str]:
    """A rank's compute actions as torch orders them; its constructors would want real stages and processes."""
    fake = object.__new__(TORCH[schedule])
    fake.pp_group_size, fake._n_microbatches = ranks, microbatches
    fake._stages, fake.n_local_stages = [None] * virtual_stages, virtual_stages
    fake.microbatches_per_round, fake.num_stages = ranks, ranks * virtual_stages
    words = [str(action) for action in fake._calculate_single_rank_operations(rank) if action is not None]
    return [str(action) for word in words for action in parse_actions(word)]


@pytest.mark.parametrize("schedule", TORCH)
def test_torch_has_the_same_table(schedule):
    for ranks, microbatches, virtual_stages in sizes(schedule):
        if microbatches > 3 * ranks + 2:
            continue  # the rest only repeats the steady state
        table = build(schedule, ranks, microbatches, virtual_stages)
        for rank, column in enumerate(table.columns):
            expected = torch_column(schedule, rank, ranks, microbatches, virtual_stages)
            assert list(map(str, column)) == expected, (ranks, microbatches, virtual_stages, rank)


class RecordedStage:
    """A stage for torch's own loop that only notes what it is asked to do."""

    is_first = is_last = False

    def __init__(self, stage: int) -> None:
        self.stage_index, self.notes = stage, []

    def forward_one_chunk(self, microbatch, *_, **__):
        self.notes.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **_):
        self.notes.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, _):
        pass

    def nothing_to_move(self, _):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing_to_move


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [("gpipe", torch_schedules.ScheduleGPipe), ("1f1b", torch_schedules.Schedule1F1B)],
)
def test_torch_runs_the_same_table(schedule, theirs):
    """Its loop is recorded, for the table that it prints of 1F1B begins the last rank with microbatch 1."""
    for ranks, microbatches in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 12)):
        table = build(schedule, ranks, microbatches)
        for rank, column in enumerate(table.columns):
            stage = RecordedStage(rank)
            names = ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses")
            fake = SimpleNamespace(_stage=stage, _n_microbatches=microbatches, _num_stages=ranks, scale_grads=False)
            vars(fake).update(dict.fromkeys(names, lambda *_, **__: None))
            fake._check_inputs = lambda *_, count=microbatches: ([()] * count, [{}] * count)
            theirs._step_microbatches(fake)
            assert list(map(str, column)) == stage.notes, (ranks, microbatches, rank)


# Time and memory


def makespan(schedule: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> int:
    return max(finish_times(build(schedule, ranks, microbatches, virtual_stages), EQUAL_PARTS))


# 4 ranks, 8 microbatches; a stage's F, I and W take 10 ms each: (milliseconds, peaks of the ranks)
FOUR_BY_EIGHT = {
    ("gpipe", 1): (330, [8, 8, 8, 8]),
    ("1f1b", 1): (330, [4, 3, 2, 1]),
    ("zero-bubble", 1): (270, [4, 4, 4, 4]),
    ("interleaved", 2): (570, [11, 9, 7, 5]),
    ("interleaved", 4): (1050, [19, 17, 15, 13]),
    ("round-robin", 2): (570, [16, 16, 16, 16]),
    ("round-robin", 4): (1050, [32, 32, 32, 32]),
    ("zbv", 2): (510, [8, 8, 8, 8]),
    ("dualpipe-v", 2): (510, [9, 9, 9, 9]),
}


@pytest.mark.parametrize(("schedule", "virtual_stages"), FOUR_BY_EIGHT)
def test_four_ranks_and_eight_microbatches(schedule, virtual_stages):
    table = build(schedule, 4, 8, virtual_stages)
    assert (max(finish_times(table, EQUAL_PARTS)), peaks(table)) == FOUR_BY_EIGHT[schedule, virtual_stages]


def test_gpipe_keeps_everything_and_1f1b_only_what_is_under_way():
    for ranks, microbatches, _ in sizes("1f1b"):
        assert peaks(build("gpipe", ranks, microbatches)) == [microbatches] * ranks
        assert peaks(build("1f1b", ranks, microbatches)) == [min(microbatches, ranks - s) for s in range(ranks)]
        assert makespan("gpipe", ranks, microbatches) == makespan("1f1b", ranks, microbatches)
        assert makespan("1f1b", ranks, microbatches) == 30 * (microbatches + ranks - 1)


def test_interleaving_makes_the_bubble_as_many_times_smaller():
    """The bubble is (ranks - 1) of a microbatch's F and B through one stage, however many stages a rank has."""
    for ranks, microbatches, virtual_stages in sizes("interleaved"):
        time = makespan("interleaved", ranks, microbatches, virtual_stages)
        assert time == 30 * (microbatches * virtual_stages + ranks - 1)


def test_round_robin_keeps_everything():
    for ranks, microbatches, virtual_stages in sizes("round-robin"):
        assert (
            peaks(build("round-robin", ranks, microbatches, virtual_stages)) == [microbatches * virtual_stages] * ranks
        )


def test_zero_bubble_leaves_a_third_of_the_bubble_at_the_memory_of_1f1b():
    for ranks, microbatches, _ in sizes("zero-bubble"):
        assert max(peaks(build("zero-bubble", ranks, microbatches))) == min(ranks, microbatches)
        if microbatches >= ranks:
            assert makespan("zero-bubble", ranks, microbatches) == 30 * microbatches + 10 * (ranks - 1)
        assert makespan("zero-bubble", ranks, microbatches) <= makespan("1f1b", ranks, microbatches)


def test_zbv_leaves_no_bubble_at_the_memory_of_1f1b():
    for ranks, microbatches, _ in sizes("zbv"):
        table = build("zbv", ranks, microbatches)
        assert max(peaks(table)) <= 2 * ranks
        if microbatches >= 2 * ranks - 1:
            # A rank that has begun never waits.
            assert finish_times(table, EQUAL_PARTS) == [60 * microbatches + 10 * rank for rank in range(ranks)]


def test_dualpipe_v_ends_as_early_as_zbv_and_keeps_one_more():
    for ranks, microbatches, _ in sizes("dualpipe-v"):
        table = build("dualpipe-v", ranks, microbatches)
        assert peaks(table) == [2 * ranks + 1] * ranks
        assert finish_times(table, EQUAL_PARTS) == [60 * microbatches + 10 * (ranks - 1)] * ranks


# What is impossible

# (schedule, ranks, microbatches, virtual stages, error)
IMPOSSIBLE = [
    (
        "1f1",
        4,
        8,
        None,
        "'1f1' is no schedule: there are gpipe, 1f1b, interleaved, round-robin, zero-bubble, zbv, dualpipe-v and "
        "csv:PATH. Did you mean 1f1b?",
    ),
    (
        "csv:",
        4,
        8,
        None,
        "'csv:' is no schedule: there are gpipe, 1f1b, interleaved, round-robin, zero-bubble, zbv, dualpipe-v and "
        "csv:PATH. Use one of these.",
    ),
    ("1f1b", None, 8, None, "1f1b: a table needs ranks and microbatches. Give both."),
    ("1f1b", 4, None, None, "1f1b: a table needs ranks and microbatches. Give both."),
    ("1f1b", 0, 8, None, "1f1b: 0 ranks. Use 1 or more."),
    ("gpipe", 4, 0, None, "gpipe: 0 microbatches. Use 1 or more."),
    ("interleaved", 4, 8, 0, "interleaved: 0 virtual stages. Use 1 or more."),
    ("gpipe", 4, 8, 2, "gpipe has one stage a rank; use interleaved or round-robin for 2."),
    ("1f1b", 4, 8, 3, "1f1b has one stage a rank; use interleaved or round-robin for 3."),
    ("zero-bubble", 4, 8, 2, "zero-bubble has one stage a rank; use interleaved or round-robin for 2."),
    ("interleaved", 4, 8, 1, "interleaved has 2 or more stages a rank. Use 2, or 1f1b for 1."),
    ("interleaved", 4, 8, None, "interleaved has 2 or more stages a rank. Use 2, or 1f1b for 1."),
    ("round-robin", 4, 8, 1, "round-robin has 2 or more stages a rank. Use 2, or gpipe for 1."),
    ("zbv", 4, 8, 1, "zbv always has 2 stages a rank, not 1. Use 2, or leave it out."),
    ("dualpipe-v", 4, 8, 3, "dualpipe-v always has 2 stages a rank, not 3. Use 2, or leave it out."),
    ("interleaved", 4, 10, 2, "interleaved: 10 microbatches are no multiple of 4 ranks. Use 8 or 12."),
    ("interleaved", 4, 1, 2, "interleaved: 1 microbatch is no multiple of 4 ranks. Use 4."),
    ("dualpipe-v", 4, 7, None, "dualpipe-v: 7 microbatches are fewer than 2 x 4 ranks. Use 8 or more, or zbv."),
    ("dualpipe-v", 1, 1, 2, "dualpipe-v: 1 microbatch is fewer than 2 x 1 rank. Use 2 or more, or zbv."),
]


@pytest.mark.parametrize(("schedule", "ranks", "microbatches", "virtual_stages", "error"), IMPOSSIBLE)
def test_what_is_impossible_is_refused_with_what_is_possible(schedule, ranks, microbatches, virtual_stages, error):
    with pytest.raises(InvalidCall) as refusal:
        build(schedule, ranks, microbatches, virtual_stages)
    assert str(refusal.value) == error


def accepted(function, *args, **options) -> bool:
    try:
        function(*args, **options)
    except (ConfigError, InvalidCall):
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_configuration_refuses_the_same(schedule):
    for ranks, microbatches, virtual_stages in itertools.product((1, 2, 3), (1, 2, 5, 6), (1, 2, 3)):
        overrides = {
            "pipeline": {"schedule": schedule, "microbatches": microbatches, "virtual_stages": virtual_stages},
            "parallel.pp": ranks,
            "model.args.layers": ranks * virtual_stages,
        }
        configured = accepted(load_config, None, overrides=overrides, environ={})
        built = accepted(build, schedule, ranks, microbatches, virtual_stages)
        assert configured == built, (ranks, microbatches, virtual_stages)


def test_every_schedule_has_its_function():
    assert tuple(FUNCTIONS) == SCHEDULES
