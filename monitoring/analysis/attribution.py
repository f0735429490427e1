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
with the same work is `straggler`. It ends with the pipeline's last action: what a rank waits in MEET after it is
`straggler` while another pipeline is at work, then the late stage's reduction: `dp_comm`, or `optimizer` with a single
replica. Without a pipeline, all waiting in MEET is `straggler`. Reductions that overlap computing are in no part: only
REDUCE, which follows a rank's last action, is exposed. With a single replica it is a hand-over: `other`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from monitoring.analysis.facts import Place, RankFacts
from monitoring.analysis.observations import AxisTraffic, RankStep, StageSeconds, StepTimes
from monitoring.analysis.rank_times import Calls, Message, RankTimes, Span
from monitoring.events.collectives import KINDS as OPS
from monitoring.events.events import AXES, Axis, Event
from monitoring.events.time_parts import PARTS, TimeParts, mean_of

Groups = tuple[tuple[int, ...], ...]


def attribute(events: Mapping[int, Sequence[Event]], ranks: Mapping[int, RankFacts]) -> StepTimes:
    """One step's parts. The moments of all events are of one clock; every rank has its STEP.

    Raises ValueError where a rank has none, KeyError where nothing is known of a rank.
    """
    everyone = [RankTimes.of(ranks[rank], events[rank]) for rank in sorted(events)]
    layout = _layout(tuple([each.facts.place for each in everyone]))
    pipelines = _those(everyone, layout.pipelines)
    for pipeline in pipelines:
        _note_window(pipeline)
    for peers in _those(everyone, layout.tensor_peers):
        _share_tensor_waits(peers)
        _share_meetings(peers, Axis.TP, "tp_comm")
    for replicas in _those(everyone, layout.replicas):
        _share_meetings(replicas, Axis.DP, "dp_comm" if len(replicas) > 1 else "other")
    if layout.has_stages:
        for pipeline in pipelines:
            _share_stage_meetings(pipeline, Axis.PP, "pp_comm", "pp_comm")
        reducing = "dp_comm" if len(pipelines) > len(layout.tensor_peers[0]) else "optimizer"
        _share_stage_meetings(everyone, Axis.WORLD, "optimizer", reducing)
    else:
        _share_meetings(everyone, Axis.WORLD, "optimizer")
    with_same_work = _those(everyone, layout.same_work)
    longer = _beyond_least(with_same_work, lambda each: each.compute_wall)
    held_up = _beyond_least(with_same_work, lambda each: each.held_up)
    for each in everyone:
        _note_lateness(each, longer[each.facts.rank] + held_up[each.facts.rank])
    for pipeline in pipelines:
        _share_receives(pipeline)
        _share_waiting(pipeline, longer)
    found = tuple(map(_result, everyone))
    return StepTimes(
        step=everyone[0].step,
        seconds=sum(each.seconds for each in found) / len(found),
        ranks=found,
        parts=mean_of([each.parts for each in found]),
        traffic=_traffic([each.traffic for each in everyone]),
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
    """The last rank to arrive waits only for the exchange; any longer wait is for that rank."""
    if len(peers) == 1 or len({len(each.waits) for each in peers}) > 1:  # some events were lost
        for each in peers:
            each.parts["tp_comm"] += sum(each.waits)
        return
    exchange = sum(map(min, zip(*(each.waits for each in peers), strict=True)))
    longest = max([sum(each.waits) for each in peers])
    for each in peers:
        each.parts["tp_comm"] += exchange
        each.parts["straggler"] += sum(each.waits) - exchange
        each.late[Axis.TP] += longest - sum(each.waits)


def _share_meetings(peers: Sequence[RankTimes], axis: Axis, part: str) -> None:
    """Of ranks that have the same to do: until the last one comes, they wait for it; what is left is the part."""
    for there in _meetings(peers, axis):
        first, last = min([start for _, (start, _) in there]), max([start for _, (start, _) in there])
        for each, span in there:
            early, rest = _split(span, last)
            each.parts["straggler"] += early
            each.parts[part] += rest
            each.late[axis] += span[0] - first


def _share_stage_meetings(peers: Sequence[RankTimes], axis: Axis, part: str, reducing: str) -> None:
    """Of different stages: while its pipeline is at work, a rank waits as the schedule has it; then, for pipelines that
    are slower; and then for stages that are not through with `reducing`."""
    all_done = max([each.pipeline[1] for each in peers])
    for there in _meetings(peers, axis):
        last = max([start for _, (start, _) in there])
        for each, span in there:
            early, rest = _split(span, last)
            scheduled = _overlap((span[0], span[0] + early), each.pipeline)
            slower = _overlap((span[0], span[0] + early), (each.pipeline[1], all_done))
            each.waiting += scheduled
            each.parts["straggler"] += slower
            each.parts[reducing] += early - scheduled - slower
            each.parts[part] += rest


def _meetings(peers: Iterable[RankTimes], axis: Axis) -> Iterator[list[tuple[RankTimes, Span]]]:
    """One after the other: those who came, and when."""
    spans = [[(each, span) for span in each.meetings[axis]] for each in peers]
    return ([each for each in row if each is not None] for row in zip_longest(*spans))


def _split(span: Span, moment: float) -> Span:
    """How long it lasts before the moment, and after it."""
    start, end = span
    before = min(max(moment - start, 0.0), end - start)
    return before, end - start - before


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


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


def _share_waiting(pipeline: Sequence[RankTimes], longer: Mapping[int, float]) -> None:
    most = sorted([longer[each.facts.rank] for each in pipeline], reverse=True)
    for each in pipeline:
        others = most[0] if longer[each.facts.rank] < most[0] else (most[1:] or [0.0])[0]
        straggler = min(each.waiting, others)
        each.parts["straggler"] += straggler
        each.parts["bubble"] += each.waiting - straggler


def _beyond_least(
    with_same_work: Iterable[Sequence[RankTimes]], seconds_of: Callable[[RankTimes], float]
) -> dict[int, float]:
    """How many more seconds each rank has than the one with the same work that has the fewest."""
    beyond: dict[int, float] = {}
    for same in with_same_work:
        least = min(map(seconds_of, same))
        for each in same:
            beyond[each.facts.rank] = seconds_of(each) - least
    return beyond


def _note_window(pipeline: Iterable[RankTimes]) -> None:
    spans = [each.actions for each in pipeline if each.actions is not None]
    if spans:
        window = min([start for start, _ in spans]), max([end for _, end in spans])
        for each in pipeline:
            each.pipeline = window


def _note_lateness(times: RankTimes, more_than_others: float) -> None:
    """Before waits in the pipeline have their names: `more_than_others` has those that made it late."""
    explained = times.parts["straggler"] + times.parts["data"] + times.parts["checkpoint"] + more_than_others
    times.lateness = max(0.0, max(times.late.values()) - explained)


def _result(times: RankTimes) -> RankStep:
    parts = TimeParts(tuple([max(0.0, times.parts[part]) for part in PARTS]))
    return RankStep(
        rank=times.facts.rank,
        seconds=times.seconds,
        parts=parts,
        remainder=times.seconds - parts.total,
        compute_wall=times.compute_wall,
        compute_cpu=times.compute_cpu,
        core_wait=times.core_wait,
        pipeline=times.pipeline[1] - times.pipeline[0],
        lateness=times.lateness,
        stages={stage: StageSeconds(*seconds) for stage, seconds in sorted(times.stages.items())},
    )


def _traffic(each: Iterable[Mapping[Calls, Sequence[float]]]) -> tuple[AxisTraffic, ...]:
    rows: dict[Calls, list[Sequence[float]]] = defaultdict(list)
    for own in each:
        for calls, row in own.items():
            rows[calls].append(row)
    sums = [(op, axis, map(sum, zip(*found, strict=True))) for (op, axis), found in sorted(rows.items())]
    return tuple([AxisTraffic(OPS[op], AXES[axis], *row) for op, axis, row in sums])
