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
from itertools import chain

from monitoring.collectives import KINDS as OPS
from monitoring.events import SENDS, Axis, Event
from monitoring.facts import Place, RankFacts
from monitoring.observations import AxisTraffic, RankStep, StageSeconds, StepTimes
from monitoring.rank_times import Message, RankTimes, Span
from monitoring.time_parts import PARTS, TimeParts, mean_of

_BETWEEN_STAGES = OPS.index("send"), int(Axis.PP)


def attribute(events: Mapping[int, Sequence[Event]], ranks: Mapping[int, RankFacts]) -> StepTimes:
    """One step's parts. The moments of all events are of one clock; every rank has its STEP.

    Raises ValueError where a rank has none, KeyError where nothing is known of a rank.
    """
    everyone = [RankTimes.of(ranks[rank], events[rank]) for rank in sorted(events)]
    for peers in _grouped(everyone, lambda place: (place.dp, place.pp)):
        _share_tensor_waits(peers)
        _share_meetings(peers, Axis.TP, "tp_comm")
    for replicas in _grouped(everyone, lambda place: (place.tp, place.pp)):
        _share_meetings(replicas, Axis.DP, "dp_comm" if len(replicas) > 1 else "other")
    for pipeline in _grouped(everyone, lambda place: (place.dp, place.tp)):
        _share_meetings(pipeline, Axis.PP, "pp_comm")
    _share_meetings(everyone, Axis.WORLD, "optimizer")
    _share_receives(everyone)
    _share_waiting(everyone)
    lengths = _pipeline_lengths(everyone)
    found = tuple(_result(times, length) for times, length in zip(everyone, lengths, strict=True))
    return StepTimes(
        step=everyone[0].step,
        seconds=sum(each.seconds for each in found) / len(found),
        ranks=found,
        parts=mean_of([each.parts for each in found]),
        traffic=_traffic(chain.from_iterable(each.calls for each in everyone)),
    )


def _grouped(everyone: Iterable[RankTimes], key: Callable[[Place], Hashable]) -> Iterable[list[RankTimes]]:
    groups: dict[Hashable, list[RankTimes]] = defaultdict(list)
    for each in everyone:
        groups[key(each.facts.place)].append(each)
    return groups.values()


def _share_tensor_waits(peers: Sequence[RankTimes]) -> None:
    """The last to come waits for the exchange alone; whoever waits longer waits for that one."""
    if len({len(each.waits) for each in peers}) > 1:  # some events were lost
        for each in peers:
            each.parts["tp_comm"] += sum(each.waits)
        return
    exchange = sum(map(min, zip(*(each.waits for each in peers), strict=True)))
    for each in peers:
        each.parts["tp_comm"] += exchange
        each.parts["straggler"] += sum(each.waits) - exchange


def _share_meetings(peers: Sequence[RankTimes], axis: Axis, part: str) -> None:
    """Until the last one comes, ranks wait for it; what is left is the part."""
    for number in range(max(len(each.meetings[axis]) for each in peers)):
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


def _share_receives(everyone: Sequence[RankTimes]) -> None:
    """Until the message is sent, ranks wait for it."""
    sends: dict[tuple[int, int, Message], float] = {}
    for each in everyone:
        place = each.facts.place
        sends |= {(place.dp, place.tp, message): start for message, start in each.sends.items()}
    for each in everyone:
        place = each.facts.place
        for message, span, worked in each.receives:
            early, rest = _split(span, sends.get((place.dp, place.tp, message), span[1]))
            each.waiting += max(0.0, early - worked)
            each.parts["pp_comm"] += min(rest, rest + early - worked)


def _share_waiting(everyone: Sequence[RankTimes]) -> None:
    is_pipeline = any(each.facts.place.pp for each in everyone)
    late = _lateness(everyone)
    for pipeline in _grouped(everyone, lambda place: (place.dp, place.tp)):
        latest = sorted((late[each.facts.rank] for each in pipeline), reverse=True)
        for each in pipeline:
            rank = each.facts.rank
            others = latest[0] if late[rank] < latest[0] else (latest[1:] or [0.0])[0]
            straggler = min(each.waiting, others) if is_pipeline else each.waiting
            each.parts["straggler"] += straggler
            each.parts["bubble"] += each.waiting - straggler


def _lateness(everyone: Sequence[RankTimes]) -> dict[int, float]:
    """By how much each rank computes longer than the fastest one with the same work."""
    late: dict[int, float] = {}
    for same in _grouped(everyone, lambda place: place.pp):
        least = min(each.compute_wall for each in same)
        late |= {each.facts.rank: each.compute_wall - least for each in same}
    return late


def _pipeline_lengths(everyone: Sequence[RankTimes]) -> list[float]:
    """Of each rank's pipeline, from its first action's start to its last one's end."""
    lengths: dict[tuple[int, int], float] = {}
    for pipeline in _grouped(everyone, lambda place: (place.dp, place.tp)):
        spans = [each.actions for each in pipeline if each.actions is not None]
        place = pipeline[0].facts.place
        lengths[place.dp, place.tp] = max(e for _, e in spans) - min(s for s, _ in spans) if spans else 0.0
    return [lengths[each.facts.place.dp, each.facts.place.tp] for each in everyone]


def _result(times: RankTimes, pipeline: float) -> RankStep:
    parts = TimeParts(tuple(max(0.0, times.parts[part]) for part in PARTS))
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
