"""A table laid out in time: the step of each action if every action takes one step and transfers take none."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.pipeline.schedules.actions import BACKWARD_FIRST, Action, Kind
from parallel3d.pipeline.schedules.table import Table
from runtime.errors import InvalidCall

Row = tuple[Action | None, ...]
"""A rank's action in each step; None where it waits."""


def in_steps(table: Table) -> tuple[Row, ...]:
    """One row per rank, up to its last action. Each action runs as early as its rank's order and its inputs allow."""
    columns = table.compute_only().columns
    rows: tuple[list[Action | None], ...] = tuple([] for _ in columns)
    next_step: dict[Action, int] = {}  # the first step in which the action's output can be used
    begun = [0] * len(columns)
    moved = True
    while moved:
        moved = False
        for rank, column in enumerate(columns):
            while begun[rank] < len(column):
                action = column[begun[rank]]
                inputs = [_first_known(needed, next_step) for needed in _inputs(action, table.stages)]
                if None in inputs:
                    break
                idle = max([0, *(step - len(rows[rank]) for step in inputs if step is not None)])
                rows[rank].extend([*[None] * idle, action])
                next_step[action] = len(rows[rank])
                begun[rank] += 1
                moved = True
    waiting = [f"rank {r} waits at {columns[r][n]}" for r, n in enumerate(begun) if n < len(columns[r])]
    if waiting:
        raise InvalidCall(f"{table.schedule} never ends: {', '.join(waiting)}. Put first what these wait for.")
    return tuple(tuple(row) for row in rows)


def _inputs(action: Action, stages: int) -> Iterator[tuple[Action, ...]]:
    """The actions that an action depends on; each tuple lists alternatives."""
    stage, kind, microbatch = action
    if kind is Kind.F and stage > 0:
        yield (Action(stage - 1, Kind.F, microbatch),)
    if kind in BACKWARD_FIRST:
        yield (Action(stage, Kind.F, microbatch),)
        if stage + 1 < stages:
            yield tuple(Action(stage + 1, backward, microbatch) for backward in (Kind.B, Kind.I))
    if kind is Kind.W:
        yield (Action(stage, Kind.I, microbatch),)


def _first_known(needed: tuple[Action, ...], steps: dict[Action, int]) -> int | None:
    return next((steps[action] for action in needed if action in steps), None)
