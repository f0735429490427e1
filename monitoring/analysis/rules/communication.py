"""Rules about what ranks send each other: too much of it on one axis, tensor parallelism that gains little, small
buckets."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from monitoring.analysis.observations import Bottleneck
from monitoring.analysis.rules.levels import severity_of
from monitoring.analysis.rules.machine import straggling
from monitoring.analysis.rules.view import WORTH_IT, View, duration, percent, saved, size, smaller

_WHAT = {"tp": "Tensor-parallel exchanges", "pp": "Messages between stages", "dp": "Reducing gradients"}
_LARGE = 1 << 20  # bytes of a reduction: above, its time is moving bytes, on every transport measured so far
_USUAL_BUCKET = 25 << 20
_FEW_CALLS = 4  # a step: larger buckets would hardly make fewer


def communication(view: View) -> Iterator[Bottleneck]:
    """More than 30 % of the time on one axis, without what a straggler may account for."""
    late = max((straggling(view, each) for each in view.window.stragglers), default=0.0)
    for axis, what in _WHAT.items():
        kind, share = f"{axis}_comm", view.part(f"{axis}_comm")
        severity = severity_of(kind, share - late)
        if severity is None or getattr(view.facts, axis) < 2:
            continue
        seconds = view.window.parts[kind]
        remedy, key, value, gain = _remedy(view, axis, share)
        yield Bottleneck(
            kind=kind,
            severity=severity,
            message=f"{what} take{'s' if axis == 'dp' else ''} {percent(share)} of a step: {duration(seconds)} of "
            f"{duration(view.window.seconds)}.",
            evidence={"share": share, "seconds": seconds, axis: getattr(view.facts, axis), **_traffic(view, axis)},
            remedy=remedy,
            key=key,
            value=value,
            gain=gain,
            axis=axis,
        )


def _traffic(view: View, axis: str) -> dict[str, float]:
    """A rank's calls and bytes in a step, where they are known."""
    own = [each for each in view.window.traffic if each.axis == axis]
    if not own:
        return {}
    ranks = len(view.window.ranks)
    return {"calls": sum(each.calls for each in own) / ranks, "bytes": sum(each.num_bytes for each in own) / ranks}


def _remedy(view: View, axis: str, share: float) -> tuple[str, str, str | None, float | None]:
    """Words, key, value, gain."""
    if axis == "dp":
        return _less_reducing(view, share)
    if view.crosses_hosts(axis) and view.fits_into_hosts(axis):
        order = "pp-dp-tp" if axis == "tp" else "dp-tp-pp"
        return f"It goes between hosts: number the ranks so that {axis} stays inside.", "parallel.order", order, None
    now = getattr(view.facts, axis)
    return (
        f"Use fewer {'tensor-parallel ranks' if axis == 'tp' else 'stages'} and more replicas instead (parallel.dp), "
        "if a rank's memory holds its larger part of the weights.",
        f"parallel.{axis}",
        str(smaller(now)),
        saved(share * (1 - _remains(axis, now, smaller(now)))),
    )


def _remains(axis: str, now: int, then: int) -> float:
    """Of an axis' bytes a rank, when it shrinks and there are more replicas, each with a smaller part of the batch.

    An all-reduce moves 2(n-1)/n of its size; a pipeline of n ranks has n - 1 links, so (n-1)/n a rank.
    """
    links = ((then - 1) / then) / ((now - 1) / now)
    samples = then / now
    return links * samples


def _less_reducing(view: View, share: float) -> tuple[str, str, str | None, float | None]:
    adds_up_inside = view.facts.comm_strategy in ("hierarchical", "adaptive")
    if view.crosses_hosts("dp") and view.shares_hosts("dp") and not adds_up_inside:
        words = (
            "It goes between hosts: add up inside each host first, or let it be measured what is fastest (adaptive)."
        )
        return words, "comm.strategy", "hierarchical", None
    return (
        "Put more samples into a step, in more microbatches where memory is short: as many gradients are reduced for "
        "twice the work. The learning rate may need a change then.",
        "train.batch_size",
        str(2 * view.facts.batch_size),
        saved(share / 2),
    )


def tp_efficiency(view: View) -> Iterator[Bottleneck]:
    """Computing beside computing and what tensor parallelism adds to it."""
    parts = view.window.parts
    late = _late_peers(view)
    added = parts["tp_comm"] + late
    if view.facts.tp < 2 or parts["compute"] <= 0:
        return
    severity = severity_of("tp_efficiency", added / (parts["compute"] + added))
    now, then = view.facts.tp, smaller(view.facts.tp)
    gain = saved(view.share(added) * (1 - _remains("tp", now, then)))
    if severity is None or gain <= WORTH_IT:
        return
    efficiency = parts["compute"] / (parts["compute"] + added)
    yield Bottleneck(
        kind="tp_efficiency",
        severity=severity,
        message=f"Tensor parallelism over {now} ranks has an efficiency of {percent(efficiency)}: for "
        f"{duration(parts['compute'])} of computing, {duration(added)} of exchanges and waits.",
        evidence={"efficiency": efficiency, "compute_seconds": parts["compute"], "added_seconds": added, "tp": now},
        remedy="Use fewer tensor-parallel ranks and more replicas or stages instead, or larger microbatches: layers "
        "this small don't pay for being shared.",
        key="parallel.tp",
        value=str(then),
        gain=gain,
        axis="tp",
    )


def _late_peers(view: View) -> float:
    """Seconds that ranks wait for tensor-parallel peers, but not those whose data or saving is late. Late peers are
    counted together on all axes: only where there is no other axis they are those of this one."""
    if view.facts.dp * view.facts.pp > 1:
        return 0.0
    supplies = view.late_supplies()
    waits = [max(0.0, rank.parts["straggler"] - supplies[number]) for number, rank in view.window.ranks.items()]
    return sum(waits) / len(waits)


def small_buckets(view: View) -> Iterator[Bottleneck]:
    """Gradients are reduced in so many small calls that their fixed cost counts."""
    calls, num_bytes = _reductions(view)
    share = view.part("dp_comm")
    severity = severity_of("small_buckets", share)
    if severity is None or calls < _FEW_CALLS or view.facts.bucket_bytes >= _LARGE:
        return
    each = num_bytes / calls
    needed = max(1, ceil(num_bytes / _USUAL_BUCKET))
    if each >= _LARGE or needed >= calls:
        return
    yield Bottleneck(
        kind="small_buckets",
        severity=severity,
        message=f"Gradients are reduced in {calls:.0f} calls a step of {size(each)} each, and ranks wait "
        f"{percent(share)} of a step for them: {_calls(needed)} would do.",
        evidence={
            "calls": calls,
            "bytes_a_call": each,
            "bucket_bytes": view.facts.bucket_bytes,
            "share": share,
            "calls_needed": needed,
        },
        remedy="Reduce them in larger buckets.",
        key="comm.bucket_size",
        value="25 MiB",
        # Of a call as large as this one, the part below `_LARGE` bytes is taken as fixed cost.
        gain=saved(share * (1 - needed / calls) * (1 - each / _LARGE)),
        axis="dp",
    )


def _reductions(view: View) -> tuple[float, float]:
    """A rank's calls and bytes in a step."""
    own = [each for each in view.window.traffic if each.axis == "dp" and each.op in ("all_reduce", "reduce_scatter")]
    ranks = len(view.window.ranks)
    return sum(each.calls for each in own) / ranks, sum(each.num_bytes for each in own) / ranks


def _calls(number: int) -> str:
    return "1 call" if number == 1 else f"{number} calls"
