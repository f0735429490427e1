"""Columns of V-shaped schedules, written as phases: a few actions and how often they are repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from parallel3d.pipeline.schedules.actions import BACKWARD_FIRST, Action, Kind
from parallel3d.pipeline.schedules.table import Column

Phase = tuple[int, str]
"""(repetitions, actions), for example `(3, "0F 1I W")`. 0 and 1 are the rank's first and second stage. A W without a
stage runs the oldest pending weight part of either stage."""


def number_microbatches(rank: int, ranks: int, phases: Iterable[Phase]) -> Column:
    """Expand phases into a column. Each stage takes its microbatches in order, so they are numbered by counting."""
    return tuple(_numbered((rank, 2 * ranks - 1 - rank), phases))


def _numbered(stages: tuple[int, int], phases: Iterable[Phase]) -> Iterator[Action]:
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    open_weights: list[Action] = []
    for word in (word for count, words in phases for _ in range(count) for word in words.split()):
        kind = Kind(word[-1])
        if kind is Kind.W:
            wanted = stages if word == "W" else (stages[int(word[0])],)
            oldest = next(action for action in open_weights if action.stage in wanted)
            open_weights.remove(oldest)
            yield oldest
            continue
        stage, counter = stages[int(word[0])], backwards if kind in BACKWARD_FIRST else forwards
        yield Action(stage, kind, counter[stage])
        if kind is Kind.I:
            open_weights.append(Action(stage, Kind.W, counter[stage]))
        counter[stage] += 1
