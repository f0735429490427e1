"""Compares this rank's calls with its peers', and finds the peer that is missing, gone or has aborted."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from process_groups.call import POINT_TO_POINT, Call, Place, mismatch, not_made, peer_lost
from process_groups.call_queue import Steps
from process_groups.shared_memory.board import Page, Pulse, Ring
from runtime.errors import CommunicationError, Mismatch

_STANDS_STILL = 0.4  # seconds: eight heartbeats


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a group, as this process sees it; no page and no pulse where it is on another host."""

    place: Place
    page: Page | None
    pulse: Pulse | None


class LedgerChannel:
    """Calls that have one order, this rank's and its partners': the collectives, the sends to a peer, or the receives
    from it."""

    __slots__ = ("_mine", "_mismatch", "_room_until", "_theirs", "finish")

    def __init__(
        self, mine: Ring, theirs: Sequence[tuple[int, Ring]], mismatch: Callable[[Call, int, str], Mismatch]
    ) -> None:
        """`mismatch(call, peer, their terms)` is the error to raise."""
        self._mine, self._theirs, self._mismatch, self._room_until = mine, theirs, mismatch, 0
        self.finish = mine.finish
        """The oldest call that has not finished has."""

    def post(self, call: Call) -> None:
        """Write down a call; raises Mismatch if a peer has already called something else in its place."""
        word = self._mine.post(call.number, call.terms)
        for index, ring in self._theirs:
            other = ring.differs(call.number, word)
            if other is not None:
                raise self._mismatch(call, index, other)

    def post_at_once(self, call: Call) -> bool:
        """Write a call down, unless the board has no room or an earlier call still waits for room."""
        if self._mine.issued != call.number - 1 or not self.has_room(call.number):
            return False
        self.post(call)
        return True

    def has_room(self, number: int) -> bool:
        """Whether every partner is near enough to compare the call with its own when it comes to it."""
        if number >= self._room_until:  # asked seldom: the partners have gone on since
            self._room_until = min((ring.room_until for _, ring in self._theirs), default=sys.maxsize)
        return number < self._room_until


class Ledger:
    """One group's calls, as far as shared memory shows them. Members stand in the order of group ranks."""

    def __init__(self, group_name: str, members: Sequence[Member], me: int) -> None:
        self._group_name, self._members, self._me = group_name, members, me
        own = members[me].page
        assert own is not None
        self._own = own
        self._seen = [(i, m) for i, m in enumerate(members) if i != me and m.page is not None]
        theirs = [(i, m.page.collectives) for i, m in self._seen if m.page]
        self._collectives = LedgerChannel(own.collectives, theirs, self.mismatch)
        self._pairs: dict[tuple[str, int | None], LedgerChannel] = {}

    @property
    def places(self) -> list[Place]:
        """Of the group's ranks."""
        return [member.place for member in self._members]

    def channel(self, call: Call) -> LedgerChannel:
        """Where a call stands in order."""
        return self._collectives if call.kind not in POINT_TO_POINT else self._pair(call)

    def post(self, call: Call) -> None:
        """Write down a call; raises Mismatch where a peer has already called something else in its place."""
        self.channel(call).post(call)

    def posted(self, call: Call, steps: Steps) -> Steps:
        """The steps of a call that is written down now, or by its first step where the board has no room yet: once it
        is this call's turn, the peers are near."""
        return steps if self.post_at_once(call) else self.post_first(call, steps)

    def post_at_once(self, call: Call) -> bool:
        """Write a call down, unless the board has no room or an earlier call still waits for room."""
        return self.channel(call).post_at_once(call)

    def post_first(self, call: Call, steps: Steps) -> Steps:
        """The steps, after writing the call down."""
        self.post(call)
        yield from steps

    def mismatch(self, call: Call, peer: int, their_terms: str) -> Mismatch:
        me, other = self._members[self._me].place, self._members[peer].place
        return mismatch(self._group_name, call, me, other, their_terms)

    def finished(self, call: Call) -> None:
        self.channel(call).finish()

    def trouble(self, call: Call) -> CommunicationError | None:
        """Why `call` will never end: a peer gave the group up, died, or left without making the call."""
        for _, member in self._seen:
            assert member.page is not None
            if (error := member.page.broken_by()) is not None:
                return error
        for index, member in self._partners(call):
            assert member.page is not None
            if member.pulse is not None:
                member.pulse.seconds_still()  # looked at now, it can tell later
            dead = member.pulse is not None and member.pulse.is_dead()  # first: it may have left before it ended
            if member.page.has_left:
                lost = "left the mesh" if self._theirs(call, index).issued < call.number else None
            else:
                lost = "died" if dead else None
            if lost is not None:
                return peer_lost(self._group_name, call, member.place, lost)
        return None

    def culprit(self, call: Call) -> tuple[int, str] | None:
        """A peer that has not made `call`, or else one that has and stands still."""
        for index, member in self._partners(call):
            assert member.page is not None
            issued = self._theirs(call, index).issued
            if issued < call.number:
                return index, not_made(call, issued, member.page.collectives.read(member.page.collectives.issued))
        for index, member in self._partners(call):
            still = member.pulse.seconds_still() if member.pulse is not None else 0.0
            if still > _STANDS_STILL:
                return index, f"has called it, but its event loop has not moved for {still:.1f} s"
        return None

    def has_room(self, call: Call) -> bool:
        return self.channel(call).has_room(call.number)

    def close(self, error: CommunicationError | None) -> None:
        self._own.close(error)

    async def wait_for_peers(self, deadline: float, is_read_by: Callable[[int], bool] | None = None) -> None:
        """Wait until each peer has finished all that it shares with this rank, or is gone.

        `is_read_by` says whether a peer has read all that lies outside of the calls on record.
        """
        # Shared memory has no events for the loop, so we look again and again.
        while not self._are_finished(is_read_by) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    def _are_finished(self, is_read_by: Callable[[int], bool] | None) -> bool:
        return all(
            self._is_gone(member) or (self._is_finished(index, member) and (is_read_by is None or is_read_by(index)))
            for index, member in self._seen
        )

    @staticmethod
    def _is_gone(member: Member) -> bool:
        page = member.page
        assert page is not None
        has_given_up = page.has_left or page.broken_by() is not None
        return has_given_up or (member.pulse is not None and member.pulse.is_dead())

    def _is_finished(self, index: int, member: Member) -> bool:
        page = member.page
        assert page is not None
        return (
            page.collectives.finished >= self._own.collectives.issued
            and page.receives[self._me].finished >= self._own.sends[index].issued
        )

    def _partners(self, call: Call) -> list[tuple[int, Member]]:
        """The peers in shared memory that must make the call too."""
        return [(i, m) for i, m in self._seen if i == call.peer] if call.is_point_to_point else self._seen

    def _pair(self, call: Call) -> LedgerChannel:
        found = self._pairs.get((call.kind, call.peer))
        if found is None:
            theirs = [(index, self._theirs(call, index)) for index, _ in self._partners(call)]
            assert call.peer is not None
            mine = (self._own.sends if call.kind == "send" else self._own.receives)[call.peer]
            found = self._pairs[call.kind, call.peer] = LedgerChannel(mine, theirs, self.mismatch)
        return found

    def _theirs(self, call: Call, index: int) -> Ring:
        page = self._members[index].page
        assert page is not None
        if not call.is_point_to_point:
            return page.collectives
        return (page.receives if call.kind == "send" else page.sends)[self._me]
