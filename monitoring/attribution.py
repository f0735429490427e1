"""Where the seconds of a step went, on every rank: all ranks' events in, parts that add up to the step out. Pure.

A rank alone can only say that it waited. What for follows from the other ranks' events of the same step:

| event         | until                                          | is          | and then    |
|---------------|------------------------------------------------|-------------|-------------|
| F, B, I, W    | as long as the rank has a core                 | `compute`   | `other`     |
| waits in them | the least that a tensor-parallel peer waits    | `tp_comm`   | `straggler` |
| RECV          | the sender begins to send                      | waiting     | `pp_comm`   |
| … computing   | its end: weight parts, while nothing comes     | `compute`   |             |
| SEND          | its end                                        | `pp_comm`   |             |
| REDUCE        | the last replica arrives                       | `straggler` | `dp_comm`   |
| … along TP    | the last tensor-parallel peer arrives          | `straggler` | `tp_comm`   |
| … along PP    | the last stage that shares a weight arrives    | waiting     | `pp_comm`   |
| MEET          | the last rank arrives                          | waiting     | `optimizer` |

Waiting for other stages is `bubble`; but as much of it as a rank of the pipeline computes longer than the fastest rank
with the same work is `straggler`. Without a pipeline, all waiting in MEET is. Reductions that overlap computing are in
no part: only REDUCE, which follows a rank's last action, is exposed. With a single replica it is a hand-over: `other`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from monitoring.collectives import KINDS as OPS
from monitoring.events import SENDS, Axis, Event
from monitoring.facts import Place, RankFacts
from monitoring.observations import AxisTraffic, RankStep, StageSeconds, StepTimes
from monitoring.rank_times import Message, RankTimes, Span
from monitoring.time_parts import PARTS, TimeParts, mean_of

Groups = tuple[tuple[int, ...], ...]

_BETWEEN_STAGES = OPS.index("send"), int(Axis.PP)


def attribute(events: Mapping[int, Sequence[Event]], ranks: Mapping[int, RankFacts]) -> StepTimes:
    """One step's parts. The moments of all events are of one clock; every rank has its STEP.

    Raises ValueError where a rank has none, KeyError where nothing is known of a rank.
    """
    everyone = [RankTimes.of(ranks[rank], events[rank]) for rank in sorted(events)]
    layout = _layout(tuple([each.facts.place for each in everyone]))
    for peers in _those(everyone, layout.tensor_peers):
        _share_tensor_waits(peers)
        _share_meetings(peers, Axis.TP, "tp_comm")
    for replicas in _those(everyone, layout.replicas):
        _share_meetings(replicas, Axis.DP, "dp_comm" if len(replicas) > 1 else "other")
    pipelines = _those(everyone, layout.pipelines)
    for pipeline in pipelines:
        _share_meetings(pipeline, Axis.PP, "pp_comm")
    _share_meetings(everyone, Axis.WORLD, "optimizer")
    late, lengths = _lateness(_those(everyone, layout.same_work)), dict[int, float]()
    for pipeline in pipelines:
        _share_receives(pipeline)
        _share_waiting(pipeline, late, is_pipeline=layout.has_stages)
        lengths |= dict.fromkeys([each.facts.rank for each in pipeline], _length(pipeline))
    found = tuple([_result(times, lengths[times.facts.rank]) for times in everyone])
    return StepTimes(
        step=everyone[0].step,
        seconds=sum(each.seconds for each in found) / len(found),
        ranks=found,
        parts=mean_of([each.parts for each in found]),
        traffic=_traffic(chain.from_iterable(each.calls for each in everyone)),
    )


class _Layout(NamedTuple):
    """Who belongs together, by their places among all ranks."""

    tensor_peers: Groups
    replicas: Groups
    pipelines: Groups
    same_work: Groups
    has_stages: bool


@lru_cache(maxsize=8)  # the same for every step of a run
def _layout(places: tuple[Place, ...]) -> _Layout:
    def grouped(key: Callable[[Place], Hashable]) -> Groups:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, place in enumerate(places):
            groups[key(place)].append(number)
        return tuple(map(tuple, groups.values()))

    return _Layout(
        tensor_peers=grouped(lambda place: (place.dp, place.pp)),
        replicas=grouped(lambda place: (place.tp, place.pp)),
        pipelines=grouped(lambda place: (place.dp, place.tp)),
        same_work=grouped(lambda place: place.pp),
        has_stages=any(place.pp for place in places),
    )


def _those(everyone: Sequence[RankTimes], groups: Groups) -> list[list[RankTimes]]:
    return [[everyone[number] for number in group] for group in groups]


def _share_tensor_waits(peers: Sequence[RankTimes]) -> None:
    """The last to come waits for the exchange alone; whoever waits longer waits for that one."""
    if len(peers) == 1 or len({len(each.waits) for each in peers}) > 1:  # some events were lost
        for each in peers:
            each.parts["tp_comm"] += sum(each.waits)
        return
    exchange = sum(map(min, zip(*(each.waits for each in peers), strict=True)))
    for each in peers:
        each.parts["tp_comm"] += exchange
        each.parts["straggler"] += sum(each.waits) - exchange


def _share_meetings(peers: Sequence[RankTimes], axis: Axis, part: str) -> None:
    """Until the last one comes, ranks wait for it; what is left is the part."""
    for number in range(max([len(each.meetings[axis]) for each in peers])):
        there = [each for each in peers if len(each.meetings[axis]) > number]
        last = max(each.meetings[axis][number][0] for each in there)
        for each in there:
            early, rest = _split(each.meetings[axis][number], last)
            each.parts[part] += rest
            if axis in (Axis.DP, Axis.TP):
                each.parts["straggler"] += early
            else:  # of another stage
                each.waiting += early


def _split(span: Span, moment: float) -> Span:
    """How long it lasts before the moment, and after it."""
    start, end = span
    before = min(max(moment - start, 0.0), end - start)
    return before, end - start - before


def _share_receives(pipeline: Sequence[RankTimes]) -> None:
    """Until the message is sent, ranks wait for it."""
    sends: dict[Message, float] = {}
    for each in pipeline:
        sends |= each.sends
    for each in pipeline:
        for message, span, worked in each.receives:
            early, rest = _split(span, sends.get(message, span[1]))
            each.waiting += max(0.0, early - worked)
            each.parts["pp_comm"] += min(rest, rest + early - worked)


def _share_waiting(pipeline: Sequence[RankTimes], late: Mapping[int, float], is_pipeline: bool) -> None:
    latest = sorted([late[each.facts.rank] for each in pipeline], reverse=True)
    for each in pipeline:
        others = latest[0] if late[each.facts.rank] < latest[0] else (latest[1:] or [0.0])[0]
        straggler = min(each.waiting, others) if is_pipeline else each.waiting
        each.parts["straggler"] += straggler
        each.parts["bubble"] += each.waiting - straggler


def _lateness(with_same_work: Iterable[Sequence[RankTimes]]) -> dict[int, float]:
    """By how much each rank computes longer than the fastest one with the same work."""
    late: dict[int, float] = {}
    for same in with_same_work:
        least = min([each.compute_wall for each in same])
        for each in same:
            late[each.facts.rank] = each.compute_wall - least
    return late


def _length(pipeline: Iterable[RankTimes]) -> float:
    """From its first action's start to its last one's end."""
    spans = [each.actions for each in pipeline if each.actions is not None]
    return max([end for _, end in spans]) - min([start for start, _ in spans]) if spans else 0.0


def _result(times: RankTimes, pipeline: float) -> RankStep:
    parts = TimeParts(tuple([max(0.0, times.parts[part]) for part in PARTS]))
    return RankStep(
        rank=times.facts.rank,
        seconds=times.seconds,
        parts=parts,
        remainder=times.seconds - parts.total,
        compute_wall=times.compute_wall,
        compute_cpu=times.compute_cpu,
        core_wait=times.core_wait,
        pipeline=pipeline,
        stages={stage: StageSeconds(*seconds) for stage, seconds in sorted(times.stages.items())},
    )


def _traffic(calls: Iterable[Event]) -> tuple[AxisTraffic, ...]:
    sums: dict[tuple[int, int], list[float]] = {}
    for event in calls:
        is_send = event.what in SENDS
        row = sums.setdefault(_BETWEEN_STAGES if is_send else (event.op, event.axis), [0, 0, 0.0])
        row[0] += event.calls
        row[1] += event.num_bytes
        row[2] += event.seconds if is_send else event.waited
    return tuple(AxisTraffic(OPS[op], Axis(axis).label, *row) for (op, axis), row in sorted(sums.items()))
