"""What a run will be, before any rank has weights: its model's layers, its pipeline's table, its shards.

Loads torch only in `draw`: `parallel3d simulate` needs just the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel3d.config.errors import problem_of_key
from parallel3d.config.sections import RunConfig
from parallel3d.pipeline.schedules.build import OtherSize, build
from parallel3d.pipeline.schedules.limits import is_csv
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation import ScheduleDeadlock, find_deadlock

if TYPE_CHECKING:
    from parallel3d.models.layered import LayeredModel
    from parallel3d.tensor.shards import Shards

_KEYS = {"ranks": "parallel.pp", "microbatches": "pipeline.microbatches"}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A run's model without memory, and how it is cut over pipeline and tensor-parallel ranks."""

    model: LayeredModel
    table: Table
    """Compute actions only."""
    layers_per_stage: tuple[int, ...]
    shards: Shards


def draw(config: RunConfig, layers_per_stage: Sequence[int] | None = None) -> Blueprint:
    """The blueprint. Raises ConfigError or InvalidCall where the run cannot be built.

    layers_per_stage: as measured for `profile`; None cuts by the configuration, and `profile` as `even`.
    """
    from parallel3d.models.build import build_model  # torch takes seconds
    from parallel3d.tensor.shards import plan_shards

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
    """The pipeline's table, proved free of deadlock."""
    table = configured_table(config)
    deadlock = find_deadlock(table) or find_deadlock(table.with_communication())
    if deadlock is not None:
        raise ScheduleDeadlock(deadlock)
    return table


def configured_table(config: RunConfig) -> Table:
    """The pipeline's table, compute actions only, not checked for deadlock.

    Raises ConfigError for a `csv:` table of another size, and InvalidCall where there is no table.
    """
    pipeline = config.pipeline
    virtual_stages = None if is_csv(pipeline.schedule) else pipeline.virtual_stages
    try:
        return build(pipeline.schedule, config.parallel.pp, pipeline.microbatches, virtual_stages)
    except OtherSize as error:
        remedy = f"Set it to {error.found}, or name another table."
        raise problem_of_key(_KEYS[error.size], error.wanted, error.problem, remedy) from error
