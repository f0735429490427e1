"""Ranks that are tasks of one process: the same contract as real ranks, for tests that start nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from process_groups.strategies.arithmetic import combine, finish, wide_dtype
from process_groups.strategies.programs import program_of
from process_groups.strategies.together import run_together
from process_groups.transport import Call, Completion, Explanation, Place, mismatch, not_made, peer_lost
from runtime.errors import CommunicationError, Coords

CPU = torch.device("cpu")


class InProcessWorld:
    """What the ranks of one in-process mesh share. Make one, and give each rank task its own number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._exchanges: dict[tuple[int, str, tuple[int, ...]], _Exchange] = {}
        self._meshes_of_rank = [0] * size

    def next_mesh(self, rank: int) -> int:
        """The n-th mesh of every rank is the same mesh."""
        self._meshes_of_rank[rank] += 1
        return self._meshes_of_rank[rank]

    def transport(
        self, mesh: int, name: str, ranks: tuple[int, ...], me: int, coords_of: Callable[[int], Coords]
    ) -> InProcessTransport:
        places = [Place(rank, coords_of(rank)) for rank in ranks]
        exchange = self._exchanges.setdefault((mesh, name, ranks), _Exchange(name, places))
        return InProcessTransport(exchange, me)


@dataclass(slots=True)
class _Exchange:
    """One group's meeting point: calls wait here, by number, until everyone who must make them has come."""

    group_name: str
    places: list[Place]
    waiting: dict[tuple[object, ...], dict[int, tuple[Call, Future[None]]]] = field(default_factory=dict)
    issued: dict[tuple[int, tuple[object, ...]], int] = field(default_factory=dict)
    last: dict[int, Call] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    broken: CommunicationError | None = None


class InProcessTransport:
    """One rank's end of an exchange. All ranks live on one event loop, so nothing here needs a lock."""

    name = "in-process"
    device = CPU

    def __init__(self, exchange: _Exchange, me: int) -> None:
        self._exchange, self._places, self._me = exchange, exchange.places, me

    def extra_seconds(self, num_bytes: int) -> float:
        return 0.0

    def start(self, call: Call) -> Completion:
        channel = self._channel(call)
        self._exchange.issued[self._me, channel] = call.number
        if not call.is_point_to_point:
            self._exchange.last[self._me] = call
        place = self._exchange.waiting.setdefault((*channel, call.number), {})
        for peer, (other, _) in place.items():
            if other.terms != call.terms:
                raise mismatch(self._exchange.group_name, call, self._places[self._me], self._places[peer], other.terms)
        outcome: Future[None] = Future()
        place[self._me] = (call, outcome)
        if len(place) == (2 if call.is_point_to_point else len(self._places)):
            del self._exchange.waiting[*channel, call.number]
            carry_out([place[rank][0] for rank in sorted(place)])
            for _, future in place.values():
                future.set_result(None)
        return _Arrival(outcome)

    def _channel(self, call: Call) -> tuple[object, ...]:
        if not call.is_point_to_point:
            return ("collective",)
        return (self._me, call.peer) if call.kind == "send" else (call.peer, self._me)

    def trouble(self, call: Call) -> CommunicationError | None:
        if self._exchange.broken is not None:
            return self._exchange.broken
        gone = next((peer for peer in self._unmade(call) if peer in self._exchange.left), None)
        if gone is None:
            return None
        return peer_lost(self._exchange.group_name, call, self._places[gone], "left the mesh")

    def culprit(self, call: Call) -> tuple[int, str] | None:
        peer = next(iter(self._unmade(call)), None)
        if peer is None:
            return None
        latest = self._exchange.last.get(peer)
        num_made = self._exchange.issued.get((peer, self._channel(call)), 0)
        return peer, not_made(call, num_made, latest.terms if latest is not None else None)

    def _unmade(self, call: Call) -> list[int]:
        """The peers that have not made the call yet."""
        channel = self._channel(call)
        partners = [call.peer] if call.is_point_to_point else range(len(self._places))
        return [
            peer
            for peer in partners
            if peer is not None and peer != self._me and self._exchange.issued.get((peer, channel), 0) < call.number
        ]

    def explain(self, strategy: str, num_bytes: int) -> Explanation:
        if strategy == "adaptive":
            return Explanation("default", "there is nothing to adapt to in one process")
        return Explanation(strategy, "one process adds up in rank order" if strategy == "default" else "asked for")

    def finished(self, call: Call) -> None:
        """Nothing to tell: the peers' ends were settled together."""

    def abort(self, error: CommunicationError) -> None:
        if self._exchange.broken is None:
            self._exchange.broken = error

    async def close(self, deadline: float) -> None:
        self._exchange.left.add(self._me)


class _Arrival:
    """The end of a call that waits for other tasks of the same loop: waiting inline could only block them."""

    ended_at = None

    def __init__(self, outcome: Future[None]) -> None:
        self._outcome = outcome

    def ended_well(self, seconds: float) -> bool:
        return self._outcome.done()

    def exception(self) -> None:
        return None

    def add_done_callback(self, callback: Callable[[Completion], None], /) -> None:
        self._outcome.add_done_callback(lambda _: callback(self))


def carry_out(calls: list[Call]) -> None:
    """Do what all ranks together asked for. 16-bit floats are added up in float32, in rank order or the strategy's."""
    # Copies: a target may be a source too.
    sources = [call.source.clone() for call in calls if call.source is not None]
    targets = [call.target for call in calls if call.target is not None]
    match calls[0].kind:
        case "all_reduce" if calls[0].strategy not in ("default", "adaptive"):  # nothing to adapt to in one process
            _run_programs(calls[0], sources, targets)
        case "all_reduce":
            total = _reduced(sources, calls[0].op)
            for target in targets:
                target.copy_(total)
        case "reduce_scatter":
            parts = _reduced(sources, calls[0].op).tensor_split(len(calls))
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)
        case "all_gather":
            whole = torch.cat([source.reshape(1) if source.dim() == 0 else source for source in sources])
            for target in targets:
                target.copy_(whole)
        case "broadcast":
            root = calls[0].peer
            assert root is not None
            for target in targets:
                target.copy_(sources[root])
        case "all_to_all":
            parts_of = [source.tensor_split(len(calls)) for source in sources]
            for me, target in enumerate(targets):
                target.copy_(torch.cat([parts[me] for parts in parts_of]))
        case "send" | "recv":
            targets[0].copy_(sources[0])


def _run_programs(call: Call, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    assert call.op is not None
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    size, numel = len(targets), targets[0].numel()
    programs = [program_of(call.strategy, size, rank, numel, hosts=(0,) * size) for rank in range(size)]
    run_together(programs, targets, call.op)


def _reduced(tensors: list[torch.Tensor], op: str | None) -> torch.Tensor:
    assert op is not None
    dtype = tensors[0].dtype
    wide = wide_dtype(dtype, op)
    total = tensors[0].to(wide, copy=True)
    for tensor in tensors[1:]:
        combine(total, tensor.to(wide), op)
    finish(total, op, len(tensors))
    return total.to(dtype)
