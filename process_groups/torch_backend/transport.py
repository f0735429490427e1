"""A group's bytes through torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from process_groups.call import POINT_TO_POINT, Call, Completion, Explanation
from process_groups.call_queue import CallQueue, Steps, Task, is_short
from process_groups.counters import Abandoned, patience
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.ledger import Ledger, Member
from process_groups.shared_memory.link import SharedLink
from process_groups.shared_memory.packets import Packets
from process_groups.strategies.adaptive import Adaptive, Pinned
from process_groups.strategies.algorithms import program_of
from process_groups.strategies.execute import Link, all_reduce_steps
from process_groups.strategies.measurements import layout_of
from process_groups.torch_backend.backends import OpenBackend
from process_groups.torch_backend.nccl_strategies import NcclStrategies
from process_groups.torch_backend.network_link import NetworkLink
from process_groups.torch_backend.store_notes import StoreNotes
from process_groups.torch_internals import BACKSTOP, TorchBackend, TorchWork, issue
from process_groups.transport import Transport
from runtime.errors import CommunicationError, DeadlineExceeded, GroupClosed, PeerLost
from runtime.threads import DaemonThreads

_TERMS = 256  # bytes in which ranks on different hosts compare a call
_WITHOUT_FUTURE = ("send", "recv", "reduce_scatter")  # gloo gives these none, so a thread waits for them
_LOST_WORDS = ("closed by peer", "reset by peer", "Broken pipe", "Read error", "Write error", "Socket closed")


def translate(error: BaseException) -> CommunicationError:
    """The one place where torch's errors become ours."""
    if isinstance(error, CommunicationError):
        return error
    text = str(error).partition("\n")[0]
    if "timed out" in text.lower() or "timeout" in text.lower():
        return DeadlineExceeded(text)
    if any(word in text for word in _LOST_WORDS):
        return PeerLost(f"a peer's connection is gone: {text}")
    return CommunicationError(text)


Channel = tuple[str, int | None]
"""Calls that are carried out in the order they are made: all collectives, the sends to a peer, its receives."""


def _channel(call: Call) -> Channel:
    return (call.kind, call.peer) if call.kind in POINT_TO_POINT else ("collective", None)


class TorchTransport(Transport):
    """One group over a torch backend. `members` stand in the order of group ranks."""

    def __init__(
        self,
        kind: str,
        opened: OpenBackend,
        store: dist.Store,
        name: str,
        members: Sequence[Member],
        me: int,
        device: torch.device,
        hosts: tuple[int, ...],
        exchange: Exchange | None = None,
        num_ranks_here: int = 1,
        nccl: NcclStrategies | None = None,
        issuing: DaemonThreads | None = None,
        pinned: Pinned = (),
    ) -> None:
        """`hosts` are numbers, one for each rank; `exchange` is shared with those on this host, if there is one.

        `issuing` is the one thread in which all NCCL groups of a mesh make their communicators: two groups that did
        so at once, in different orders on two ranks, would wait for each other.
        """
        self.name, self.device = kind, device
        self._hosts, self._exchange, self._nccl, self._issuing = hosts, exchange, nccl, issuing
        self._patience = patience(num_ranks_here)
        self._backend: TorchBackend | None = opened.backend
        self._cut = opened.cut
        self._under_way: dict[Call, Started] = {}
        self._released: Future[None] | None = None
        self._name_of_group, self._members, self._me = name, members, me
        self._ledger = Ledger(name, members, me)
        self._threads = DaemonThreads(f"parallel3d-{name}")
        spans_hosts = any(member.page is None for member in members)
        self._notes = StoreNotes(store, name, members, me, self._threads) if spans_hosts else None
        self._threads_of: dict[tuple[str, Channel], DaemonThreads] = {}
        self._num_later = 0
        self._counting = threading.Lock()
        self._packets = Packets(exchange, self._make_queue) if exchange is not None else None
        self._adaptive = Adaptive(self._steps, self._scratch, me, layout_of(kind, hosts), pinned, self.device)
        self._links = {peer: self._link(peer) for peer in range(len(members)) if peer != me}

    def _make_queue(self, what: str) -> CallQueue:
        assert self._exchange is not None
        name = f"parallel3d-{self._name_of_group}-{what}"
        return CallQueue(name, self._patience, self._exchange.is_abandoned, self._explain)

    def _explain(self, call: Call) -> CommunicationError:
        return self.trouble(call) or GroupClosed(f"group {self._name_of_group} was aborted")

    def _link(self, peer: int) -> Link:
        if self._exchange is not None and self._exchange.arenas[peer] is not None:
            return SharedLink(self._exchange, peer)
        return NetworkLink(peer, self._hand_over)

    def start(self, call: Call) -> Started:
        completion: Started
        if self._packets is not None and call.kind in POINT_TO_POINT and self._packets.reaches(call.peer):
            queue, steps = self._packets.queue_and_steps(call)
            completion = queue.add(call, self._ledger.posted(call, steps), is_short(call))
        elif call.strategy != "default":
            completion = self._start_later(call)
        elif self._notes is None and not self._num_later and self._ledger.has_room(call):
            self._ledger.post(call)
            completion = self._issue(call)
        else:
            completion = self._start_later(call)
        self._under_way[call] = completion
        return completion

    def _start_later(self, call: Call) -> ThreadCompletion:
        """In a thread that keeps the channel's order: where peers on other hosts must first be asked what they
        call, or where this rank is so far ahead of a peer that the board has no room."""
        if self._notes is not None:
            self._notes.made(call)
        channel = _channel(call)
        with self._counting:
            self._num_later += 1
        outcome: Future[None] = Future()
        self._in_order("issue", channel).submit(self._check_then_issue, call, outcome)
        return ThreadCompletion(outcome)

    def _in_order(self, purpose: str, channel: Channel) -> DaemonThreads:
        """The one thread that does this for the calls of a channel, one after the other, as they also end."""
        if self._issuing is not None and purpose == "issue":
            return self._issuing
        key = (purpose, channel)
        if key not in self._threads_of:
            self._threads_of[key] = DaemonThreads(f"parallel3d-{self._name_of_group}-{purpose}", limit=1)
        return self._threads_of[key]

    def _issue(self, call: Call) -> TorchCompletion | ThreadCompletion:
        if call.is_empty:
            return _ENDED
        try:
            work = self._hand_over(call, tag=2 * call.number)
        except RuntimeError as error:  # gloo refuses at once where it knows that a connection is gone
            return ThreadCompletion(_failed(translate(error)))
        if self.device.type == "cpu" and call.kind not in _WITHOUT_FUTURE:
            return TorchCompletion(work)
        # NCCL's futures are ready before the device is.
        waiter = self._in_order("wait", _channel(call))
        return ThreadCompletion(waiter.submit(_wait_for, work, call.timeout, self.device))

    def _hand_over(self, call: Call, tag: int) -> TorchWork:
        backend = self._backend
        if backend is None:  # a thread of ours may come late
            raise GroupClosed("the group was aborted")
        if call.strategy != "default" and self._nccl is not None:
            return self._nccl.issue(call, call.strategy)
        return issue(backend, call, tag)

    def _check_then_issue(self, call: Call, outcome: Future[None]) -> None:
        try:
            self._wait_for_room(call)
            self._ledger.post(call)
            # NCCL moves no CPU tensors, and all its groups have one thread: a header that is waited for would hold up
            # the very call that it waits for. There the notes alone tell who has called what.
            compares = self._notes is not None and self.name != "nccl"
            header = self._compare_across_hosts(call) if compares else None
            if call.strategy != "default" and not call.is_empty:
                self._carry_out(call)
                outcome.set_result(None)
                return
            # gloo forgets a send whose Work is gone: the header's lives until the call has ended.
            self._issue(call).add_done_callback(partial(_hand_on, outcome, header))
        except Abandoned:
            outcome.set_exception(self._explain(call))
        except BaseException as error:
            outcome.set_exception(translate(error))
        finally:
            with self._counting:
                self._num_later -= 1

    def _carry_out(self, call: Call) -> None:
        """An all-reduce by a strategy, in this thread."""
        adaptive = call.strategy == "adaptive"
        for counter, target in self._adaptive.steps(call) if adaptive else self._steps(call, call.strategy):
            assert self._exchange is not None
            counter.reaches(target, math.inf, self._patience, self._exchange.is_abandoned)

    def _steps(self, call: Call, strategy: str) -> Steps:
        if strategy == "default" or self._nccl is not None:
            work = self._hand_over(replace(call, strategy=strategy), tag=0)
            _wait_for(work, call.timeout, self.device)
            return iter(())
        size, me = len(self._members), self._me
        program = partial(program_of, strategy, size, me, hosts=self._hosts)
        return all_reduce_steps(call, program, self._links, self._exchange, size)

    def _scratch(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def extra_seconds(self, num_bytes: int) -> float:
        return self._adaptive.extra_seconds

    def explain(self, strategy: str, num_bytes: int) -> Explanation:
        if strategy == "adaptive":
            return self._adaptive.explain(num_bytes)
        why = f"{self.name}'s own way" if strategy == "default" else "asked for"
        return Explanation(strategy, why)

    def _wait_for_room(self, call: Call) -> None:
        deadline = time.monotonic() + call.timeout
        while not self._ledger.has_room(call):
            if self._backend is None or time.monotonic() > deadline:
                raise DeadlineExceeded("a peer is too far behind")
            time.sleep(0.001)

    def _compare_across_hosts(self, call: Call) -> TorchWork | None:
        """Raise Mismatch where a peer has called something else. A sender only tells: its Work is returned."""
        terms = call.terms.encode()[:_TERMS].ljust(_TERMS)
        mine = torch.frombuffer(bytearray(terms), dtype=torch.uint8)
        if call.kind == "send":
            header = Call("send", mine, peer=call.peer, timeout=call.timeout)
            return self._hand_over(header, tag=2 * call.number + 1)
        if call.kind == "recv":
            senders, theirs = [call.peer], torch.empty(_TERMS, dtype=torch.uint8)
            header = Call("recv", target=theirs, peer=call.peer, timeout=call.timeout)
        else:
            senders = list(range(len(self._members)))
            theirs = torch.empty(len(senders) * _TERMS, dtype=torch.uint8)
            header = Call("all_gather", mine, theirs, timeout=call.timeout)
        limit = timedelta(seconds=call.timeout + BACKSTOP)
        self._hand_over(header, tag=2 * call.number + 1).wait(limit)
        for sender, other in zip(senders, theirs.reshape(-1, _TERMS), strict=True):
            text = bytes(other.tolist())
            if sender is not None and text != terms:
                raise self._ledger.mismatch(call, sender, text.decode().rstrip())
        return None

    def trouble(self, call: Call) -> CommunicationError | None:
        error = self._ledger.trouble(call)
        return self._notes.trouble(call) if error is None and self._notes is not None else error

    def culprit(self, call: Call) -> tuple[int, str] | None:
        found = self._ledger.culprit(call)
        return self._notes.culprit(call) if found is None and self._notes is not None else found

    def finished(self, call: Call) -> None:
        del self._under_way[call]
        self._ledger.finished(call)

    def abort(self, error: CommunicationError) -> None:
        if self._released is not None:
            return
        self._ledger.close(error)
        if self._notes is not None:
            self._notes.broken(error)
        if self._exchange is not None:
            self._exchange.give_up()
        self._cut()
        if self._nccl is not None:
            self._nccl.abort()
        self._released = self._release()

    async def close(self, deadline: float) -> None:
        if self._notes is not None and self._released is None:
            await self._notes.wait_for_peers(deadline)
        if self._released is None:
            await self._ledger.wait_for_peers(deadline)
        if self._released is None:  # not aborted meanwhile
            self._ledger.close(None)
            self._released = self._release()
        await asyncio.wait([asyncio.wrap_future(self._released)], timeout=max(0.0, deadline - time.monotonic()))

    def _release(self) -> Future[None]:
        """Give the backend up, in a thread: its destructor waits for calls that have not ended."""
        backend, under_way = [self._backend, self._nccl], list(self._under_way.values())
        self._backend = self._nccl = None

        def release() -> None:
            deadline = time.monotonic() + BACKSTOP
            while not all(completion.has_ended() for completion in under_way) and time.monotonic() < deadline:
                time.sleep(0.001)
            backend.clear()

        released = self._threads.submit(release)
        queues = self._packets.queues() if self._packets is not None else ()
        for threads in (self._threads, *self._threads_of.values(), *queues):
            threads.stop()
        return released


class TorchCompletion:
    """The end of a collective that gloo's own threads carry out."""

    ended_at = None

    def __init__(self, work: TorchWork) -> None:
        self._work = work

    def has_ended(self) -> bool:
        return self._work.is_completed()

    def ended_well(self, seconds: float) -> bool:
        is_completed, now, give_way = self._work.is_completed, time.perf_counter, os.sched_yield
        end = now() + seconds
        while not is_completed():
            if now() > end:
                return False
            give_way()  # gloo's threads need the core more than we do
        try:
            return self._work.wait()
        except RuntimeError:
            return False

    def exception(self) -> CommunicationError | None:
        try:
            self._work.get_future().value()
        except RuntimeError as error:
            return translate(error)
        return None

    def add_done_callback(self, callback: Callable[[Completion], None], /) -> None:
        # Called before the Work itself counts as completed: waiting for that in the callback would never end.
        self._work.get_future().add_done_callback(lambda _: callback(self))


class ThreadCompletion:
    """The end of a call that a thread of ours waits for."""

    ended_at = None

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def has_ended(self) -> bool:
        return self._future.done()

    def ended_well(self, seconds: float) -> bool:
        try:
            return self._future.exception(seconds) is None
        except TimeoutError:
            return False

    def exception(self) -> CommunicationError | None:
        error = self._future.exception()
        return None if error is None else translate(error)

    def add_done_callback(self, callback: Callable[[Completion], None], /) -> None:
        self._future.add_done_callback(lambda _: callback(self))


def _ended() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _failed(error: CommunicationError) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future


_ENDED = ThreadCompletion(_ended())
Started = TorchCompletion | ThreadCompletion | Task


def _hand_on(outcome: Future[None], header: TorchWork | None, ended: Completion) -> None:
    """Pass on how a call ended. `header` is here only to live until now."""
    error = ended.exception()
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


def _wait_for(work: TorchWork, timeout: float, device: torch.device) -> None:
    work.wait(timedelta(seconds=timeout + BACKSTOP))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
