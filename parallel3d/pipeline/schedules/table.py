"""A schedule's table: each rank's actions in order. The same table is printed, checked, simulated and executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from parallel3d.pipeline.schedules.actions import BACKWARD_FIRST, Action, Kind

Column = tuple[Action, ...]
"""One rank's actions."""


@dataclass(frozen=True)
class Table:
    """One column per rank. `stages` includes virtual stages; each stage belongs to one rank."""

    schedule: str
    """The schedule's name, as users write it."""
    stages: int
    microbatches: int
    columns: tuple[Column, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.columns)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        owners = {action.stage: rank for rank, column in enumerate(self.columns) for action in column}
        return tuple(owners[stage] for stage in range(self.stages))

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into input and weight parts."""
        return any(action.kind is Kind.W for column in self.columns for action in column)

    @property
    def has_backwards(self) -> bool:
        return any(action.kind in BACKWARD_FIRST for column in self.columns for action in column)

    def compute_only(self) -> Table:
        """Without sends, receives and reductions."""
        columns = tuple(tuple(action for action in column if action.is_compute) for column in self.columns)
        return Table(self.schedule, self.stages, self.microbatches, columns)

    def forward_only(self) -> Table:
        """Without any backward, as for an evaluation."""
        columns = tuple(tuple(action for action in column if action.kind is Kind.F) for column in self.columns)
        return Table(self.schedule, self.stages, self.microbatches, columns)

    def crosses_ranks(self, stage: int) -> bool:
        """Whether the next stage is on a different rank."""
        return stage + 1 < self.stages and self.rank_of_stage[stage] != self.rank_of_stage[stage + 1]

    def with_communication(self) -> Table:
        """Add receives before the actions that need them, sends after those that produce the data, and a reduction
        after each stage's last backward. Stages of the same rank exchange data without communication."""
        columns = tuple(tuple(self._communicating(column)) for column in self.compute_only().columns)
        return Table(self.schedule, self.stages, self.microbatches, columns)

    def _communicating(self, column: Sequence[Action]) -> Iterator[Action]:
        last = {action.stage: index for index, action in enumerate(column) if action.kind is not Kind.F}
        for index, (stage, kind, microbatch) in enumerate(column):
            if kind is Kind.F and stage > 0 and self.crosses_ranks(stage - 1):
                yield Action(stage, Kind.RECV_F, microbatch)
            if kind in BACKWARD_FIRST and self.crosses_ranks(stage):
                yield Action(stage, Kind.RECV_B, microbatch)
            yield column[index]
            if kind is Kind.F and self.crosses_ranks(stage):
                yield Action(stage, Kind.SEND_F, microbatch)
            if kind in BACKWARD_FIRST and stage > 0 and self.crosses_ranks(stage - 1):
                yield Action(stage, Kind.SEND_B, microbatch)
            if last.get(stage) == index:
                yield Action(stage, Kind.REDUCE_GRAD)
