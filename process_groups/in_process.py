"""A transport for ranks that are tasks of one process: the same contract, for tests that start no processes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from process_groups.call import Call, Completion, Explanation, Place, mismatch, not_made, peer_lost
from process_groups.reduction import combine, finish, wide_dtype
from process_groups.strategies.algorithms import program_of
from process_groups.strategies.program import Program, Transfer
from process_groups.transport import Transport
from runtime.errors import CommunicationError, Coords

CPU = torch.device("cpu")


class InProcessWorld:
    """The state that in-process ranks share. Make one, and give each rank task its own rank number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._exchanges: dict[tuple[int, str, tuple[int, ...]], _Exchange] = {}
        self._meshes_of_rank = [0] * size

    def next_mesh(self, rank: int) -> int:
        """The number of this rank's next mesh; the n-th mesh of every rank is the same mesh."""
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
    """The shared state of one group: calls wait here, by number, until all participants have made them."""

    group_name: str
    places: list[Place]
    waiting: dict[tuple[object, ...], dict[int, tuple[Call, Future[None]]]] = field(default_factory=dict)
    issued: dict[tuple[int, tuple[object, ...]], int] = field(default_factory=dict)
    last: dict[int, Call] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    broken: CommunicationError | None = None


class InProcessTransport(Transport):
    """One rank's end of an exchange. All ranks live on one event loop, so nothing here needs a lock."""

    name = "in-process"
    device = CPU

    def __init__(self, exchange: _Exchange, me: int) -> None:
        self._exchange, self._places, self._me = exchange, exchange.places, me

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
        """Does nothing: a call ends on all ranks together."""

    def abort(self, error: CommunicationError) -> None:
        if self._exchange.broken is None:
            self._exchange.broken = error

    async def close(self, deadline: float) -> None:
        self._exchange.left.add(self._me)


class _Arrival:
    """The Completion of a call that needs other tasks of the same loop. It never waits, which would block them."""

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
    """Execute one call of all ranks. 16-bit floats are added in float32, in rank order or the strategy's order."""
    first = calls[0]
    # Cloned, because a target may also be a source.
    sources = [call.source.clone() for call in calls if call.source is not None]
    targets = [call.target for call in calls if call.target is not None]
    if first.kind == "all_reduce" and first.strategy not in ("default", "adaptive"):
        _run_programs(first, sources, targets)
    elif first.kind != "barrier":
        for target, result in zip(targets, _results(first, sources), strict=True):
            target.copy_(result)


def _results(call: Call, sources: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The results of a call, one per receiving rank. `sources` are in rank order."""
    size = len(sources)
    match call.kind:
        case "all_reduce":
            return [_reduced(sources, call.op)] * size
        case "reduce_scatter":
            return _reduced(sources, call.op).tensor_split(size)
        case "all_gather":
            return [torch.cat([source.reshape(1) if source.dim() == 0 else source for source in sources])] * size
        case "broadcast":
            assert call.peer is not None
            return [sources[call.peer]] * size
        case "all_to_all":
            parts_of = [source.tensor_split(size) for source in sources]
            return [torch.cat([parts[me] for parts in parts_of]) for me in range(size)]
        case "send" | "recv":
            return sources
    raise AssertionError(call.kind)


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


# Strategies: runs the programs of all ranks, with a message queue for each pair (sender, receiver).

Mail = defaultdict[tuple[int, int], deque[torch.Tensor]]
"""Messages in flight, by (sender, receiver)."""


def run_together(programs: Sequence[Program], tensors: Sequence[torch.Tensor], op: str) -> None:
    """All-reduce the ranks' contiguous tensors in place. Raises AssertionError if the programs deadlock."""
    assert len(programs) == len(tensors), (len(programs), len(tensors))
    wide = wide_dtype(tensors[0].dtype, op)
    buffers = [tensor.view(-1).to(wide) for tensor in tensors]  # shares the tensor's memory if the dtype is wide enough
    mail: Mail = defaultdict(deque)
    _interpret({me: _run(programs[me], me, buffer, mail, op) for me, buffer in enumerate(buffers)}, mail)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        finish(buffer, op, len(tensors))
        if tensor.dtype != wide:
            tensor.view(-1).copy_(buffer)


def _interpret(runs: dict[int, Iterator[int]], mail: Mail) -> None:
    """Advance every rank that is not blocked, until all are done."""
    awaited: dict[int, int] = {}
    while runs:
        ready = [me for me in runs if me not in awaited or mail[awaited[me], me]]
        if not ready:
            raise AssertionError("stuck: " + ", ".join(f"rank {me} waits for rank {awaited[me]}" for me in runs))
        for me in ready:
            peer = next(runs[me], None)
            if peer is None:
                del runs[me]
            else:
                awaited[me] = peer
    unread = [pair for pair, queue in mail.items() if queue]
    assert not unread, f"sent and never received, (from, to): {unread}"


def _run(program: Program, me: int, buffer: torch.Tensor, mail: Mail, op: str) -> Iterator[int]:
    """Run one rank's program; yields the sender's rank when a message has not arrived yet."""
    for step in program:
        for send in step.sends:
            mail[me, send.peer].append(buffer[send.start : send.stop].clone())
        for receive in step.reduces:
            theirs = yield from _received(receive, me, mail)
            combine(buffer[receive.start : receive.stop], theirs, op)
        for receive in step.replaces:
            theirs = yield from _received(receive, me, mail)
            buffer[receive.start : receive.stop].copy_(theirs)


def _received(receive: Transfer, me: int, mail: Mail) -> Generator[int, None, torch.Tensor]:
    queue = mail[receive.peer, me]
    if not queue:
        yield receive.peer
    message = queue.popleft()
    # Without this check, torch would broadcast a message of one element to any length.
    assert len(message) == receive.stop - receive.start, f"rank {me} got {len(message)} elements for {receive}"
    return message
