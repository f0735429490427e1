"""Windows of steps as rules see them, made up: healthy ones, and the same with a cause in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from monitoring.analysis.facts import Place, RankFacts, RunFacts
from monitoring.analysis.observations import RankWindow, StageSeconds, Straggler, Window
from monitoring.events.time_parts import TimeParts, mean_of
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.simulation import Costs, simulate

STEP = 0.1
HEALTHY = {"compute": 0.085, "optimizer": 0.010, "other": 0.005}
"""Seconds of a step."""


def mesh(dp: int = 1, tp: int = 1, pp: int = 1, **known: Any) -> RunFacts:
    """A run's facts; `ranks_of` gives its ranks'."""
    given = {"memory_budget": 8 << 30, "batch_size": 16 * dp, "microbatches": 8 if pp > 1 else 1}
    return RunFacts(world_size=dp * tp * pp, dp=dp, tp=tp, pp=pp, **{**given, **known})


def ranks_of(facts: RunFacts, *, num_cores: int = 64, hosts: int = 1, order: str = "dp-tp-pp") -> dict[int, RankFacts]:
    """In the order of their numbers, the same number of them on each host."""
    sizes = {axis: getattr(facts, axis) for axis in order.split("-")}
    found = {}
    for rank in range(facts.world_size):
        coords, rest = {}, rank
        for axis in reversed(sizes):
            rest, coords[axis] = divmod(rest, sizes[axis])
        host = f"node{rank * hosts // facts.world_size}"
        found[rank] = RankFacts(rank, Place(**coords), host, num_cores=num_cores, parameters=1 << 20)
    return found


def rank_window(rank: int, seconds: Mapping[str, float] | None = None, **known: Any) -> RankWindow:
    """With parts that are given as seconds, the rest of the healthy step is computing."""
    known_parts = {part: HEALTHY[part] for part in ("optimizer", "other")} | dict(seconds or {})
    parts = TimeParts.of({"compute": STEP - sum(known_parts.values()), **known_parts})
    given = {
        "seconds": parts.total,
        "parts": parts,
        "remainder": 0.0,
        "compute_wall": parts["compute"],
        "compute_cpu": parts["compute"],
        "core_wait": 0.0,
        "bubble_ratio": 0.0,
        "score": 1.0,
        "memory": 1 << 30,
    }
    return RankWindow(rank, **{**given, **known})


def window_of(*ranks: RankWindow, **known: Any) -> Window:
    parts = mean_of([rank.parts for rank in ranks])
    given = {"num_steps": 20, "first_step": 2, "last_step": 21, "seconds": parts.total}
    return Window(ranks={rank.rank: rank for rank in ranks}, parts=parts, **{**given, **known})


def alike(facts: RunFacts, seconds: Mapping[str, float] | None = None, **known: Any) -> Window:
    """All ranks of a mesh without a pipeline have this step."""
    return window_of(*(rank_window(rank, seconds) for rank in range(facts.world_size)), **known)


def piped(facts: RunFacts, stages: list[float], *, slower: Mapping[int, float] | None = None) -> Window:
    """A window whose pipelines took what the simulator says, if a stage computes so long in a step, a third of it
    forward; 0.01 s of the step are the optimizer. `slower` are ranks that take so many times as long."""
    ranks = []
    for place in ranks_of(facts).values():
        mine = [number for number, each in ranks_of(facts).items() if each.place[:2] == place.place[:2]]
        factors = [(slower or {}).get(mine[stage % facts.pp], 1.0) for stage in range(len(stages))]
        took = [seconds * factor for seconds, factor in zip(stages, factors, strict=True)]
        table = build(facts.schedule, facts.pp, facts.microbatches, facts.virtual_stages)
        each = [seconds / 3 / facts.microbatches for seconds in took]
        result = simulate(table, Costs(len(stages), each, each, each))
        own = table.stages_of_rank(place.place.pp)
        ranks.append(_piped_rank(place.rank, result.makespan, {stage: took[stage] for stage in own}))
    return window_of(*ranks)


def _piped_rank(rank: int, makespan: float, stages: Mapping[int, float]) -> RankWindow:
    busy = sum(stages.values())
    parts = TimeParts.of({"compute": busy, "bubble": makespan - busy, "optimizer": 0.01})
    return replace(
        rank_window(rank),
        seconds=parts.total,
        parts=parts,
        compute_wall=busy,
        compute_cpu=busy,
        bubble_ratio=(makespan - busy) / makespan,
        stages={stage: StageSeconds(seconds / 3, 2 * seconds / 3) for stage, seconds in stages.items()},
    )


def idling(window: Window, ratio: float) -> Window:
    """The same, but with as much waiting for other stages as this part of the pipeline's time."""
    ranks = []
    for rank in window.ranks.values():
        bubble = rank.compute_wall * ratio / (1 - ratio)
        parts = TimeParts.of({**rank.parts.to_json(), "bubble": bubble})
        ranks.append(replace(rank, seconds=parts.total, parts=parts, bubble_ratio=ratio))
    return window_of(*ranks)


def straggler(rank: int, score: float = 0.5, compared_with: str = "peers", host: str | None = None) -> Straggler:
    return Straggler(rank, score, compared_with, since_step=2, host=host)
