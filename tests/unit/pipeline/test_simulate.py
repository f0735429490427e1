"""Simulated tables: hand-computed times, known formulas, an independent second opinion, and deadlocks drawn."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from math import inf, nan
from random import Random

import numpy
import pytest

from parallel3d.pipeline.schedules.actions import Action, Kind, parse_actions
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation import (
    Costs,
    Deadlock,
    Peak,
    Reason,
    ScheduleDeadlock,
    find_deadlock,
    makespan,
    simulate,
)
from runtime.errors import InvalidCall

GPIPE = """
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
"""
ONE_F_ONE_B = """
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
"""
SEEDS = range(60)


def read(text: str) -> Table:
    """A line a rank."""
    lines = text.strip().splitlines()
    columns = tuple(tuple(action for cell in line.split() for action in parse_actions(cell)) for line in lines)
    actions = [action for column in columns for action in column]
    stages = 1 + max(action.stage for action in actions)
    return Table("test", stages, 1 + max(action.microbatch or 0 for action in actions), columns)


def gpipe(stages: int, microbatches: int) -> Table:
    columns = (
        tuple(Action(stage, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(microbatches))
        for stage in range(stages)
    )
    return Table("gpipe", stages, microbatches, tuple(columns))


def one_f_one_b(stages: int, microbatches: int) -> Table:
    def column(stage: int) -> Iterator[Action]:
        ahead = min(stages - stage, microbatches)
        yield from (Action(stage, Kind.F, microbatch) for microbatch in range(ahead))
        for microbatch in range(microbatches):
            yield Action(stage, Kind.B, microbatch)
            if ahead + microbatch < microbatches:
                yield Action(stage, Kind.F, ahead + microbatch)

    return Table("1f1b", stages, microbatches, tuple(tuple(column(stage)) for stage in range(stages)))


def times(result) -> dict[str, tuple[float, float]]:
    return {
        str(action): span
        for column, starts, ends in zip(result.table.columns, result.starts, result.ends, strict=True)
        for action, span in zip(column, zip(starts, ends, strict=True), strict=True)
    }


def path(result) -> list[str]:
    return [f"{step.action} {step.reason}" for step in result.critical_path]


# By hand


def test_gpipe_by_hand():
    result = simulate(read(GPIPE), Costs.uniform(2))
    assert result.starts == ((0, 1, 5, 7), (1, 2, 3, 5))
    assert result.ends == ((1, 2, 7, 9), (2, 3, 5, 7))
    assert result.makespan == 9
    assert result.busy == (6, 6)
    assert result.idle == result.stage_idle == (3, 3)
    assert result.bubble_ratio == pytest.approx(1 / 3)
    assert result.rank_bubble_ratios == result.stage_bubble_ratios == pytest.approx((1 / 3, 1 / 3))
    assert result.peak_activations == (2, 2)
    assert result.peak_memory == (Peak(2, at=1), Peak(2, at=2))
    assert path(result) == ["0F0 start", "1F0 data", "1F1 rank", "1B0 rank", "0B0 data", "0B1 rank"]


def test_1f1b_by_hand():
    result = simulate(read(ONE_F_ONE_B), Costs.uniform(2))
    assert result.starts == ((0, 1, 4, 7), (1, 2, 4, 5))
    assert result.ends == ((1, 2, 6, 9), (2, 4, 5, 7))
    assert result.makespan == 9
    assert result.peak_activations == (2, 1)
    assert result.peak_memory == (Peak(2, at=1), Peak(1, at=1))
    assert path(result) == ["0F0 start", "1F0 data", "1B0 rank", "1F1 rank", "1B1 rank", "0B1 data"]


def test_uneven_stages():
    result = simulate(read(ONE_F_ONE_B), Costs(2, forward=[1, 3], input_backward=[1, 2], weight_backward=1))
    assert result.starts == ((0, 1, 7, 13), (1, 4, 7, 10))
    assert result.ends == ((1, 2, 9, 15), (4, 7, 10, 13))
    assert (result.busy, result.idle) == ((6, 12), (9, 3))
    assert result.rank_bubble_ratios == (0.6, 0.2)
    assert result.bubble_ratio == 0.4


def test_transfers_delay_who_waits_and_nobody_else():
    result = simulate(read(ONE_F_ONE_B), Costs(2, 1, 1, 1, transfer=0.5, backward_transfer=0.25))
    assert result.starts == ((0, 1, 4.75, 7.75), (1.5, 2.5, 4.5, 5.5))
    assert result.ends == ((1, 2, 6.75, 9.75), (2.5, 4.5, 5.5, 7.5))
    assert [step.transfer for step in result.critical_path] == [0, 0.5, 0, 0, 0, 0.25]


def test_a_split_backward_lets_the_stage_before_go_on_sooner_and_holds_on_to_its_input():
    table = read("""
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """)
    result = simulate(table, Costs(2, 1, 2, 0.5))
    assert result.starts == ((0, 1, 4, 6, 7, 9), (1, 2, 4, 5, 7, 7.5))
    assert result.ends == ((1, 2, 6, 6.5, 9, 9.5), (2, 4, 5, 7, 7.5, 8))
    assert result.peak_activations == (2, 2)  # a whole backward in the same places would free stage 1 before 1F1
    assert find_deadlock(table) is None


def test_two_stages_on_one_rank_do_not_send_to_each_other():
    table = read("""
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """)
    result = simulate(table, Costs(4, 1, 1, 1, transfer=[0.5, 9, 0.25], memory=[1, 2, 4, 8]))
    assert result.starts == ((0, 3.75, 4.75, 11.5), (1.5, 2.5, 7, 9))
    assert result.ends == ((1, 4.75, 6.75, 13.5), (2.5, 3.5, 9, 11))
    assert (result.busy, result.idle) == ((6, 6), (7.5, 7.5))
    assert result.stage_idle == (4.75, 4, 3.5, 2.75)
    assert result.peak_activations == (1, 1, 1, 1)
    assert result.peak_memory == (Peak(9, at=3.75), Peak(6, at=2.5))


@pytest.mark.parametrize(
    ("seconds", "ends", "critical"),
    [
        ([1, 5], {"1REDUCE_GRAD": (4, 9), "0B0": (4, 6), "0REDUCE_GRAD": (6, 7)}, "0F0 1F0 1B0 1REDUCE_GRAD"),
        ([4, 1], {"1REDUCE_GRAD": (4, 5), "0B0": (4, 6), "0REDUCE_GRAD": (6, 10)}, "0F0 1F0 1B0 0B0 0REDUCE_GRAD"),
    ],
)
def test_a_reduction_holds_up_nobody_but_counts(seconds, ends, critical):
    table = read("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD")
    result = simulate(table, Costs(2, 1, 1, 1, reduce_grad=seconds))
    assert times(result).items() >= ends.items()
    assert result.makespan == max(end for _, end in ends.values())
    assert result.busy == (6,)
    assert " ".join(str(step.action) for step in result.critical_path) == critical


def test_explicit_sends_and_receives():
    table = read("""
        0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """)
    result = simulate(table, Costs.uniform(2, transfer=0.5))
    assert result.starts[1] == (2.5, 2.5, 3.5, 5.5, 5.5, 5.5, 6.5, 8.5)  # 0F0 is over at 1, but sent at 2
    assert result.starts[0] == (0, 1, 2, 2, 6, 6, 9, 9)


def test_nothing_to_do_takes_no_time():
    result = simulate(Table("empty", 1, 0, ((), ())), Costs.uniform(1))
    assert (result.makespan, result.bubble_ratio, result.critical_path) == (0, 0, ())
    assert (result.peak_activations, result.peak_memory) == ((0,), (Peak(0, 0), Peak(0, 0)))


# Formulas


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 7, 16])
def test_makespan_and_bubble_are_what_the_papers_say(schedule, stages, microbatches):
    result = simulate(schedule(stages, microbatches), Costs.uniform(stages, 3, 4, 1))
    assert result.makespan == (microbatches + stages - 1) * (3 + 4 + 1)
    bubble = (stages - 1) / (microbatches + stages - 1)
    assert result.bubble_ratio == pytest.approx(bubble)
    assert result.rank_bubble_ratios == result.stage_bubble_ratios == pytest.approx((bubble,) * stages)
    most = [microbatches if schedule is gpipe else min(microbatches, stages - stage) for stage in range(stages)]
    assert list(result.peak_activations) == most


# A second opinion: the same rules, written once more over a graph of actions


def data_needs(table: Table) -> dict[Action, list[Action]]:
    """What each action needs, wherever it is."""
    actions = {action for column in table.columns for action in column}

    def there(*wanted: Action) -> list[Action]:
        return [action for action in wanted if action in actions]

    def gradient(stage: int, microbatch: int | None) -> list[Action]:
        return there(Action(stage, Kind.B, microbatch), Action(stage, Kind.I, microbatch))

    def needs(stage: int, kind: Kind, microbatch: int | None) -> list[Action]:
        match kind:
            case Kind.F:
                received = there(Action(stage, Kind.RECV_F, microbatch))
                return received or there(Action(stage - 1, Kind.F, microbatch))
            case Kind.B | Kind.I:
                received = there(Action(stage, Kind.RECV_B, microbatch))
                return [Action(stage, Kind.F, microbatch), *(received or gradient(stage + 1, microbatch))]
            case Kind.W:
                return [Action(stage, Kind.I, microbatch)]
            case Kind.SEND_F:
                return [Action(stage, Kind.F, microbatch)]
            case Kind.SEND_B:
                return gradient(stage, microbatch)
            case Kind.RECV_F:
                return [Action(stage - 1, Kind.SEND_F, microbatch)]
            case Kind.RECV_B:
                return [Action(stage + 1, Kind.SEND_B, microbatch)]
            case Kind.REDUCE_GRAD:
                return []

    return {action: needs(*action) for action in actions}


def graph(table: Table) -> dict[Action, list[Action]]:
    """With the order of the columns."""
    needs = data_needs(table)
    for column in table.columns:
        for before, after in pairwise(column):
            needs[after] = [*needs[after], before]
    return needs


def seconds(action: Action, costs: Costs) -> float:
    stage = action.stage
    dx, dw = costs.input_backward[stage], costs.weight_backward[stage]
    return {Kind.F: costs.forward[stage], Kind.B: dx + dw, Kind.I: dx, Kind.W: dw}.get(action.kind, 0.0)


def second_opinion(table: Table, costs: Costs) -> dict[str, tuple[float, float]]:
    needs, spans = graph(table), {}
    for action in TopologicalSorter(needs).static_order():
        start = 0.0
        for need in needs[action]:
            travel = 0.0
            if table.rank_of_stage[need.stage] != table.rank_of_stage[action.stage]:
                links = costs.transfer if need.stage < action.stage else costs.backward_transfer
                travel = links[min(need.stage, action.stage)]
            start = max(start, spans[str(need)][1] + travel)
        spans[str(action)] = (start, start + seconds(action, costs))
    return spans


def random_table(random: Random) -> Table:
    """Stages dealt out to ranks at random, backwards split at random, in an order in which it can be carried out."""
    stages, microbatches, ranks = random.randint(1, 5), random.randint(1, 4), random.randint(1, 4)
    owners = [random.randrange(ranks) for _ in range(stages)]
    actions = [
        Action(stage, kind, microbatch)
        for stage in range(stages)
        for microbatch in range(microbatches)
        for kind in (Kind.F, *random.choice([(Kind.B,), (Kind.I, Kind.W)]))
    ]
    needs = data_needs(Table("unordered", stages, microbatches, (tuple(actions),)))
    columns: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while len(done) < len(actions):
        ready = [action for action in actions if action not in done and done.issuperset(needs[action])]
        action = random.choice(ready)
        done.add(action)
        columns[owners[action.stage]].append(action)
    return Table("random", stages, microbatches, tuple(map(tuple, columns)))


def random_costs(stages: int, random: Random) -> Costs:
    def some(count: int) -> list[float]:
        return [random.choice([0.0, 1.0, random.uniform(0, 3)]) for _ in range(count)]

    links = stages - 1
    return Costs(*(stages, some(stages), some(stages), some(stages), some(links), some(links), some(stages)))


def shuffled(table: Table, random: Random) -> Table:
    """A few actions change places within their columns."""
    columns = [list(column) for column in table.columns]
    for _ in range(random.randint(1, 3)):
        column = random.choice([column for column in columns if column])
        one, other = random.randrange(len(column)), random.randrange(len(column))
        column[one], column[other] = column[other], column[one]
    return replace(table, columns=tuple(map(tuple, columns)))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_tables(seed):
    random = Random(seed)
    table = random_table(random)
    costs = random_costs(table.stages, random)
    assert find_deadlock(table) is None
    result = simulate(table, costs)
    assert times(result) == second_opinion(table, costs)

    for rank, column in enumerate(table.columns):
        assert result.busy[rank] == pytest.approx(sum(seconds(action, costs) for action in column))
        assert result.busy[rank] + result.idle[rank] == pytest.approx(result.makespan)
        assert result.idle[rank] >= 0
        if column:
            of_stages = [result.stage_idle[stage] for stage in table.stages_of_rank(rank)]
            assert sum(of_stages) == pytest.approx(result.idle[rank])
    whole = 1 - sum(result.busy) / (table.num_ranks * result.makespan) if result.makespan else 0
    assert result.bubble_ratio == pytest.approx(whole)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_critical_path_has_no_gaps(seed):
    random = Random(seed)
    table = random_table(random).with_communication() if seed % 2 else random_table(random)
    costs = replace(random_costs(table.stages, random), reduce_grad=random.uniform(0, 3))
    result = simulate(table, costs)
    steps, spans = result.critical_path, times(result)
    assert steps[0].start == 0
    assert steps[-1].end == result.makespan == makespan(table, costs)
    assert (steps[0].reason, steps[0].transfer) == (Reason.START, 0)
    for before, after in pairwise(steps):
        assert before.end + after.transfer == after.start
        assert (before.rank == after.rank) == (after.reason is Reason.RANK)
        assert after.reason is Reason.DATA or after.transfer == 0
    assert sum(step.end - step.start + step.transfer for step in steps) == pytest.approx(result.makespan)
    assert all(spans[str(step.action)] == (step.start, step.end) for step in steps)
    assert all(step.action in table.columns[step.rank] for step in steps)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_held_at_most(seed):
    """Counted at every moment anew, instead of along the columns."""
    random = Random(seed)
    table = random_table(random)
    costs = replace(random_costs(table.stages, random), forward=1, input_backward=1, weight_backward=1)
    result = simulate(table, costs)
    spans = times(result)
    lives = [
        (stage, spans[f"{stage}F{index}"][0], (spans.get(f"{stage}B{index}") or spans[f"{stage}W{index}"])[1])
        for stage in range(table.stages)
        for index in range(table.microbatches)
    ]

    def live(stage: int, moment: float) -> int:
        return sum(stage == owner and start <= moment < end for owner, start, end in lives)

    moments = sorted({start for _, start, _ in lives})
    for stage in range(table.stages):
        assert result.peak_activations[stage] == max(live(stage, moment) for moment in moments)
    for rank in range(table.num_ranks):
        held = {
            moment: sum(live(stage, moment) * costs.memory[stage] for stage in table.stages_of_rank(rank))
            for moment in moments
        }
        assert result.peak_memory[rank].memory == pytest.approx(max(held.values()))
        if max(held.values()):
            assert held[result.peak_memory[rank].at] == pytest.approx(max(held.values()))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_higher_cost_never_makes_it_faster(seed):
    random = Random(seed)
    table = random_table(random).with_communication()
    costs = random_costs(table.stages, random)
    makespan = simulate(table, costs).makespan
    for name in ("forward", "input_backward", "weight_backward", "transfer", "backward_transfer", "reduce_grad"):
        for index, number in enumerate(getattr(costs, name)):
            numbers = list(getattr(costs, name))
            numbers[index] = number + random.choice([0.1, 10])
            assert simulate(table, replace(costs, **{name: numbers})).makespan >= makespan


@pytest.mark.parametrize("seed", SEEDS)
def test_explicit_communication_changes_no_time(seed):
    random = Random(seed)
    table = random_table(random)
    costs = random_costs(table.stages, random)
    plain, explicit = simulate(table, costs), simulate(table.with_communication(), costs)
    assert times(explicit).items() >= times(plain).items()
    for name in ("makespan", "busy", "idle", "peak_activations", "peak_memory"):
        assert getattr(explicit, name) == getattr(plain, name)


# Deadlocks


def can_be_carried_out(table: Table) -> bool:
    try:
        TopologicalSorter(graph(table)).prepare()
    except CycleError:
        return False
    return True


def check_cycle(deadlock: Deadlock) -> None:
    """Each action of it really waits for the next one."""
    needs = data_needs(deadlock.table)
    ranks = [blocked.at.rank for blocked in deadlock.cycle]
    assert ranks[0] == min(ranks)
    assert len(set(ranks)) == len(ranks)
    for one, other in zip(deadlock.cycle, [*deadlock.cycle[1:], deadlock.cycle[0]], strict=True):
        assert one.needs.action in needs[one.at.action]
        assert one.needs.rank == other.at.rank
        assert one.needs.position >= other.at.position
        for place in one:
            assert deadlock.table.columns[place.rank][place.position] == place.action


@pytest.mark.parametrize("explicit", [False, True])
def test_every_deadlock_is_found_and_no_other(explicit):
    outcomes = []
    for seed in range(300):
        random = Random(seed)
        table = random_table(random)
        table = shuffled(table.with_communication() if explicit else table, random)
        costs = random_costs(table.stages, random)
        deadlock = find_deadlock(table)
        assert (deadlock is None) == can_be_carried_out(table), table
        outcomes.append(deadlock is None)
        if deadlock is None:
            assert times(simulate(table, costs)) == second_opinion(table, costs)
        else:
            check_cycle(deadlock)
            with pytest.raises(ScheduleDeadlock) as caught:
                simulate(table, costs)
            assert caught.value.deadlock == deadlock
    assert min(outcomes.count(True), outcomes.count(False)) > 30


def drawing(text: str) -> str:
    table = read(text)
    with pytest.raises(ScheduleDeadlock) as caught:
        simulate(table, Costs.uniform(table.stages))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value) == str(find_deadlock(table))
    return str(caught.value)


def test_a_deadlock_is_drawn():
    text = """
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
    """
    assert (
        drawing(text)
        == """\
deadlock: these actions wait for each other
  rank 0: 0B0 waits for 1B0 (rank 1), which has not come
  rank 1: 1B0 comes after 1F1 in its column
  rank 1: 1F1 waits for 0F1 (rank 0)
  rank 0: 0F1 comes after 0B0 in its column

  rank 0 |  0F0  [0B0] [0F1]  0B1
  rank 1 |  1F0  [1F1] [1B0]  1B1

One of the actions that come after another has to come before it."""
    )


def test_a_rank_that_waits_for_the_next_action_of_another_takes_one_line():
    text = """
        0F0 3F0 0B0 3B0
        1F0 1B0
        2F0 2B0
    """
    assert (
        drawing(text)
        == """\
deadlock: these actions wait for each other
  rank 0: 0B0 waits for 1B0 (rank 1), which has not come
  rank 1: 1B0 waits for 2B0 (rank 2)
  rank 2: 2B0 waits for 3B0 (rank 0)
  rank 0: 3B0 comes after 0B0 in its column

  rank 0 |  0F0   3F0  [0B0] [3B0]
  rank 1 |  1F0  [1B0]
  rank 2 |  2F0  [2B0]

One of the actions that come after another has to come before it."""
    )


def test_a_column_that_is_out_of_order_waits_for_itself():
    text = """
        0F0 0F1 0B0 0B1
        1F0 1B0 1B1 1F1
    """
    assert (
        drawing(text)
        == """\
deadlock: these actions wait for each other
  rank 1: 1B1 waits for 1F1 (rank 1), which has not come
  rank 1: 1F1 comes after 1B1 in its column

  rank 0 |  0F0   0F1   0B0   0B1
  rank 1 |  1F0   1B0  [1B1] [1F1]

One of the actions that come after another has to come before it."""
    )


def test_only_the_surroundings_are_drawn_of_a_wide_table():
    table = one_f_one_b(16, 64)
    columns = [list(column) for column in table.columns]
    assert [str(action) for action in columns[5][60:63]] == ["5F35", "5B25", "5F36"]
    columns[5].insert(60, columns[5].pop(100))
    deadlock = find_deadlock(replace(table, columns=tuple(map(tuple, columns))))
    assert (
        str(deadlock)
        == """\
deadlock: these actions wait for each other
  rank 4: 4B25 waits for 5B25 (rank 5), which has not come
  rank 5: 5B25 comes after 5F55 in its column
  rank 5: 5F55 waits for 4F55 (rank 4)
  rank 4: 4F55 comes after 4B25 in its column

  rank 4 | (60 more)  4B24   4F36  [4B25]  4F37   4B26  (32 more)  4F54   4B43  [4F55]  4B44   4F56  (26 more)
  rank 5 | (58 more)  5F34   5B24  [5F55]  5F35  [5B25]  5F36   5B26  (63 more)
  (14 more ranks)

One of the actions that come after another has to come before it."""
    )


def test_sends_and_receives_can_wait_for_each_other_too():
    text = """
        0F0 0RECV_B0 0SEND_F0 0B0 0REDUCE_GRAD
        1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD
    """
    assert (
        drawing(text)
        == """\
deadlock: these actions wait for each other
  rank 0: 0RECV_B0 waits for 1SEND_B0 (rank 1), which has not come
  rank 1: 1SEND_B0 comes after 1RECV_F0 in its column
  rank 1: 1RECV_F0 waits for 0SEND_F0 (rank 0)
  rank 0: 0SEND_F0 comes after 0RECV_B0 in its column

  rank 0 |  0F0           [0RECV_B0]     [0SEND_F0]      0B0            0REDUCE_GRAD
  rank 1 | [1RECV_F0]      1F0            1B0           [1SEND_B0]      1REDUCE_GRAD

One of the actions that come after another has to come before it."""
    )


# What is refused


def refusal(text: str) -> str:
    table = read(text)
    with pytest.raises(InvalidCall) as caught:
        find_deadlock(table)
    with pytest.raises(InvalidCall) as again:
        simulate(table, Costs.uniform(table.stages))
    assert str(again.value) == str(caught.value)
    assert type(caught.value) is InvalidCall
    return str(caught.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            "0F0 0B0 | 1B0",
            "rank 1 has 1B0, which needs 1F0, and no column has it. Add it to the column of rank 1, or take 1B0 out.",
        ),
        (
            "0B0 | 1F0 1B0",
            "rank 0 has 0B0, which needs 0F0, and no column has it. Add it to the column of rank 0, or take 0B0 out.",
        ),
        ("0F0 0B0 | 1F0", "rank 0 has 0B0, which needs 1B0 or 1I0, and no column has it."),
        ("0F0 0B0 | 2F0 2B0", "rank 0 has 0B0, which needs 1B0 or 1I0, and no column has it. Add it to a column, or"),
        ("0F0 0W0", "rank 0 has 0W0, which needs 0I0, and no column has it."),
        ("0F0 | 1RECV_F0 1F0", "rank 1 has 1RECV_F0, which needs 0SEND_F0, and no column has it."),
        ("0F0 0SEND_F0 | 1F0", "rank 1 has 1F0, which needs 1RECV_F0, and no column has it."),
        ("0RECV_B0 | 1SEND_B0", "rank 1 has 1SEND_B0, which needs 1B0 or 1I0, and no column has it."),
        ("0F0 0SEND_F0 0F0", "rank 0 has 0SEND_F0, but there is no stage beyond stage 0. Take it out."),
        ("0F0 | 1RECV_B0", "rank 1 has 1RECV_B0, but there is no stage beyond stage 1. Take it out."),
        ("0F0 0F1 0F0", "rank 0 has 0F0 after 0F0: a step does that once. Take one of them out."),
        ("0F0 0I0 0B0", "rank 0 has 0B0 after 0I0: a step does that once. Take one of them out."),
        ("0F0 | 1F0 0B0", "stage 0 is on rank 0 and, with 0B0, on rank 1. Put all its actions into one column."),
    ],
)
def test_a_table_that_is_not_whole(columns, message):
    assert refusal(columns.replace("|", "\n")).startswith(message)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_needed_and_missing_is_named(seed):
    random = Random(seed)
    table = random_table(random).with_communication()
    needless = {Kind.W, Kind.REDUCE_GRAD}
    needed = [action for column in table.columns for action in column if action.kind not in needless]
    gone = random.choice([action for action in needed if action.kind is not Kind.B or action.stage > 0])
    columns = tuple(tuple(action for action in column if action != gone) for column in table.columns)
    with pytest.raises(InvalidCall) as caught:
        find_deadlock(replace(table, columns=columns))
    assert type(caught.value) is InvalidCall
    assert str(gone) in str(caught.value).partition("which needs")[2].partition("and no column")[0]


@pytest.mark.parametrize(
    "action", [Action(2, Kind.F, 0), Action(0, Kind.F, 2), Action(-1, Kind.F, 0), Action(0, Kind.F)]
)
def test_actions_outside_the_table(action):
    with pytest.raises(InvalidCall) as caught:
        find_deadlock(Table("test", 2, 2, ((action,),)))
    assert str(caught.value).startswith(f"rank 0 has {action}, but the table has 2 stages and 2 microbatches")


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"stages": 0}, "costs of 0 stages: give at least 1."),
        ({"forward": [1, 2]}, "forward has length 2, but the number of stages is 3: give 3 numbers, or one for all."),
        (
            {"transfer": [1, 2, 3]},
            "transfer has length 3, but the number of links is 2: give 2 numbers, or one for all.",
        ),
        ({"backward_transfer": []}, "backward_transfer has length 0, but the number of links is 2: give 2 numbers, or"),
        ({"weight_backward": -1}, "weight_backward = -1: give a finite number that is not negative."),
        (
            {"input_backward": [0, nan, 1]},
            "input_backward of stage 1 = nan: give a finite number that is not negative.",
        ),
        ({"reduce_grad": inf}, "reduce_grad = inf: give a finite number that is not negative."),
        ({"memory": [1, 1, "1"]}, "memory of stage 2 = '1': give a finite number that is not negative."),
        ({"memory": "123"}, "memory = '123': give one number, or 3 of them, one a stage."),
        ({"transfer": None}, "transfer = None: give one number, or 2 of them, one a link."),
    ],
)
def test_costs_that_are_none(costs, message):
    fields = {"stages": 3, "forward": 1, "input_backward": 1, "weight_backward": 1}
    with pytest.raises(InvalidCall) as caught:
        Costs(**fields | costs)
    assert str(caught.value).startswith(message)


def test_costs_of_other_stages():
    with pytest.raises(InvalidCall) as caught:
        simulate(gpipe(2, 2), Costs.uniform(3))
    assert str(caught.value) == ("the costs are of 3 stages, but the table of gpipe has 2. Give costs of 2 stages.")


def test_one_number_stands_for_all():
    costs = Costs(3, 1, numpy.float32(2), [1, 2, 3], transfer=numpy.array([1, 2]))
    assert costs == Costs(3, [1, 1, 1], [2, 2, 2], (1, 2, 3), transfer=[1, 2], backward_transfer=[1, 2], memory=1)
    assert Costs.uniform(2, 1, 2, 3, 4) == Costs(2, [1, 1], [2, 2], [3, 3], [4], [4])


# Speed


def test_time_grows_with_the_actions_and_not_faster():
    def seconds_per_action(stages: int, microbatches: int, turns: int) -> float:
        table, costs, spans = one_f_one_b(stages, microbatches), Costs.uniform(stages), []
        for _ in range(turns):
            begin = time.process_time()
            simulate(table, costs)
            spans.append(time.process_time() - begin)
        return min(spans) / (2 * stages * microbatches)

    assert seconds_per_action(64, 1024, turns=2) <= 3 * seconds_per_action(8, 256, turns=5)
