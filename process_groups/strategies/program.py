"""What one rank does in an all-reduce: a list of steps over ranges of the flat tensor. No torch.

The programs of a group's ranks keep these rules together:

(a) For each ordered pair of ranks, the first send meets the first receive, the second the second, and so on; both
    name the same range.
(b) No range is empty.
(c) If no send ever waits, no rank waits for ever.
(d) They may be read in place. Over shared memory a send only announces that a range is ready, and the receiver reads
    it straight out of the sender's buffer, later. So a rank that has sent a range writes into it only after a message
    that could not have come, through however many ranks, before the receiver had applied the range.
(e) At the end every rank has the reduction of all ranks' values in every element, and the same bits: each element's
    final value is computed on one rank and then only copied.

Rule (d) ends with the program: its last sends may still be unread when a rank has nothing left to do, so whoever reads
in place must learn that they were read before it gives the tensor back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Transfer:
    """A range of elements of the flat tensor, to or from a group rank."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """First every send is started (it never waits), then each receive is awaited in this order and applied."""

    sends: tuple[Transfer, ...] = ()

    reduces: tuple[Transfer, ...] = ()
    """Received, and combined with what stands here: mine = mine (op) theirs."""

    replaces: tuple[Transfer, ...] = ()
    """Received, and stored."""


Program = tuple[Step, ...]


def transfer(peer: int, elements: range) -> Transfer:
    return Transfer(peer, elements.start, elements.stop)


def split(elements: range, parts: int) -> list[range]:
    """Cut as evenly as possible; what is left over goes to the first parts, as in `torch.tensor_split`."""
    each, left_over = divmod(len(elements), parts)
    borders = [part * each + min(part, left_over) for part in range(parts + 1)]
    return [elements[start:stop] for start, stop in pairwise(borders)]


def tidy(steps: Iterable[Step]) -> Program:
    """Leave out the empty ranges, then the steps that have nothing left; so algorithms need not think of either."""
    filled = (Step(_filled(step.sends), _filled(step.reduces), _filled(step.replaces)) for step in steps)
    return tuple(step for step in filled if step != Step())


def _filled(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    return tuple(one for one in transfers if one.start < one.stop)
