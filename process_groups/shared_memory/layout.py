"""What lies where at the beginning of every arena: counters, offers, staging slots and packets of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from process_groups.pipes import MESSAGE_WORDS

_LINE = 64  # bytes: what two ranks write never shares a cache line
_PAGE = 4096
NUM_SLOTS = 3  # of the staging area: while one is read another is filled, by ranks up to two rounds ahead
CHUNK = 2 << 20  # bytes of a staging slot: large enough that few rounds are needed, small enough for the cache
WINDOW = 512 << 10  # bytes of a running sum that goes from rank to rank: a core's cache has room for it and for values
LEAD = 2  # windows that a rank adds to before it reads one: with more of them, totals have left the cache by then
NUM_WINDOWS = 2 * LEAD + 2
assert NUM_WINDOWS * WINDOW <= NUM_SLOTS * CHUNK
NUM_PACKETS = 4  # under way from one rank to another
PACKET = 256 << 10  # bytes
NUM_MESSAGES = 32  # of a pipe, under way from one rank to another
NUM_ROOMS = 2  # for a rank's parts of tensors that are exchanged: one is read while the next is written


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group's part, as offsets in the arena of each of its ranks."""

    start: int
    size: int
    """Ranks of the group."""

    @property
    def progress(self) -> int:
        """Rounds that the owner has arrived at."""
        return self.start

    @property
    def abort(self) -> int:
        """Not 0 when the owner has given the group up."""
        return self.start + _LINE

    @property
    def result(self) -> int:
        """The latest round whose result the owner has put into its slot for all."""
        return self.start + 4 * _LINE

    @property
    def sleeping(self) -> int:
        """How many threads of the owner may be asleep."""
        return self.start + 5 * _LINE

    @property
    def posted(self) -> int:
        """Words about parts of tensors that the owner exchanges: how many it has posted, where the latest lie (a word a
        room), how many results it has taken."""
        return self.start + 6 * _LINE

    @property
    def windows_added(self) -> int:
        """Windows of running sums that the owner has added its values to."""
        return self.start + 7 * _LINE

    def offer(self, round_number: int) -> int:
        """Where the owner's registered tensor of that round lies, plus 1; 0 when it has none."""
        return self.start + (2 + round_number % 2) * _LINE

    def announced(self, peer: int) -> int:
        """Ranges of a strategy's program that the owner has made ready for a peer."""
        return self._of_peer(0, peer)

    def sent(self, peer: int) -> int:
        """Packets that the owner has made ready for a peer."""
        return self._of_peer(1, peer)

    def consumed(self, peer: int) -> int:
        """Packets from a peer that the owner has read."""
        return self._of_peer(2, peer)

    def piped(self, peer: int) -> int:
        """Messages of a pipe that the owner has made ready for a peer."""
        return self._of_peer(4, peer)

    def taken(self, peer: int) -> int:
        """Messages of a peer's pipe that the owner has taken out."""
        return self._of_peer(5, peer)

    def receiving(self, peer: int) -> int:
        """Words about a tensor that the owner copies from a peer: how many pieces it has begun or come to,
        and where in its arena they go, plus 1; 0 when that is elsewhere."""
        return self._of_peer(6, peer)

    def helping(self, peer: int) -> int:
        """Words about tensors that the owner copies for a peer, from their end: how often it has done with a piece, how
        often it was about to begin one, and the first that is begun."""
        return self._of_peer(7, peer)

    def header(self, peer: int, packet: int) -> int:
        """Of a packet to a peer: its bytes, and the offset of a registered buffer plus 1 where it stands for one."""
        return self._of_peer(3, peer) + packet % NUM_PACKETS * 16

    def _of_peer(self, kind: int, peer: int) -> int:
        return self.start + (8 + kind * self.size + peer) * _LINE

    def slot(self, round_number: int) -> int:
        """The staging slot of a round."""
        return self.start + self._control_size(self.size) + round_number % NUM_SLOTS * CHUNK

    def window(self, number: int) -> int:
        """Where the first rank has a window of a running sum: in its staging slots."""
        return self.slot(0) + number % NUM_WINDOWS * WINDOW

    def packet(self, peer: int, packet: int) -> int:
        first = self.start + self._control_size(self.size) + NUM_SLOTS * CHUNK
        return first + (peer * NUM_PACKETS + packet % NUM_PACKETS) * PACKET

    def message(self, peer: int, number: int) -> int:
        """What a message to a peer consists of."""
        first = self.packet(self.size, 0)
        return first + (peer * NUM_MESSAGES + number % NUM_MESSAGES) * MESSAGE_WORDS * 8

    @property
    def stop(self) -> int:
        return self.message(self.size, 0)

    @staticmethod
    def _control_size(size: int) -> int:
        return -(-(8 + 8 * size) * _LINE // _PAGE) * _PAGE


def lay_out(group_sizes: Sequence[int]) -> list[GroupLayout]:
    """Each group's part; the first page holds the arena's nonce."""
    layouts, start = [], _PAGE
    for size in group_sizes:
        layouts.append(GroupLayout(start, size))
        start = layouts[-1].stop
    return layouts
