"""What one pipeline rank does in a step, derived once from the schedule's table. No state, no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from monitoring.events.events import NO_MICROBATCH, What
from parallel3d.pipeline.schedules.actions import COMPUTE, RECEIVES, Action, Kind, receive_of, send_of
from parallel3d.pipeline.schedules.table import Column, Table
from parallel3d.pipeline.simulation import ScheduleDeadlock, find_deadlock
from runtime.errors import InvalidCall

_NOT_FORWARD = frozenset((Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD))


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's column of a table, with everything about it that stays the same from step to step."""

    table: Table
    """The whole pipeline's, with communication."""
    actions: Column
    """This rank's, in order."""
    num_forward: int
    """Actions before the first backward."""
    peers: tuple[int, ...]
    """Pipeline ranks that this rank sends to or receives from."""
    incoming: Mapping[int, tuple[Action, ...]]
    """By peer: the receives that its messages are for, in the order in which they arrive."""
    other_ends: Mapping[Action, tuple[int, Action]]
    """By send or receive: the peer, and the matching receive or send there."""
    last_backwards: frozenset[Action]
    """Each stage's last B or W."""
    mergeable: Mapping[int, frozenset[int]]
    """By stage: microbatches whose weight gradients may be added together with those of later ones."""
    loss_sends: frozenset[Action]
    """Sends, on any rank, that carry the loss from the last stage towards the first: each stage's last gradients. By
    then the last stage has all losses, and every other stage has received them."""
    events: tuple[tuple[int, int, int], ...]
    """By action: kind, stage and microbatch as an event stores them."""
    has_cpu_time: tuple[bool, ...]
    """By action: whether its event has seconds of the processor."""
    reads_cpu_clock: tuple[bool, ...]
    """By action: whether the processor's clock is read after it, because it or the next action computes."""

    @property
    def is_forward_only(self) -> bool:
        return self.num_forward == len(self.actions)


def rank_program(table: Table, stages: Collection[int], rank: int) -> RankProgram:
    """The program of a pipeline rank. Raises ScheduleDeadlock for a table that never ends, and InvalidCall if `stages`
    are not those that the table gives to the rank."""
    table = table.with_communication()
    if (deadlock := find_deadlock(table)) is not None:
        raise ScheduleDeadlock(deadlock)
    if set(stages) != set(table.stages_of_rank(rank)):
        raise InvalidCall(
            f"pipeline rank {rank} has the stages {list(table.stages_of_rank(rank))}, but modules for "
            f"{sorted(stages)} are given."
        )
    actions, others = table.columns[rank], [each for each in range(table.num_ranks) if each != rank]
    incoming = {peer: _receives(table, table.columns[peer], rank) for peer in others}
    computes = [action.kind in COMPUTE for action in actions]
    return RankProgram(
        table=table,
        actions=actions,
        num_forward=next((at for at, each in enumerate(actions) if each.kind in _NOT_FORWARD), len(actions)),
        peers=tuple(peer for peer in others if incoming[peer] or _receives(table, actions, peer)),
        incoming=incoming,
        other_ends={each: end for each in actions if (end := _other_end(table, each)) is not None},
        last_backwards=frozenset(_last_of_stages(actions, Kind.B, Kind.W)),
        mergeable={stage: _mergeable(actions, stage) for stage in stages},
        loss_sends=frozenset(_last_of_stages([each for column in table.columns for each in column], Kind.SEND_B)),
        events=tuple(_event(action) for action in actions),
        has_cpu_time=tuple(action.kind in COMPUTE | RECEIVES for action in actions),
        reads_cpu_clock=tuple(any(near) for near in zip(computes, [*computes[1:], True], strict=True)),
    )


def microbatch_of(action: Action) -> int:
    """The microbatch of an action that has one."""
    assert action.microbatch is not None
    return action.microbatch


def _receives(table: Table, column: Sequence[Action], rank: int) -> tuple[Action, ...]:
    """The receives on `rank` that match a column's sends, in order."""
    receives = (receive for action in column if (receive := receive_of(action)) is not None)
    return tuple(receive for receive in receives if table.rank_of_stage[receive.stage] == rank)


def _other_end(table: Table, action: Action) -> tuple[int, Action] | None:
    other = receive_of(action) or send_of(action)
    return None if other is None else (table.rank_of_stage[other.stage], other)


def _last_of_stages(actions: Sequence[Action], *kinds: Kind) -> Collection[Action]:
    return {action.stage: action for action in actions if action.kind in kinds}.values()


def _mergeable(actions: Sequence[Action], stage: int) -> frozenset[int]:
    """All but the last two: the end of the step waits for the last one, so it must find only its own part to do."""
    order = [microbatch_of(each) for each in actions if each.stage == stage and each.kind in (Kind.B, Kind.W)]
    return frozenset(order[:-2])


def _event(action: Action) -> tuple[int, int, int]:
    microbatch = NO_MICROBATCH if action.microbatch is None else action.microbatch
    return What[action.kind].value, action.stage, microbatch
