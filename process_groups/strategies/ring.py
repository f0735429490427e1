"""All-reduce around a ring: each rank sends the least possible, and only to its neighbour. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from process_groups.strategies.program import Program, Step, Transfer, split, tidy, transfer


def ring(size: int, rank: int, numel: int) -> Program:
    """Reduce-scatter, then all-gather. Which of the tensor's `size` parts goes where, for 3 ranks:

    step        0 → 1   1 → 2   2 → 0
    0 reduce      2       0       1
    1 reduce      1       2       0     now rank r has the whole sum of part r
    2 replace     0       1       2
    3 replace     2       0       1
    """
    return tidy(ring_steps(range(size), rank, range(numel)))


def ring_steps(members: Sequence[int], place: int, elements: range) -> list[Step]:
    """The ring of some group ranks over some elements, as the member at `place` sees it; ranges may be empty.

    A part that a rank has sent comes back to it only after it went through the next rank, which had to read it for
    that: so it is safe to read in place.
    """
    size = len(members)
    parts = split(elements, size)

    def to_next(part: int) -> tuple[Transfer, ...]:
        return (transfer(members[(place + 1) % size], parts[part % size]),)

    def from_previous(part: int) -> tuple[Transfer, ...]:
        return (transfer(members[place - 1], parts[part % size]),)

    rounds = range(size - 1)
    reduce_scatter = [Step(sends=to_next(place - 1 - i), reduces=from_previous(place - 2 - i)) for i in rounds]
    all_gather = [Step(sends=to_next(place - i), replaces=from_previous(place - 1 - i)) for i in rounds]
    return reduce_scatter + all_gather
