"""The table of a run's pipeline, or the key that is at fault where there is none. No torch."""

from __future__ import annotations

from parallel3d.config.errors import problem_of_key
from parallel3d.config.sections import RunConfig
from parallel3d.pipeline.schedules.build import OtherSize, build
from parallel3d.pipeline.schedules.limits import is_csv
from parallel3d.pipeline.schedules.table import Table

_KEYS = {"ranks": "parallel.pp", "microbatches": "pipeline.microbatches"}


def configured_table(config: RunConfig) -> Table:
    """Compute actions only, and not proved free of deadlock. Raises ConfigError where a file's table has other sizes,
    and InvalidCall where there is no table at all."""
    pipeline = config.pipeline
    virtual_stages = None if is_csv(pipeline.schedule) else pipeline.virtual_stages
    try:
        return build(pipeline.schedule, config.parallel.pp, pipeline.microbatches, virtual_stages)
    except OtherSize as error:
        remedy = f"Set it to {error.found}, or name another table."
        raise problem_of_key(_KEYS[error.size], error.wanted, error.problem, remedy) from error
