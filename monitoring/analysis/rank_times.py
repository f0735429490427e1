"""What one rank's events of a step say by themselves: what it did, when it waited, and what lies between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from monitoring.analysis.facts import RankFacts
from monitoring.events.events import OPS, SENDS, Axis, Event, What
from monitoring.events.time_parts import PARTS

Span = tuple[float, float]
Message = tuple[int, int, int]
"""What sends it, its stage and its microbatch."""
Calls = tuple[int, int]
"""That moved bytes: their op's place in `OPS`, and a value of `Axis`. Messages to other stages are sends along PP."""

_BY_START = itemgetter(Event._fields.index("start"))
# As plain numbers: members of an enumeration are looked up each time, and this is done for every event of a run.
_STEP, _COLLECTIVE = int(What.STEP), int(What.COLLECTIVE)
_F, _W, _REDUCE_GRAD, _REDUCE, _MEET = map(int, (What.F, What.W, What.REDUCE_GRAD, What.REDUCE, What.MEET))
_AXES = tuple(map(int, Axis))
_WORLD, _DP, _PP, _SENDS = int(Axis.WORLD), int(Axis.DP), int(Axis.PP), frozenset(map(int, SENDS))
_BETWEEN_STAGES: Calls = OPS.index("send"), int(Axis.PP)
_COLUMNS: dict[int, int] = {What.F: 0, What.B: 1, What.I: 1, What.W: 2}
_SENDERS: dict[int, tuple[int, int]] = {What.RECV_F: (int(What.SEND_F), -1), What.RECV_B: (int(What.SEND_B), 1)}
"""Of each kind of receive: what sends the message, and how much further on that stage is."""
_PART_OF: dict[int, str] = {
    What.DATA: "data",
    What.REDUCE_GRAD: "dp_comm",
    What.OPTIMIZER: "optimizer",
    What.CHECKPOINT: "checkpoint",
}


@dataclass(slots=True)
class RankTimes:
    """Of one rank in one step. `parts` starts with what needs no other rank's events; `attribute` adds the rest."""

    facts: RankFacts
    step: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    compute_wall: float = 0.0
    compute_cpu: float = 0.0
    core_wait: float = 0.0
    stages: dict[int, list[float]] = field(default_factory=dict)
    """Forward, backward and weight part, without waits."""
    waits: list[float] = field(default_factory=list)
    """For tensor-parallel peers, one of each computing action: the peers have the same ones in the same order."""
    sends: dict[Message, float] = field(default_factory=dict)
    """When each began."""
    receives: list[tuple[Message, Span, float]] = field(default_factory=list)
    """The message, when it was received, and how long the rank computed meanwhile."""
    meetings: dict[int, list[Span]] = field(default_factory=lambda: {axis: [] for axis in _AXES})
    """Along an axis, to add up gradients; of all ranks, for norms and losses. Several in a step: all at the same points
    of it."""
    waiting: float = 0.0
    """For other stages."""
    late: dict[int, float] = field(default_factory=lambda: dict.fromkeys(_AXES, 0.0))
    """By axis, how much earlier ranks with the same work arrived. A delay along one axis also delays ranks along
    another, so the maximum counts, not the sum."""
    held_up: float = 0.0
    """By its pipeline: in receives, and where stages that share a weight meet. Sends do not wait."""
    lateness: float = 0.0
    """Of `late`, what nothing known explains."""
    actions: Span | None = None
    """From the first one's start to the last one's end."""
    pipeline: Span = (0.0, 0.0)
    """The same of all ranks of its pipeline."""
    traffic: dict[Calls, list[float]] = field(default_factory=dict)
    """Calls, bytes and seconds."""

    @staticmethod
    def of(facts: RankFacts, events: Sequence[Event]) -> RankTimes:
        """Raises ValueError where no STEP is among the events."""
        for event in reversed(events):
            if event.what == _STEP:
                times = RankTimes(facts, event.step, event.end - event.start)
                times._read(events, event.start, event.end)
                return times
        raise ValueError(f"rank {facts.rank} has not ended the step")

    def _read(self, events: Iterable[Event], begin: float, finish: float) -> None:
        wall = used = cpu_time = gaps = held_up = 0.0
        sent = self.traffic[_BETWEEN_STAGES] = [0, 0, 0.0]
        cursor, is_cpu = begin, self.facts.is_cpu
        waits, receives, stages = self.waits, self.receives, self.stages
        first, last = finish, begin
        for event in sorted(events, key=_BY_START):
            what, _, start, end, stage, microbatch, cpu, waited, num_bytes, axis, op, _, calls = event
            if what == _COLLECTIVE:
                row = self.traffic.setdefault((op, axis), [0, 0, 0.0])
                row[0] += calls
                row[1] += num_bytes
                row[2] += waited
                continue
            if what == _STEP:
                continue
            if start < begin or end > finish:  # clocks differ by some microseconds
                start, end = min(max(start, begin), finish), max(min(end, finish), begin)
            if _F <= what <= _REDUCE_GRAD:
                last = end
                if start < first:
                    first = start
            if start > cursor:
                gaps += start - cursor
            if end > cursor:
                cursor = end
            if _F <= what <= _W:
                length = end - start
                if waited > length:
                    waited = length
                length -= waited
                waits.append(waited)
                wall += length
                cpu_time += cpu
                used += cpu if is_cpu and cpu < length else length
                if stage not in stages:
                    stages[stage] = [0.0, 0.0, 0.0]
                stages[stage][_COLUMNS[what]] += length
            elif what in _SENDERS:
                sender, further = _SENDERS[what]
                worked = min(cpu, end - start) if cpu else 0.0
                receives.append(((sender, stage + further, microbatch), (start, end), worked))
                held_up += end - start - worked
                if worked:  # weight parts that were waiting for a moment like this
                    wall, used, cpu_time = wall + worked, used + worked, cpu_time + worked
                    stages.setdefault(stage, [0.0, 0.0, 0.0])[_COLUMNS[_W]] += worked
            elif what in _SENDS:
                self.sends[what, stage, microbatch] = start
                self.parts["pp_comm"] += end - start
                if calls:
                    sent[0] += calls
                    sent[1] += num_bytes
                    sent[2] += end - start
            elif what == _REDUCE:
                self.meetings[_DP if axis == _WORLD else axis].append((start, end))
            elif what == _MEET:
                self.meetings[_WORLD].append((start, end))
            elif what in _PART_OF:
                self.parts[_PART_OF[what]] += end - start
        if not sent[0]:
            del self.traffic[_BETWEEN_STAGES]
        self.compute_wall, self.compute_cpu, self.core_wait = wall, cpu_time, wall - used
        self.held_up = held_up + sum([end - start for start, end in self.meetings[_PP]])
        self.parts["compute"] += used
        self.parts["other"] += gaps + max(0.0, finish - cursor) + self.core_wait
        self.actions = (first, last) if first < finish else None
