"""A step as it was, beside the step as planned: times of every action, the bubble of each, and what came late first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from statistics import median
from typing import Any

from parallel3d.pipeline.schedules.actions import RECEIVES, Action, Kind, parse_actions, send_of
from parallel3d.pipeline.schedules.table import Table
from parallel3d.pipeline.simulation import Costs, Simulation, simulate
from runtime.errors import InvalidCall

Moments = tuple[tuple[float, ...], ...]
"""A column a rank, in seconds."""
_LATE = 0.1  # of the action's own planned time: what is within that is noise
_LEAST = 0.0005  # seconds that count as late


class Why(StrEnum):
    """Why an action came late."""

    LATE_RECEIVE = "late receive"
    """What it needs came late from another rank, though that rank had sent it in time."""
    SLOW_COMPUTE = "slow compute"
    """The action before it took longer than its stage's others."""
    COLLECTIVE = "waiting for a collective"
    """The action before it waited longer than its stage's others for tensor-parallel ranks."""
    HELD_UP = "held up"
    """Its rank did something else: the operating system, the event loop."""


@dataclass(frozen=True, slots=True)
class Late:
    """The first action that started later than planned: the others may be late because of it."""

    rank: int
    action: Action
    seconds: float
    why: Why
    because_of: Action
    """The receive that came late, the action that was slow, or the last one before the rank was held up."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.action} came {self.seconds * 1e3:.1f} ms late: {self.why} ({self.because_of})"

    def to_json(self) -> dict[str, Any]:
        names = {"action": str(self.action), "why": str(self.why), "because_of": str(self.because_of)}
        return {"rank": self.rank, "seconds": self.seconds, **names}


@dataclass(frozen=True)
class Measured:
    """All ranks' times of one step, in seconds from its first action."""

    table: Table
    """With communication, as it was carried out."""
    starts: Moments
    ends: Moments
    waits: Moments
    """How long of it each action waited for a collective."""
    worked_off: Moments
    """How long of each receive weight gradients were computed; 0 for all else."""

    @classmethod
    def of(cls, table: Table, times: Sequence[Sequence[Sequence[float]]]) -> Measured:
        """From (start, end, seconds waited, seconds of the processor) of each rank's actions, in the order of its
        column, on one clock. Those of a receive are what was worked off meanwhile."""
        first = min(start for column in times for start, *_ in column)
        return cls(
            table,
            tuple(tuple(start - first for start, *_ in column) for column in times),
            tuple(tuple(end - first for _, end, *_ in column) for column in times),
            tuple(tuple(waited for _, _, waited, _ in column) for column in times),
            tuple(
                tuple(cpu if action.kind in RECEIVES else 0.0 for action, (*_, cpu) in zip(*both, strict=True))
                for both in zip(table.columns, times, strict=True)
            ),
        )

    def in_milliseconds(self) -> Measured:
        """The same step in another unit."""
        starts, ends, waits, worked_off = (
            tuple(tuple(1e3 * moment for moment in column) for column in each)
            for each in (self.starts, self.ends, self.waits, self.worked_off)
        )
        return Measured(self.table, starts, ends, waits, worked_off)

    @cached_property
    def makespan(self) -> float:
        return max(end for column in self.ends for end in column)

    @cached_property
    def _seconds(self) -> dict[tuple[Kind, int], list[float]]:
        """Of each stage's actions of a kind."""
        found: dict[tuple[Kind, int], list[float]] = {}
        for _, action, start, end in self._actions():
            found.setdefault((action.kind, action.stage), []).append(end - start)
        return found

    def _actions(self) -> Iterable[tuple[int, Action, float, float]]:
        for rank, column in enumerate(self.table.columns):
            for action, start, end in zip(column, self.starts[rank], self.ends[rank], strict=True):
                yield rank, action, start, end

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By rank: seconds of forwards and backwards, also of those parts that were worked off in a receive."""
        found = [sum(column) for column in self.worked_off]
        for rank, action, start, end in self._actions():
            found[rank] += end - start if action.is_compute else 0.0
        return tuple(found)

    @property
    def rank_bubble_ratios(self) -> tuple[float, ...]:
        return tuple(1 - busy / self.makespan for busy in self.busy)

    @property
    def stage_bubble_ratios(self) -> tuple[float, ...]:
        """A rank's bubble, by the stage of the action that came after it; what is after the last one, by its stage."""
        idle = [0.0] * self.table.stages
        for rank, column in enumerate(self.table.columns):
            free, stage = 0.0, column[-1].stage
            for action, start, end, worked_off in zip(
                column, self.starts[rank], self.ends[rank], self.worked_off[rank], strict=True
            ):
                free += worked_off
                if action.is_compute:
                    idle[action.stage] += start - free
                    free, stage = end, action.stage
            idle[stage] += self.makespan - free
        return tuple(seconds / self.makespan for seconds in idle)

    @property
    def bubble_ratio(self) -> float:
        """The part of all ranks' time in which they did not compute."""
        return 1 - sum(self.busy) / (self.table.num_ranks * self.makespan)

    def costs(self) -> Costs:
        """What a stage's actions took on average, and a message's way at best."""
        stages = range(self.table.stages)

        def mean(kind: Kind, stage: int) -> float:
            values = self._seconds.get((kind, stage), [])
            return sum(values) / len(values) if values else 0.0

        def mean_input(stage: int) -> float:
            """Where no backward of the stage is split, the whole of one."""
            return mean(Kind.I if (Kind.I, stage) in self._seconds else Kind.B, stage)

        def mean_weight(stage: int) -> float:
            """With its share of what its rank worked off in receives: which stage's that was is not known."""
            rank = self.table.rank_of_stage[stage]
            num = sum(action.kind is Kind.W for action in self.table.columns[rank])
            return mean(Kind.W, stage) + (sum(self.worked_off[rank]) / num if (Kind.W, stage) in self._seconds else 0.0)

        return Costs(
            self.table.stages,
            forward=[mean(Kind.F, stage) for stage in stages],
            input_backward=[mean_input(stage) for stage in stages],
            weight_backward=[mean_weight(stage) for stage in stages],
            transfer=[self._transfer(Kind.RECV_F, stage + 1) for stage in stages[:-1]],
            backward_transfer=[self._transfer(Kind.RECV_B, stage) for stage in stages[:-1]],
        )

    def _transfer(self, kind: Kind, stage: int) -> float:
        """A message's way, where its receiver waited for it; else what taking it out took."""
        waited, taken = [], []
        for microbatch in range(self.table.microbatches):
            receive = Action(stage, kind, microbatch)
            send = send_of(receive)
            assert send is not None
            received, sent = self._times.get(receive), self._times.get(send)
            if received is not None and sent is not None:
                taken.append(received[1] - received[0])
                if received[0] < sent[0]:
                    waited.append(received[1] - sent[0])
        return max(0.0, median(waited or taken or [0.0]))

    def extra_wait(self, rank: int, at: int) -> float:
        """How much longer an action waited for a collective than its stage's others of its kind usually do."""
        column, waits = self.table.columns[rank], self.waits[rank]
        alike = [
            waited
            for action, waited in zip(column, waits, strict=True)
            if (action.kind, action.stage) == (column[at].kind, column[at].stage)
        ]
        return waits[at] - median(alike)

    @cached_property
    def _times(self) -> dict[Action, tuple[float, float]]:
        return {action: (start, end) for _, action, start, end in self._actions()}

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule": self.table.schedule,
            "stages": self.table.stages,
            "microbatches": self.table.microbatches,
            "ranks": [[str(action) for action in column] for column in self.table.columns],
            "starts": [list(column) for column in self.starts],
            "ends": [list(column) for column in self.ends],
            "waits": [list(column) for column in self.waits],
            "worked_off": [list(column) for column in self.worked_off],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Measured:
        columns = tuple(tuple(parse_actions(text)[0] for text in column) for column in found["ranks"])
        table = Table(found["schedule"], found["stages"], found["microbatches"], columns)
        starts, ends, waits, worked_off = (
            tuple(tuple(map(float, column)) for column in found[key])
            for key in ("starts", "ends", "waits", "worked_off")
        )
        if any([*map(len, columns)] != [*map(len, each)] for each in (starts, ends, waits, worked_off)):
            raise InvalidCall("a measured step has one start, one end, one wait and one worked_off for each action.")
        return cls(table, starts, ends, waits, worked_off)

    @classmethod
    def from_trace(cls, trace: dict[str, Any]) -> tuple[int, Measured]:
        """The last step in a run's trace and its number, of the pipeline at dp=0 tp=0. Raises InvalidCall, KeyError or
        TypeError for a trace without one."""
        events = trace["traceEvents"]
        places = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
        ranks = sorted(
            (int(found[1]), rank) for rank, name in places.items() if (found := re.search(r"dp=0 tp=0 pp=(\d+)", name))
        )
        actions = [each for each in events if each.get("cat") in Kind.__members__.values() and "args" in each]
        if not ranks or not actions:
            raise InvalidCall("it has no actions of a pipeline")
        last = max(each["args"]["step"] for each in actions)
        columns, times = [], []
        for _, rank in ranks:
            mine = [each for each in actions if each["pid"] == rank and each["args"]["step"] == last]
            columns.append(tuple(parse_actions(each["name"])[0] for each in mine))
            times.append([_trace_times(each["ts"] / 1e6, each["dur"] / 1e6, each["args"]) for each in mine])
        numbers = [(action.stage, action.microbatch or 0) for column in columns for action in column]
        table = Table("run", 1 + max(stage for stage, _ in numbers), 1 + max(mb for _, mb in numbers), tuple(columns))
        return last, cls.of(table, times)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Planned beside measured. The plan is the simulation with the costs that were measured."""

    measured: Measured
    planned: Simulation
    first_late: Late | None

    def __str__(self) -> str:
        planned, measured, table = self.planned, self.measured, self.measured.table
        lines = [
            f"step {measured.makespan * 1e3:.1f} ms, planned {planned.makespan * 1e3:.1f} ms",
            *_bubbles("rank", planned.rank_bubble_ratios, measured.rank_bubble_ratios),
        ]
        if table.stages > table.num_ranks:
            lines += _bubbles("stage", planned.stage_bubble_ratios, measured.stage_bubble_ratios)
        lines.append(f"first late: {self.first_late}" if self.first_late is not None else "nothing came late")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Times are seconds."""
        table, late = self.measured.table, self.first_late
        both: dict[str, Simulation | Measured] = {"planned": self.planned, "measured": self.measured}
        return {
            "schedule": table.schedule,
            "stages": table.stages,
            "microbatches": table.microbatches,
            "makespan": {name: each.makespan for name, each in both.items()},
            "bubble_ratio": {name: each.bubble_ratio for name, each in both.items()},
            "rank_bubble_ratios": {name: list(each.rank_bubble_ratios) for name, each in both.items()},
            "stage_bubble_ratios": {name: list(each.stage_bubble_ratios) for name, each in both.items()},
            "first_late": None if late is None else late.to_json(),
        }


def _bubbles(name: str, planned: Sequence[float], measured: Sequence[float]) -> list[str]:
    rows = enumerate(zip(planned, measured, strict=True))
    return [
        f"{name}  bubble planned  measured",
        *(f"{number:{len(name)}}  {100 * plan:12.1f} %  {100 * was:6.1f} %" for number, (plan, was) in rows),
    ]


def compare(measured: Measured, costs: Costs | None = None) -> Comparison:
    """`costs` are what was expected; without them, what the step's own actions took on average."""
    costs = measured.costs() if costs is None else costs
    planned = simulate(measured.table, costs)
    return Comparison(measured, planned, _first_late(measured, planned))


def _first_late(measured: Measured, planned: Simulation) -> Late | None:
    late = []
    for rank, column in enumerate(measured.table.columns):
        for at, action in enumerate(column):
            if not action.is_compute:
                continue
            expected = planned.ends[rank][at] - planned.starts[rank][at]
            seconds = measured.starts[rank][at] - planned.starts[rank][at]
            if seconds > max(_LEAST, _LATE * expected):
                late.append((measured.starts[rank][at], rank, at, seconds))
    if not late:
        return None
    _, rank, at, seconds = min(late)
    why, because_of = _why(measured, planned, rank, at)
    return Late(rank, measured.table.columns[rank][at], seconds, why, because_of)


def _why(measured: Measured, planned: Simulation, rank: int, at: int) -> tuple[Why, Action]:
    """What took the largest part of the time by which an action is late."""
    column, starts, ends = measured.table.columns[rank], measured.starts[rank], measured.ends[rank]
    before = next((i for i in range(at - 1, -1, -1) if column[i].is_compute), -1)
    free = ends[before] if before >= 0 else 0.0
    lost = {(Why.HELD_UP, column[max(before, 0)]): starts[at] - free}
    for i in range(before + 1, at):
        if send_of(column[i]) is not None:
            waited = ends[i] - max(starts[i], planned.ends[rank][i])
            lost[Why.LATE_RECEIVE, column[i]] = waited
            lost[Why.HELD_UP, column[max(before, 0)]] -= ends[i] - starts[i]
    if before >= 0:
        expected = planned.ends[rank][before] - planned.starts[rank][before]
        slow, waited = ends[before] - starts[before] - expected, measured.extra_wait(rank, before)
        lost[Why.COLLECTIVE, column[before]] = min(slow, waited)
        lost[Why.SLOW_COMPUTE, column[before]] = slow - max(0.0, min(slow, waited))
    return max(lost, key=lost.__getitem__)


def _trace_times(start: float, length: float, details: dict[str, Any]) -> tuple[float, float, float, float]:
    return start, start + length, details.get("waited", 0.0), details.get("cpu", 0.0)
