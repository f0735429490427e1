"""Issues a group's calls on its transport: numbers them, follows them to their end, and aborts the group on failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import increment_version

from monitoring.events.collectives import CollectiveRecorder
from process_groups.arguments import check_timeout, check_writable
from process_groups.call import POINT_TO_POINT, Call, describe_terms
from process_groups.call_queue import ENDED
from process_groups.transport import Transport
from process_groups.work import CopyBack, Work
from runtime.errors import CommunicationError, Coords, DeadlineExceeded, GroupClosed, name_rank

Numbering = tuple[str, int | None] | None
"""What calls are numbered by: (kind, peer) for sends and receives, None for all collectives together."""

_LOOP_TURN = 0.005  # seconds for which calls that end immediately may keep the loop from other tasks
_SIZED_BY_RESULT = frozenset(("all_gather", "recv"))  # recorded with the result's bytes; others with the input's


def numbering(kind: str, peer: int | None) -> Numbering:
    return (kind, peer) if kind in POINT_TO_POINT else None


class Issuer:
    """Issues this rank's calls on one group. Event loop's thread only. A group of one has no transport."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        transport: Transport | None,
        coords_of: Callable[[int], Coords],
        timeout: float,
        recorder: CollectiveRecorder | None,
    ) -> None:
        self.name, self.size, self.timeout, self.transport, self.recorder = (
            name, len(ranks), timeout, transport, recorder,
        )  # fmt: skip
        self._ranks, self._rank, self._coords_of = ranks, rank, coords_of
        self.under_way: set[Work] = set()
        self.numbers: dict[Numbering, int] = {}
        """Number of calls made so far."""
        self.closed: CommunicationError | None = None
        """Why no more calls are possible."""
        self._loop_had_its_turn = 0.0

    def start(
        self,
        kind: str,
        shown: torch.Tensor,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        *,
        op: str | None = None,
        peer: int | None = None,
        timeout: float | None,
        strategy: str = "default",
        shared: bool = False,
    ) -> Work:
        """Make a call that moves a tensor; `shown` is the one whose dtype and shape the ranks must agree on."""
        limit = self._limit(timeout)
        if strategy == "adaptive" and self.transport is not None and target is not None:
            limit += self.transport.extra_seconds(target.nbytes)
        moved_from = None if source is None else _plain(source)
        moved_to = copy_back = None
        if target is not None:
            moved_to = moved_from if source is target and moved_from is not None else _plain(target)
            if moved_to is not target and moved_to.data_ptr() != target.data_ptr():
                check_writable(kind, target)
                copy_back = CopyBack(staging=moved_to, to=target.detach())
            if not target.is_inference():  # so that autograd notices if a tensor it has saved is overwritten
                increment_version(target)
        terms = describe_terms(kind, op, peer, shown.dtype, shown.shape, strategy, shared)
        number = self._next_number(kind, peer)
        call = Call(kind, moved_from, moved_to, op, peer, limit, number, terms, strategy, shared=shared)
        return self._issue(call, target if target is not None else source, copy_back)

    def barrier(self, timeout: float | None) -> Work:
        """Make a call that moves nothing."""
        limit, number = self._limit(timeout), self._next_number("barrier", None)
        return self._issue(Call("barrier", timeout=limit, number=number, terms=describe_terms("barrier")), None, None)

    def _limit(self, timeout: float | None) -> float:
        if timeout is None:
            return self.timeout
        check_timeout(timeout)
        return float(timeout)

    def _next_number(self, kind: str, peer: int | None) -> int:
        key = numbering(kind, peer)
        number = self.numbers.get(key, 0) + 1
        self.numbers[key] = number
        return number

    def _issue(self, call: Call, result: torch.Tensor | None, copy_back: CopyBack | None) -> Work:
        if self.closed is not None:
            raise GroupClosed(
                f"{call.kind}: group {self.name} is closed: {self.closed}",
                rank=self.closed.rank,
                coords=self.closed.coords,
                action=call.describe(),
            )
        began = time.monotonic()
        if self.transport is None:
            work = Work(self, call, result, copy_back, began)
            if call.source is not None and call.target is not None:
                call.target.copy_(call.source.view_as(call.target))
            work.end_well()
            return work
        completion, error = None, None
        try:
            completion = self.transport.start(call)  # as early as possible: peers wait
        except CommunicationError as refused:
            error = refused
        work = Work(self, call, result, copy_back, began, completion)
        if completion is ENDED:
            work.end_well()
            return work
        self.under_way.add(work)
        if error is not None:
            self.fail(work, error)
        return work

    # The WorkOwner methods, called by calls under way.

    def settled(self, work: Work, error: CommunicationError | None) -> None:
        self.under_way.discard(work)
        if error is None and self.transport is not None:
            self.transport.finished(work.call)
        if error is None and self.recorder is not None:
            self._record(work, self.recorder)

    def _record(self, work: Work, recorder: CollectiveRecorder) -> None:
        seconds, call = work.ended_at() - work.began, work.call
        tensor = call.target if call.kind in _SIZED_BY_RESULT else call.source
        num_bytes = 0 if tensor is None else tensor.nbytes
        strategy = call.carried_out_by or ("default" if call.strategy == "adaptive" else call.strategy)
        recorder.record(self.name, call.kind, strategy, call.strategy, num_bytes, self.size, seconds, work.began)

    def has_kept_the_loop(self) -> bool:
        now = time.monotonic()
        if now - self._loop_had_its_turn < _LOOP_TURN:
            return False
        self._loop_had_its_turn = now
        return True

    def trouble(self, call: Call) -> CommunicationError | None:
        assert self.transport is not None
        return self.transport.trouble(call)

    def too_late(self, call: Call, seconds: float) -> DeadlineExceeded:
        assert self.transport is not None
        what = f"{call.describe()} on group {self.name} did not end within {round(seconds, 3):g} s"
        culprit = self.transport.culprit(call)
        if culprit is None:
            return DeadlineExceeded(f"{what}, though every rank has called it.", action=call.describe())
        who, how = culprit
        rank = self._ranks[who]
        coords = self._coords_of(rank)
        return DeadlineExceeded(
            f"{what}: {name_rank(rank, coords)} {how}.",
            rank=rank,
            coords=coords,
            action=call.describe(),
        )

    def cancelled(self, call: Call) -> None:
        me = self._ranks[self._rank]
        coords = self._coords_of(me)
        message = f"{name_rank(me, coords)} cancelled {call.describe()} on group {self.name}"
        self.abort(GroupClosed(message, rank=me, coords=coords, action=call.describe()))

    def fail(self, work: Work, error: CommunicationError) -> None:
        if error.action is None:
            error.action = work.call.describe()
        work.settle(error)
        self.abort(error)

    # Ending the group.

    def abort(self, error: CommunicationError) -> None:
        """Close the group on every rank."""
        self.closed = self.closed or error
        if self.transport is not None:
            self.transport.abort(error)
        for work in list(self.under_way):
            closed = f"group {self.name} was closed: {error}"
            work.settle(GroupClosed(closed, rank=error.rank, coords=error.coords, action=work.call.describe()))

    async def close(self, seconds: float) -> None:
        """Await the calls under way, then close normally."""
        deadline = time.monotonic() + seconds
        try:
            for work in list(self.under_way):
                work.hurry(deadline)
                await work
        finally:
            self.closed = self.closed or GroupClosed("this rank has left the mesh")
            if self.transport is not None:
                await self.transport.close(time.monotonic() + seconds)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a contiguous plain tensor without gradient; shares its memory if possible, otherwise a copy."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        if tensor.numel() == 1 and tensor.dim() and tensor.stride(-1) != 1:  # torch can't view that as bytes
            tensor = tensor.view(()).view(tensor.shape)
        return tensor.detach() if tensor.requires_grad or type(tensor) is not torch.Tensor else tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
