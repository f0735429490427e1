"""A group's bytes through memory that its ranks share: all of them on one host, CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from process_groups.arena import Mapping
from process_groups.call import POINT_TO_POINT, Call, Explanation
from process_groups.call_queue import ENDED, CallQueue, Channel, Ended, Quick, Steps, Task, is_short
from process_groups.counters import patience
from process_groups.shared_memory.collectives import FLAT, FlatAllReduce, is_flat, steps_of
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import GroupLayout
from process_groups.shared_memory.ledger import Ledger, Member
from process_groups.shared_memory.link import SharedLink
from process_groups.shared_memory.packets import Packets
from process_groups.shared_memory.pipes import SharedPipe
from process_groups.shared_memory.tensor_exchange import SharedTensorExchange
from process_groups.strategies.adaptive import Adaptive, Pinned
from process_groups.strategies.algorithms import program_of
from process_groups.strategies.execute import all_reduce_steps
from process_groups.strategies.measurements import layout_of
from process_groups.strategies.program import Program
from runtime.errors import CommunicationError, GroupClosed

CPU = torch.device("cpu")


class SharedMemoryTransport:
    """One group in shared memory. Members and arenas stand in the order of group ranks."""

    name = "shared-memory"
    device = CPU
    repeats_up_to = FLAT

    def __init__(
        self,
        group_name: str,
        members: Sequence[Member],
        arenas: Sequence[Mapping],
        me: int,
        layout: GroupLayout,
        num_ranks_here: int,
        pinned: Pinned = (),
    ) -> None:
        self._name_of_group = group_name
        self._ledger = ledger = Ledger(group_name, members, me)
        self.trouble, self.culprit, self.finished = ledger.trouble, ledger.culprit, ledger.finished
        self._exchange = Exchange(arenas, me, layout)
        self._patience = patience(num_ranks_here)
        self._collectives = self._make_queue("collectives")
        self._packets = Packets(self._exchange, self._make_queue)
        self._links = {peer: SharedLink(self._exchange, peer) for peer in range(len(arenas)) if peer != me}
        self._pinned, layout_name = pinned, layout_of(self.name, (0,) * len(arenas))
        self._adaptive = Adaptive(self._steps, self._scratch, me, layout_name, pinned, above=FLAT)
        self._has_given_up = False
        self._tensor_exchange: SharedTensorExchange | None = None

    def _make_queue(self, what: str) -> CallQueue:
        name = f"parallel3d-{self._name_of_group}-{what}"
        return CallQueue(name, self._patience, self._exchange.is_abandoned, self._explain)

    def _explain(self, call: Call) -> CommunicationError:
        return self._ledger.trouble(call) or GroupClosed(f"group {self._name_of_group} was aborted")

    def start(self, call: Call) -> Task | Ended:
        if not self._ledger.post_at_once(call):  # once it is this call's turn, the peers are near
            queue, steps = self._queue_and_steps(call)
            return queue.add(call, self._ledger.post_first(call, steps), is_short=False)
        quick = self._quick(call)
        if quick is not None and quick.is_next():
            left = quick.begin(call)
            return ENDED if left is None else quick.queue.add_waiting(call, left)
        queue, steps = self._queue_and_steps(call)
        return queue.add(call, steps, is_short(call) and (not self._is_chosen(call) or self._adaptive.is_ready))

    def pipe(self, peer: int) -> SharedPipe:
        """To and from a peer, for the engine thread."""
        call = Call("recv", peer=peer, number=sys.maxsize, terms="a message")  # one that will never have been made
        return SharedPipe(self._exchange, peer, self._patience, lambda: self._ledger.trouble(call))

    def tensor_exchange(self, timeout: float, abort: Callable[[CommunicationError], object]) -> SharedTensorExchange:
        """With all ranks of the group, for the engine thread. There is one per group: its counters are in the arena."""
        if self._tensor_exchange is None:
            call = Call("all_reduce", number=sys.maxsize, terms="an exchange of tensors")  # never made, as above
            self._tensor_exchange = SharedTensorExchange(
                self._exchange,
                self._name_of_group,
                self._ledger.places,
                self._patience,
                timeout,
                lambda: self._ledger.trouble(call),
                abort,
            )
        return self._tensor_exchange

    def repeatable(self, call: Call) -> tuple[Quick, Channel] | None:
        quick = self._quick(call)
        return None if quick is None else (quick, self._ledger.channel(call))

    def _quick(self, call: Call) -> Quick | None:
        """How such a call is carried out at once, if it is small."""
        if call.target is not None and call.target.is_inference():
            return None
        if call.kind in POINT_TO_POINT:
            return self._packets.quick(call)
        is_default = call.strategy == "default" or (call.strategy == "adaptive" and not self._is_chosen(call))
        if not is_flat(call) or call.is_empty or not is_default:
            return None
        queue = self._collectives
        return Quick(queue, lambda: queue.is_idle, self._begin_flat)

    def _is_chosen(self, call: Call) -> bool:
        """Whether it is adaptive's to choose a strategy. Small calls are one round by default, and no strategy takes
        less; but a table that the user gave is followed."""
        return call.strategy == "adaptive" and (bool(self._pinned) or not is_flat(call))

    def _begin_flat(self, call: Call) -> Steps | None:
        flat = FlatAllReduce(self._exchange, call)
        return None if flat.at_once() else flat.steps()

    def _queue_and_steps(self, call: Call) -> tuple[CallQueue, Steps]:
        if call.kind in POINT_TO_POINT:
            return self._packets.queue_and_steps(call)
        if call.is_empty:
            return self._collectives, iter(())
        if self._is_chosen(call):
            return self._collectives, self._adaptive.steps(call)
        return self._collectives, self._steps(call, "default" if call.strategy == "adaptive" else call.strategy)

    def _steps(self, call: Call, strategy: str) -> Steps:
        if strategy == "default":
            return steps_of(self._exchange, call)
        program = partial(self._program, strategy)
        return all_reduce_steps(call, program, self._links, self._exchange, self._exchange.size)

    def _scratch(self, num_bytes: int) -> torch.Tensor:
        registered = self._exchange.own.empty((num_bytes,), torch.uint8)
        return torch.empty(num_bytes, dtype=torch.uint8) if registered is None else registered

    def extra_seconds(self, num_bytes: int) -> float:
        return self._adaptive.extra_seconds if num_bytes > FLAT else 0.0

    def explain(self, strategy: str, num_bytes: int) -> Explanation:
        if strategy == "adaptive" and (self._pinned or num_bytes > FLAT):
            return self._adaptive.explain(num_bytes)
        if strategy == "adaptive":
            return Explanation("default", "one round through the staging slots, and no strategy takes less")
        if strategy != "default":
            return Explanation(strategy, "asked for")
        how = (
            "one round through the staging slots"
            if num_bytes <= FLAT
            else "each rank reduces its slice of registered buffers and writes it to all; other tensors are added up "
            "by running sums"
        )
        return Explanation("default", f"shared memory's own way; {how}")

    def _program(self, strategy: str, numel: int) -> Program:
        return program_of(strategy, self._exchange.size, self._exchange.me, numel, (0,) * self._exchange.size)

    def _queues(self) -> Iterator[CallQueue]:
        yield self._collectives
        yield from self._packets.queues()

    def abort(self, error: CommunicationError) -> None:
        if self._has_given_up:
            return
        self._has_given_up = True
        self._ledger.close(error)
        self._exchange.give_up()
        self._stop()

    async def close(self, deadline: float) -> None:
        if not self._has_given_up:
            exchange = self._tensor_exchange
            await self._ledger.wait_for_peers(deadline, None if exchange is None else exchange.is_read_by)
        if not self._has_given_up:  # nor meanwhile
            self._has_given_up = True
            self._ledger.close(None)
            self._stop()

    def _stop(self) -> None:
        for queue in self._queues():
            queue.stop()
