"""How long a step would take with another pipeline, simulated from the measured times of the stages.

    predicted = measured step - simulated current pipeline + simulated other pipeline

So time outside the pipeline, or unknown to the simulator, stays as measured. No torch.
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

_LEAST = 1e-9  # seconds: a prediction is above zero
Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StageRows:
    """Seconds of a step, all microbatches together, for each stage or for each layer."""

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
    """A run's pipeline as configured."""

    schedule: str
    pp: int
    microbatches: int
    virtual_stages: int = 1
    layers_per_stage: tuple[int, ...] = ()
    """Empty where only the ranks know it."""
    layers_are_alike: bool = False
    """Whether all layers cost the same, except that the first and last also hold the model's ends. If not, the time of
    a stage is divided evenly over its layers."""

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
        """A plan from measured steps; None where the window lacks times of a stage."""
        table = self.table(self.schedule, self.microbatches, None if is_csv(self.schedule) else self.virtual_stages)
        if table is None or window.seconds <= 0:
            return None
        rows = _stage_rows(window, table)
        return None if rows is None else PipelinePlan(self, table, rows, window)

    def table(self, schedule: str, microbatches: int, virtual_stages: int | None) -> Table | None:
        """None where the schedule has no table of these sizes."""
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
    """Mean time of each stage over the ranks that have it, tensor-parallel communication included."""
    rows: list[tuple[float, float, float]] = []
    for stage in range(table.stages):
        found = [(_tp_factor(rank), rank.stages[stage]) for rank in window.ranks.values() if stage in rank.stages]
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
    if not table.splits_backward:  # counted as half input gradients, half weight gradients
        backward = weight = tuple((whole + part) / 2 for whole, part in zip(backward, weight, strict=True))
    return StageRows(forward, backward, weight)


def _tp_factor(rank: RankWindow) -> float:
    """Compute time with tensor-parallel communication over compute time alone."""
    return 1 + rank.parts["tp_comm"] / rank.compute_wall if rank.compute_wall > 0 else 1.0


@dataclass(frozen=True)
class PipelinePlan:
    """Predictions from one window of measured steps."""

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
        """Step time of the same batch with these changes; None where unknown. Microbatches of any number cost the same
        in total."""
        if schedule is None and virtual_stages is None:
            virtual_stages = self.table.stages // self.planner.pp
        table = self.planner.table(
            schedule or self.planner.schedule, microbatches or self.table.microbatches, virtual_stages
        )
        rows = None if table is None else self._rows_of(table, layers_per_stage)
        return None if table is None or rows is None else self._predict(table, rows)

    def balanced_seconds(self) -> float | None:
        """Step time if all stages took equally long."""
        even = StageRows(*((fmean(row),) * len(row) for row in self.rows.each()))
        return self._predict(self.table, even)

    def best_layers(self) -> tuple[int, ...] | None:
        """The layers per stage that minimize the compute time of the slowest pipeline rank."""
        layers = self._layer_rows
        if layers is None:
            return None
        ranks = self.table.rank_of_stage if self.table.stages > self.planner.pp else None
        return best_cut(summed(layers.totals), self.table.stages, ranks)

    def _rows_of(self, table: Table, layers_per_stage: Sequence[int] | None) -> StageRows | None:
        """Times of the table's stages; None where they hold other layers whose times are unknown."""
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
        """Time of each layer; None where the layers of stages are unknown."""
        cut = self.planner.layers_per_stage
        if len(cut) != self.table.stages:
            return None
        divide = _with_ends if self.planner.layers_are_alike else _evenly
        return StageRows(*(divide(row, cut) for row in self.rows.each()))

    def _predict(self, table: Table, rows: StageRows) -> float:
        return max(_LEAST, self.window.seconds - self._simulated_now + self._simulated(table, rows))

    @cached_property
    def _simulated_now(self) -> float:
        return self._simulated(self.table, self.rows)

    def _simulated(self, table: Table, rows: StageRows) -> float:
        forward, backward, weight = (tuple(each / table.microbatches for each in row) for row in rows.each())
        return makespan(table, Costs(table.stages, forward, backward, weight, self._transfer(table)))

    def _transfer(self, table: Table) -> float:
        """Seconds of one message, in proportion to its size."""
        links = sum(self.table.crosses_ranks(stage) for stage in range(self.table.stages))
        messages = 2 * links * self.table.microbatches
        pipelines = len(self.window.ranks) / self.planner.pp
        seconds = sum(rank.parts["pp_comm"] for rank in self.window.ranks.values()) / pipelines
        return seconds / messages * self.table.microbatches / table.microbatches if messages else 0.0


def _evenly(row: Row, cut: Cut) -> Row:
    """A stage's time divided evenly over its layers."""
    return tuple(seconds / number for seconds, number in zip(row, cut, strict=True) for _ in range(number))


def _with_ends(row: Row, cut: Cut) -> Row:
    """As `_evenly`, with what the first and last stage take more than other layers given to the model's ends."""
    layers = list(_evenly(row, cut))
    least = min(layers)
    for stage, end in ((0, 0), (len(cut) - 1, len(layers) - 1)):
        first, stop = bounds(cut)[stage]
        layers[first:stop] = [least] * (stop - first)
        layers[end] = row[stage] - least * (stop - first - 1)
    return tuple(layers)
