"""A group's bytes through memory that its ranks share: all of them on one host, CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from process_groups.arena import Mapping
from process_groups.exchange import Exchange, is_short
from process_groups.lane import Lane, Steps, Task
from process_groups.ledger import Ledger, Member
from process_groups.shared_collectives import steps_of
from process_groups.shared_layout import GroupLayout
from process_groups.shared_packets import Inbox, Outbox
from process_groups.signals import patience
from process_groups.transport import POINT_TO_POINT, Call
from runtime.errors import CommunicationError, GroupClosed

CPU = torch.device("cpu")
_SHORT = 1 << 20  # bytes that the event loop moves itself, in about 0.2 ms; a thread does more


class SharedMemoryTransport:
    """One group in shared memory. Members and arenas stand in the order of group ranks."""

    name = "shared-memory"
    device = CPU

    def __init__(
        self,
        group_name: str,
        members: Sequence[Member],
        arenas: Sequence[Mapping],
        me: int,
        layout: GroupLayout,
        num_ranks_here: int,
    ) -> None:
        self._name_of_group, self._me, self._layout, self._arenas = group_name, me, layout, arenas
        self._ledger = Ledger(group_name, members, me)
        self._exchange = Exchange(arenas, me, layout)
        self._patience = patience(num_ranks_here)
        self._collectives = self._make_lane("collectives")
        self._boxes: dict[tuple[str, int], tuple[Lane, Outbox | Inbox]] = {}
        self._left_behind: list[Call] = []
        self._has_given_up = False

    def _make_lane(self, what: str) -> Lane:
        name = f"parallel3d-{self._name_of_group}-{what}"
        return Lane(name, self._patience, self._exchange.is_abandoned, self._explain)

    def _explain(self, call: Call) -> CommunicationError:
        return self._ledger.trouble(call) or GroupClosed(f"group {self._name_of_group} was given up")

    def start(self, call: Call) -> Task:
        lane, steps = self._lane_and_steps(call)
        if self._ledger.has_room(call):
            self._ledger.post(call)
        else:  # once it is this call's turn, the peers are near
            steps = self._post_first(call, steps)
        return lane.add(call, steps, is_short(call, _SHORT))

    def _post_first(self, call: Call, steps: Steps) -> Steps:
        self._ledger.post(call)
        yield from steps

    def _lane_and_steps(self, call: Call) -> tuple[Lane, Steps]:
        if call.kind not in POINT_TO_POINT:
            return self._collectives, iter(()) if call.is_empty else steps_of(self._exchange, call)
        assert call.peer is not None
        lane, box = self._box(call.kind, call.peer)
        return lane, box.send(call) if isinstance(box, Outbox) else box.receive(call)

    def _box(self, kind: str, peer: int) -> tuple[Lane, Outbox | Inbox]:
        if (kind, peer) not in self._boxes:
            me, mine, theirs = self._me, self._arenas[self._me], self._arenas[peer]
            box = (
                Outbox(self._layout, mine, theirs, me, peer)
                if kind == "send"
                else Inbox(self._layout, theirs, mine, peer, me)
            )
            self._boxes[kind, peer] = self._make_lane(f"{kind}-{peer}"), box
        return self._boxes[kind, peer]

    def _lanes(self) -> Iterator[Lane]:
        yield self._collectives
        for lane, _ in self._boxes.values():
            yield lane

    def trouble(self, call: Call) -> CommunicationError | None:
        return self._ledger.trouble(call)

    def culprit(self, call: Call) -> tuple[int, str] | None:
        return self._ledger.culprit(call)

    def finished(self, call: Call) -> None:
        self._ledger.finished(call)

    def abort(self, error: CommunicationError) -> None:
        if self._has_given_up:
            return
        self._has_given_up = True
        self._ledger.close(error)
        self._exchange.give_up()
        # A peer may be writing a last piece into these buffers: they are not handed out again.
        self._left_behind = [task.call for lane in self._lanes() for task in lane.unfinished()]
        self._stop()

    async def close(self, deadline: float) -> None:
        if not self._has_given_up:
            await self._ledger.farewell(deadline)
        if not self._has_given_up:  # nor meanwhile
            self._has_given_up = True
            self._ledger.close(None)
            self._stop()

    def _stop(self) -> None:
        for lane in self._lanes():
            lane.stop()
