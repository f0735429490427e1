"""Steps as ranks would tell them, written out event by event."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence

from monitoring.analysis.facts import Place, RankFacts
from monitoring.analysis.observations import RankStep, StepTimes
from monitoring.events.events import COMPUTE, RECORD_BYTES, Event, What, pack_into
from monitoring.events.time_parts import TimeParts, mean_of
from monitoring.live.observer import Observer
from monitoring.messages import receive
from parallel3d.runs.record import RunRecord


def mesh_of(dp: int = 1, tp: int = 1, pp: int = 1, *, num_cores: int = 64, host: str = "a") -> dict[int, RankFacts]:
    """Ranks in the order dp-tp-pp, each with a core of its own."""
    places = [Place(d, t, p) for d in range(dp) for t in range(tp) for p in range(pp)]
    return {rank: RankFacts(rank, place, host, num_cores=num_cores) for rank, place in enumerate(places)}


class Told:
    """One rank's step, one event after the other, each from the end of the one before."""

    def __init__(self, step: int = 0, start: float = 100.0) -> None:
        self.step, self.start, self.now = step, start, start
        self.events: list[Event] = []

    def add(self, what: What, seconds: float, stage: int = -1, microbatch: int = -1, **more) -> Told:
        start, self.now = self.now, self.now + seconds
        if what in COMPUTE:
            more = {"cpu": seconds - more.get("waited", 0.0), **more}
        self.events.append(Event(what, self.step, start, self.now, stage, microbatch, **more))
        return self

    def gap(self, seconds: float) -> Told:
        self.now += seconds
        return self

    def beside(self, start: float, end: float, **more) -> Told:
        """A collective that overlaps what the others say. Its moments count from the step's start."""
        times = {"waited": end - start, **more}
        self.events.append(Event(What.COLLECTIVE, self.step, self.start + start, self.start + end, **times))
        return self

    def done(self) -> list[Event]:
        return [*self.events, Event(What.STEP, self.step, self.start, self.now)]


def encoded(events: Iterable[Event]) -> str:
    """As the control channel carries them."""
    events = list(events)
    buffer = bytearray(len(events) * RECORD_BYTES)
    for place, event in enumerate(events):
        pack_into(buffer, place * RECORD_BYTES, event)
    return base64.b64encode(buffer).decode()


def events_message(events: Iterable[Event], dropped: int = 0) -> dict[str, object]:
    return {"kind": "events", "data": encoded(events), "dropped": dropped}


def report(to: Observer | RunRecord, rank: int, message: Mapping[str, object]) -> None:
    """A rank's message, as the control channel carries it."""
    to.take(rank, receive(rank, message))


def rank_step(rank: int, wall: float, cpu: float | None = None, **more) -> RankStep:
    """A rank that computed so long, and nothing else."""
    parts = TimeParts.of({"compute": wall})
    return RankStep(rank, wall, parts, 0.0, wall, wall if cpu is None else cpu, 0.0, wall, **more)


def step_of(
    step: int,
    walls: Sequence[float] | Mapping[int, float],
    cpus: Sequence[float] | None = None,
    late: Mapping[int, float] | None = None,
) -> StepTimes:
    """Each rank's computing in one step; and by how much some came late."""
    found = dict(walls) if isinstance(walls, Mapping) else dict(enumerate(walls))
    ranks = tuple(
        rank_step(rank, wall, None if cpus is None else cpus[rank], lateness=(late or {}).get(rank, 0.0))
        for rank, wall in found.items()
    )
    return StepTimes(step, max(found.values()), ranks, mean_of([each.parts for each in ranks]))
