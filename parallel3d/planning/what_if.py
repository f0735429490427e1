"""What a step would take with another pipeline: the simulator's answer, from what the stages took in real steps.

    predicted = measured step - simulated pipeline as it is + simulated pipeline as it would be

So what is no part of the pipeline stays as it was, and so does what the simulator knows nothing of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from monitoring.analysis.facts import RunFacts
from monitoring.analysis.observations import RankWindow, Window
from parallel3d.config.sections import GptModel, LlamaModel, RunConfig
from parallel3d.pipeline.schedules.build import build
from parallel3d.pipeline.schedules.layer_split import Cut, best_cut, bounds, even_cut, summed
from parallel3d.pipeline.schedules.limits import is_csv
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation import Costs, makespan
from runtime.errors import InvalidCall

_LEAST = 1e-9  # seconds: a prediction is above zero, whatever was measured
Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StageRows:
    """Seconds of a step, all microbatches together: a number for each stage, or for each layer."""

    forward: Row
    input_backward: Row
    weight_backward: Row

    @property
    def totals(self) -> Row:
        return tuple(map(sum, zip(self.forward, self.input_backward, self.weight_backward, strict=True)))

    def each(self) -> tuple[Row, Row, Row]:
        return self.forward, self.input_backward, self.weight_backward


@dataclass(frozen=True, slots=True)
class PipelinePlanner:
    """A run's pipeline as it was configured."""

    schedule: str
    pp: int
    microbatches: int
    virtual_stages: int = 1
    layers_per_stage: tuple[int, ...] = ()
    """Of each stage; empty where only the ranks know."""
    layers_are_alike: bool = False
    """All but the first and the last, which hold the model's ends too. Else nothing is known of the layers of a stage
    but what they take together."""

    @staticmethod
    def of_facts(facts: RunFacts) -> PipelinePlanner:
        return PipelinePlanner(
            facts.schedule, facts.pp, facts.microbatches, facts.virtual_stages, facts.layers_per_stage
        )

    @staticmethod
    def of_config(config: RunConfig) -> PipelinePlanner:
        pipeline, pp = config.pipeline, config.parallel.pp
        return PipelinePlanner(
            pipeline.schedule,
            pp,
            pipeline.microbatches,
            pipeline.virtual_stages,
            _layers(config),
            isinstance(config.model, GptModel | LlamaModel),
        )

    def plan(self, window: Window) -> PipelinePlan | None:
        """None where the window does not tell what each stage took."""
        table = self.table(self.schedule, self.microbatches, None if is_csv(self.schedule) else self.virtual_stages)
        if table is None or window.seconds <= 0:
            return None
        rows = _stage_rows(window, table)
        return None if rows is None else PipelinePlan(self, table, rows, window)

    def table(self, schedule: str, microbatches: int, virtual_stages: int | None) -> Table | None:
        """None where there is none of these sizes."""
        try:
            return build(schedule, self.pp, microbatches, virtual_stages)
        except (InvalidCall, OSError):
            return None


def _layers(config: RunConfig) -> tuple[int, ...]:
    how = config.pipeline.layers_per_stage
    if isinstance(how, tuple):
        return how
    if (
        how not in (None, "even")
        or not isinstance(config.model, GptModel | LlamaModel)
        or is_csv(config.pipeline.schedule)
    ):
        return ()
    return even_cut(config.model.args.layers, config.num_stages)


def _stage_rows(window: Window, table: Table) -> StageRows | None:
    """What each stage took: the mean of the ranks that have it, with their tensor-parallel exchanges."""
    rows: list[tuple[float, float, float]] = []
    for stage in range(table.stages):
        found = [(_with_exchanges(rank), rank.stages[stage]) for rank in window.ranks.values() if stage in rank.stages]
        if not found or not any(seconds.total for _, seconds in found):
            return None
        rows.append(
            (
                fmean(scale * seconds.forward for scale, seconds in found),
                fmean(scale * seconds.backward for scale, seconds in found),
                fmean(scale * seconds.weight for scale, seconds in found),
            )
        )
    forward, backward, weight = zip(*rows, strict=True)
    if not table.splits_backward:  # taken as half for the input, half for the weights
        backward = weight = tuple((whole + part) / 2 for whole, part in zip(backward, weight, strict=True))
    return StageRows(forward, backward, weight)


def _with_exchanges(rank: RankWindow) -> float:
    return 1 + rank.parts["tp_comm"] / rank.compute_wall if rank.compute_wall > 0 else 1.0


@dataclass(frozen=True)
class PipelinePlan:
    """Predictions from one window."""

    planner: PipelinePlanner
    table: Table
    rows: StageRows
    window: Window

    def step_seconds(
        self,
        *,
        schedule: str | None = None,
        microbatches: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
        virtual_stages: int | None = None,
    ) -> float | None:
        """Of the same batch: more microbatches are smaller ones, and cost as much together."""
        if schedule is None and virtual_stages is None:
            virtual_stages = self.table.stages // self.planner.pp
        table = self.planner.table(
            schedule or self.planner.schedule, microbatches or self.table.microbatches, virtual_stages
        )
        rows = None if table is None else self._rows_of(table, layers_per_stage)
        return None if table is None or rows is None else self._predict(table, rows)

    def balanced_seconds(self) -> float | None:
        """If all stages took equally long."""
        even = StageRows(*((fmean(row),) * len(row) for row in self.rows.each()))
        return self._predict(self.table, even)

    def best_layers(self) -> tuple[int, ...] | None:
        """The cut with which the slowest rank of the pipeline computes the shortest."""
        layers = self._layer_rows
        if layers is None:
            return None
        ranks = self.table.rank_of_stage if self.table.stages > self.planner.pp else None
        return best_cut(summed(layers.totals), self.table.stages, ranks)

    def _rows_of(self, table: Table, layers_per_stage: Sequence[int] | None) -> StageRows | None:
        """What the table's stages take; None where they have other layers, and what these take is not known."""
        if layers_per_stage is None and table.rank_of_stage == self.table.rank_of_stage:
            return self.rows
        layers = self._layer_rows
        if layers is None:
            return None
        try:
            cut = even_cut(len(layers.forward), table.stages) if layers_per_stage is None else tuple(layers_per_stage)
        except InvalidCall:
            return None
        if len(cut) != table.stages or sum(cut) != len(layers.forward) or min(cut) < 1:
            return None
        return StageRows(*(tuple(sum(row[first:end]) for first, end in bounds(cut)) for row in layers.each()))

    @cached_property
    def _layer_rows(self) -> StageRows | None:
        """What each layer takes."""
        cut = self.planner.layers_per_stage
        if len(cut) != self.table.stages:
            return None
        divide = _with_ends if self.planner.layers_are_alike else _evenly
        return StageRows(*(divide(row, cut) for row in self.rows.each()))

    def _predict(self, table: Table, rows: StageRows) -> float:
        return max(_LEAST, self.window.seconds - self._as_it_is + self._simulated(table, rows))

    @cached_property
    def _as_it_is(self) -> float:
        return self._simulated(self.table, self.rows)

    def _simulated(self, table: Table, rows: StageRows) -> float:
        forward, backward, weight = (tuple(each / table.microbatches for each in row) for row in rows.each())
        return makespan(table, Costs(table.stages, forward, backward, weight, self._transfer(table)))

    def _transfer(self, table: Table) -> float:
        """Of one message: as long as now, or shorter as it is smaller."""
        links = sum(self.table.crosses_ranks(stage) for stage in range(self.table.stages))
        messages = 2 * links * self.table.microbatches
        pipelines = len(self.window.ranks) / self.planner.pp
        seconds = sum(rank.parts["pp_comm"] for rank in self.window.ranks.values()) / pipelines
        return seconds / messages * self.table.microbatches / table.microbatches if messages else 0.0


def _evenly(row: Row, cut: Cut) -> Row:
    """Each layer takes its part of what its stage takes."""
    return tuple(seconds / number for seconds, number in zip(row, cut, strict=True) for _ in range(number))


def _with_ends(row: Row, cut: Cut) -> Row:
    """As above, but of the first and the last stage what is more than for other layers belongs to the model's ends."""
    layers = list(_evenly(row, cut))
    least = min(layers)
    for stage, end in ((0, 0), (len(cut) - 1, len(layers) - 1)):
        first, stop = bounds(cut)[stage]
        layers[first:stop] = [least] * (stop - first)
        layers[end] = row[stage] - least * (stop - first - 1)
    return tuple(layers)
