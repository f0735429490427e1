"""Rules about the pipeline: stages that differ, too few microbatches, a schedule that leaves ranks idle."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from monitoring.analysis.observations import Bottleneck
from monitoring.analysis.rules.levels import LEVELS, severity_of
from monitoring.analysis.rules.view import WORTH_IT, View, duration, percent, smaller

_ENOUGH = 4  # microbatches for each rank of the pipeline leave a bubble of a fifth at most
_SCHEDULES = (("zero-bubble", 1), ("zbv", 2), ("interleaved", 2), ("1f1b", 1))
"""What is tried, with the stages a rank that each has."""


def idle_share(view: View) -> float:
    """The mean bubble ratio, without what came of another rank's late data or saving: 1 - utilisation."""
    late_supplies = view.late_supplies()
    ratios = []
    for number, rank in view.window.ranks.items():
        bubble = rank.parts["bubble"]
        late = min(bubble, late_supplies[number])
        ratios.append(rank.bubble_ratio * (1 - late / bubble) if bubble > 0 else 0.0)
    return min(1.0, max(0.0, fmean(ratios)))


def uneven_stages(view: View) -> Iterator[Bottleneck]:
    """One rank has more to compute than the others of its pipeline, and they could share it better."""
    by_rank = view.by_stage_rank()
    if view.facts.pp < 2 or len(by_rank) < view.facts.pp:
        return
    seconds = {pp: fmean(sum(s.total for s in each.stages.values()) for each in peers) for pp, peers in by_rank.items()}
    slowest = max(seconds, key=lambda pp: seconds[pp])
    if seconds[slowest] <= 0:
        return
    severity = severity_of("uneven_stages", 1 - fmean(seconds.values()) / seconds[slowest])
    if severity is None:
        return
    value, gain, is_worth_it = _better_cut(view)
    if is_worth_it:
        mean = fmean(seconds.values())
        yield Bottleneck(
            kind="uneven_stages",
            severity=severity,
            message=f"Pipeline rank {slowest} computes {duration(seconds[slowest])} a step, the mean of all "
            f"{view.facts.pp} is {duration(mean)}: the others wait for it.",
            evidence={"pp_rank": slowest, "slowest_seconds": seconds[slowest], "mean_seconds": mean, **_cut(view)},
            remedy="Cut the layers so that all ranks of the pipeline compute equally long.",
            key="pipeline.layers_per_stage",
            value=value,
            gain=gain,
            rank=min(each.rank for each in by_rank[slowest]),
            axis="pp",
        )


def _cut(view: View) -> dict[str, str]:
    layers = view.facts.layers_per_stage
    return {"layers_per_stage": str(list(layers))} if layers else {}


def _better_cut(view: View) -> tuple[str, float | None, bool]:
    """Value, gain, and whether it is worth it. With one microbatch it is not: stages work one after the other."""
    if view.plan is None:
        return "profile", None, view.facts.microbatches > 1
    layers = view.plan.best_layers()
    if layers is None:  # only the ranks know the layers: let them measure; not more than this can be gained
        gain = view.gain(view.plan.balanced_seconds())
        return "profile", gain, view.facts.microbatches > 1 if gain is None else gain > WORTH_IT
    gain = view.gain(view.plan.step_seconds(layers_per_stage=layers))
    return str(list(layers)), gain, gain is not None and gain > WORTH_IT


def too_few_microbatches(view: View) -> Iterator[Bottleneck]:
    """The pipeline is hardly full before it runs empty again."""
    idle = idle_share(view)
    severity = severity_of("too_few_microbatches", idle)
    if view.facts.pp < 2 or severity is None:
        return
    found = _more_microbatches(view)
    if found is None:
        return
    microbatches, gain, is_same_batch = found
    batch = view.facts.batch_size * microbatches // view.facts.microbatches
    break_even = _break_even(view, microbatches, gain) if is_same_batch else None
    yield Bottleneck(
        kind="too_few_microbatches",
        severity=severity,
        message=f"Ranks of the pipeline idle {percent(idle)} of its time: {_count(view.facts.microbatches)} "
        f"for {view.facts.pp} ranks can't keep them busy.",
        evidence={
            "utilization": 1 - idle,
            "microbatches": view.facts.microbatches,
            "pp": view.facts.pp,
            **({} if break_even is None else {"break_even_seconds": break_even}),
        },
        remedy=_cut_smaller(microbatches, break_even)
        if is_same_batch
        else f"A microbatch is one sample already: make the batch larger too, with {microbatches} microbatches.",
        key="pipeline.microbatches" if is_same_batch else "train.batch_size",
        value=str(microbatches if is_same_batch else batch),
        gain=gain,
        axis="pp",
    )


def _break_even(view: View, microbatches: int, gain: float | None) -> float | None:
    """Seconds of a microbatch on a rank, forward and backward, that may be the same however few samples it has, before
    the gain is lost. How many they are is not known: all microbatches of a run have the same size.

    The prediction takes what a rank computes in a step as given. A fixed part f makes that (then - now) f longer, and
    the pipeline (then + pp - 1) / then times as much.
    """
    if gain is None:
        return None
    now, pp = view.facts.microbatches, view.facts.pp
    return gain * view.window.seconds * microbatches / ((microbatches - now) * (microbatches + pp - 1))


def _cut_smaller(microbatches: int, break_even: float | None) -> str:
    words = f"Cut the batch into {microbatches} microbatches."
    if break_even is None:
        return words
    return (
        f"{words} The gain is predicted as if a microbatch's time shrank with its samples: there is none where "
        f"{duration(break_even)} of each stay, however few they are."
    )


def _more_microbatches(view: View) -> tuple[int, float | None, bool] | None:
    """How many, what they gain, and whether the batch can be cut into them; None where more would not help."""
    now, wanted = view.facts.microbatches, _ENOUGH * view.facts.pp
    if now >= wanted:
        return None
    samples = view.facts.batch_size // view.facts.dp
    possible = [n for n in range(now + 1, samples + 1) if samples % n == 0][:64]
    enough = [n for n in possible if n >= wanted][:1] + [n for n in reversed(possible) if n < wanted]
    if view.plan is None:
        bubble = (view.facts.pp - 1) / (now * view.facts.virtual_stages + view.facts.pp - 1)
        number = enough[0] if enough else now * -(-wanted // now)
        return (number, None, bool(enough)) if bubble > LEVELS["too_few_microbatches"].low else None
    for number in enough or [now * factor for factor in (-(-wanted // now), 2)]:
        gain = view.gain(view.plan.step_seconds(microbatches=number))
        if gain is not None:  # the schedule can have so many
            return (number, gain, bool(enough)) if gain > WORTH_IT else None
    return None


def pipeline_utilization(view: View) -> Iterator[Bottleneck]:
    """Ranks of the pipeline idle, and neither their layers nor the microbatches explain it."""
    idle = idle_share(view)
    severity = severity_of("pipeline_utilization", idle)
    if view.facts.pp < 2 or severity is None or view.part("bubble") <= WORTH_IT:
        return
    remedy, key, value, gain = _better_schedule(view)
    yield Bottleneck(
        kind="pipeline_utilization",
        severity=severity,
        message=f"Ranks of the pipeline compute {percent(1 - idle)} of its time, and wait for other stages in the "
        "rest.",
        evidence={
            "utilization": 1 - idle,
            "schedule": view.facts.schedule,
            "microbatches": view.facts.microbatches,
            "pp": view.facts.pp,
        },
        remedy=remedy,
        key=key,
        value=value,
        gain=gain,
        axis="pp",
    )


def _better_schedule(view: View) -> tuple[str, str, str | None, float | None]:
    """Words, key, value, gain."""
    gains: list[tuple[float, str]] = []
    for schedule, virtual in _SCHEDULES if view.plan is not None else ():
        if schedule != view.facts.schedule:
            assert view.plan is not None
            gain = view.gain(view.plan.step_seconds(schedule=schedule, virtual_stages=virtual))
            gains += [(gain, schedule)] if gain is not None and gain > WORTH_IT else []
    if gains:
        gain, schedule = max(gains)
        return f"Use the schedule {schedule}, which leaves fewer gaps.", "pipeline.schedule", schedule, gain
    words = "No other schedule would help much: use fewer stages and more replicas instead (parallel.dp)."
    return words, "parallel.pp", str(smaller(view.facts.pp)), None


def _count(microbatches: int) -> str:
    return "1 microbatch" if microbatches == 1 else f"{microbatches} microbatches"
