"""Rules about what a step needs from outside: its batch, and a place to save to."""

from __future__ import annotations

from collections.abc import Iterator

from monitoring.analysis.observations import Bottleneck
from monitoring.analysis.rules.levels import severity_of
from monitoring.analysis.rules.view import View, duration, is_alone, percent, saved

_OFTEN_THERE = 0.25  # batches: below, the queue is hardly ever filled


def data_starved(view: View) -> Iterator[Bottleneck]:
    """Batches come later than they are asked for. The rank that waits longest counts: others wait for it."""
    waits = {number: rank.parts["data"] for number, rank in view.window.ranks.items()}
    worst = max(waits, key=lambda number: waits[number])
    share = view.share(waits[worst])
    severity = severity_of("data_starved", share)
    if severity is None:
        return
    queue = view.window.queue.get(worst)
    evidence: dict[str, float | int | str] = {"share": share, "seconds": waits[worst], "prefetch": view.facts.prefetch}
    if queue is not None:
        evidence["batches_ready"] = queue
    comes_in_bursts = queue is not None and queue >= _OFTEN_THERE
    alone = is_alone(waits, worst)
    yield Bottleneck(
        kind="data_starved",
        severity=severity,
        message=f"{f'Rank {worst} waits' if alone else 'Ranks wait'} {percent(share)} of a step for data: "
        f"{duration(waits[worst])} of {duration(view.window.seconds)}.",
        evidence=evidence,
        remedy="Batches are there at times: load more of them ahead."
        if comes_in_bursts
        else "Loading takes longer than a step, so loading further ahead would not help: make d[i] of the dataset "
        "quicker, or prepare its samples before the run (data.source: tokens).",
        key="data.prefetch" if comes_in_bursts else "data.factory",
        value=str(2 * view.facts.prefetch) if comes_in_bursts else None,
        gain=saved(share),
        rank=worst if alone else None,
    )


def checkpoint_stalls(view: View) -> Iterator[Bottleneck]:
    """Steps wait for saving."""
    seconds = max(rank.parts["checkpoint"] for rank in view.window.ranks.values())
    share = view.share(seconds)
    severity = severity_of("checkpoint_stalls", share)
    if severity is not None:
        yield Bottleneck(
            kind="checkpoint_stalls",
            severity=severity,
            message=f"Saving takes {percent(share)} of the time: {duration(seconds)} a step on average.",
            evidence={"share": share, "seconds": seconds, "steps": view.window.num_steps},
            remedy="Save less often in your script: half as often saves half of it. Or save to a quicker disk, such as "
            "a run's folder there.",
            key="runtime.run_dir",
            gain=saved(share / 2),
        )
