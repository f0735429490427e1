"""What is known of a run before any rank has weights: its model's layers, its pipeline's table, its cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.config import RunConfig
from parallel3d.models.build import build_model
from parallel3d.models.layered import LayeredModel
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation import ScheduleDeadlock, find_deadlock
from parallel3d.planning.configured_table import configured_table
from parallel3d.tensor.shards import Shards, plan_shards


@dataclass(frozen=True)
class Blueprint:
    """A run as it will be."""

    model: LayeredModel
    table: Table
    """Compute actions only."""
    layers_per_stage: tuple[int, ...]
    shards: Shards


def draw(config: RunConfig, layers_per_stage: Sequence[int] | None = None) -> Blueprint:
    """The blueprint, or an error that says what can't be built.

    layers_per_stage: where they were measured; else `profile` is drawn as `even`.
    """
    model, table = build_model(config), table_of(config)
    if layers_per_stage is None:
        how = config.pipeline.layers_per_stage
        how = "even" if how == "profile" else how
        layers_per_stage = model.cut(table.stages, how, rank_of_stage=table.rank_of_stage)
    plan = model.plan if config.parallel.tensor_plan is None else config.parallel.tensor_plan
    shards = plan_shards(
        model,
        plan,
        config.parallel.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        layers_per_stage=layers_per_stage,
    )
    return Blueprint(model, table, tuple(layers_per_stage), shards)


def table_of(config: RunConfig) -> Table:
    """The pipeline's, proved free of deadlock."""
    table = configured_table(config)
    deadlock = find_deadlock(table) or find_deadlock(table.with_communication())
    if deadlock is not None:
        raise ScheduleDeadlock(deadlock)
    return table
