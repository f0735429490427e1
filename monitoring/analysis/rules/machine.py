"""Rules about the machines: ranks that come late, too few cores, event loops that are held up."""

from __future__ import annotations

from collections.abc import Iterator

from monitoring.analysis.facts import RankFacts
from monitoring.analysis.observations import Bottleneck, Severity, Straggler
from monitoring.analysis.rules.levels import severity_of
from monitoring.analysis.rules.view import WORTH_IT, View, duration, is_alone, percent, saved

_LEAST_LAGS = 20  # timers, about a second of one rank: fewer have no 95th percentile


def oversubscribed_cores(view: View) -> Iterator[Bottleneck]:
    """More ranks on a host than it has cores for, and they wait for one."""
    for host, members in view.hosts.items():
        cores = max(member.num_cores for member in members)
        if all(member.is_cpu for member in members) and 0 < cores < len(members):
            yield from _without_core(view, host, members, cores)


def _without_core(view: View, host: str, members: list[RankFacts], cores: int) -> Iterator[Bottleneck]:
    # A straggler lacks a core for a reason of its own.
    slow = {each.rank for each in view.window.stragglers}
    waits = [
        window.core_wait
        for each in members
        if each.rank not in slow and (window := view.window.ranks.get(each.rank)) is not None
    ]
    share = view.share(sum(waits) / len(waits)) if waits else 0.0
    severity = severity_of("oversubscribed_cores", share)
    if severity is None:
        return
    axis = next((name for name in ("dp", "tp", "pp") if getattr(view.facts, name) > 1), "dp")
    yield Bottleneck(
        kind="oversubscribed_cores",
        severity=severity,
        message=f"{len(members)} ranks share {_count(cores, 'core')} of {_host(host)}: "
        f"{percent(share)} of a step they wait for one.",
        evidence={"ranks": len(members), "cores": cores, "core_wait_share": share},
        remedy=f"Start at most {_count(cores, 'rank')} on this host: make parallel.{axis} smaller, or use more hosts. "
        "What is gained is what a core for each rank would save.",
        key=f"parallel.{axis}",
        value=_fitting(view, axis, cores),
        gain=saved(share),
        host=host or None,
    )


def _fitting(view: View, axis: str, cores: int) -> str | None:
    """The largest size of the axis with which all ranks have a core, where there is one host."""
    now = getattr(view.facts, axis)
    others = view.facts.world_size // now
    fitting = [size for size in range(1, now) if now % size == 0 and size * others <= cores]
    return str(fitting[-1]) if fitting and len(view.hosts) == 1 else None


def stragglers(view: View) -> Iterator[Bottleneck]:
    """One for each rank that the detector has named and that others wait for; one for a host of which all are slow."""
    together: dict[str | int, list[Straggler]] = {}
    for each in view.window.stragglers:
        together.setdefault(each.rank if each.host is None else each.host, []).append(each)
    for those in together.values():
        gain = max(straggling(view, each) for each in those)
        if gain > WORTH_IT:
            yield _straggler(view, those, gain)


_COMPARED = {
    "peers": "{} of the speed of ranks with the same work",
    "itself": "{} of the speed of its own earlier steps",
    "processor": "it has a core for {} as much of its computing as other ranks",
    "arrival": "a step would take {} of its time, did it not come late to where ranks meet",
}


_SLOW = (
    "Look at what slows it down on {}: another program, heat, a slower processor, or a sleep, a lock or a file that "
    "your model waits for. Start the ranks elsewhere, or order them so that it holds up fewer."
)
_REMEDIES = {
    "processor": "Give it back its core on {}: end what else runs there, lift its quota, use fewer threads a rank. A "
    "sleep, a lock or a file that your model waits for looks the same.",
    "arrival": "Its forwards and backwards are as quick as others', so look at what it does between them on {}: your "
    "script's own code, a file, garbage collection, another program.",
}


def _straggler(view: View, those: list[Straggler], gain: float) -> Bottleneck:
    worst = min(those, key=lambda each: each.score)
    rank, host = (None, worst.host) if worst.host is not None else (worst.rank, None)
    who = f"All ranks of {_host(worst.host)} are" if worst.host is not None else f"Rank {worst.rank} is"
    where = _host(view.ranks[worst.rank].host) if worst.rank in view.ranks else "its host"
    return Bottleneck(
        kind="straggler",
        severity=severity_of("straggler", 1 - worst.score) or Severity.LOW,
        message=f"{who} slow since step {worst.since_step}: "
        f"{_COMPARED[worst.compared_with].format(percent(worst.score))}.",
        evidence={
            "rank": worst.rank,
            "score": worst.score,
            "compared_with": worst.compared_with,
            "since_step": worst.since_step,
            "ranks": len(those),
            "waiting_share": view.part("straggler"),
        },
        remedy=_REMEDIES.get(worst.compared_with, _SLOW).format(where),
        key="runtime.threads" if worst.compared_with == "processor" else "parallel.order",
        gain=gain,
        rank=rank,
        host=host,
    )


def straggling(view: View, straggler: Straggler) -> float:
    """The share of a step by which its computing takes too long, or it comes late, as far as somebody waits. Steps of
    the window in which it was not yet slow count as such: a bad moment is no bottleneck."""
    own = view.window.ranks.get(straggler.rank)
    if own is None:
        return 0.0
    whole = own.seconds if straggler.compared_with == "arrival" else own.compute_wall
    lately = min(1.0, (view.window.last_step - straggler.since_step + 1) / view.window.num_steps)
    too_long = whole * (1 - straggler.score) * lately
    waits = [
        rank.parts["straggler"] + rank.parts["bubble"]
        for number, rank in view.window.ranks.items()
        if number != straggler.rank
    ]
    return saved(view.share(min(too_long, max(waits, default=too_long))))


def event_loop_lag(view: View) -> Iterator[Bottleneck]:
    """Timers come late: something holds up the event loop, which starts reductions and answers for the rank."""
    lags = {rank: lag for rank, lag in view.window.lag.items() if sum(lag.counts) >= _LEAST_LAGS}
    if not lags or any(each.compared_with == "processor" for each in view.window.stragglers):
        return  # without a core its event loop is late too
    late = {rank: lag.quantile(0.95) for rank, lag in lags.items()}  # more than a moment without a core now and then
    worst = max(late, key=lambda rank: late[rank])
    severity = severity_of("event_loop_lag", late[worst])
    if severity is not None:
        alone, lag = is_alone(late, worst), lags[worst]
        whose = f"rank {worst}'s event loop" if alone else "the event loops"
        yield Bottleneck(
            kind="event_loop_lag",
            severity=severity,
            message=f"One in 20 timers of {whose} comes {duration(late[worst])} late or later, the worst "
            f"{duration(lag.worst)}.",
            evidence={"p95_seconds": late[worst], "worst_seconds": lag.worst, "timers": sum(lag.counts)},
            remedy="Find what runs on the event loop, or holds Python's lock: a blocking call in your script, Python "
            "code in the dataset. Where it is torch's threads that take all cores, use fewer.",
            key="runtime.threads",
            value="1",
            rank=worst if alone else None,
        )


def _host(host: str | None) -> str:
    return f"host {host}" if host else "the host"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
