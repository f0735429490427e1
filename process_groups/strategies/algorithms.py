"""The all-reduce algorithms as programs: ring, tree and hierarchical, for one rank of a group. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from process_groups.strategies.program import Program, Step, Transfer, split, tidy, transfer

TREE_CHUNK = 64 << 10  # elements: small enough that a chunk goes down while the next goes up, large enough to move well


@lru_cache(maxsize=256)
def program_of(strategy: str, size: int, rank: int, numel: int, hosts: tuple[int, ...]) -> Program:
    """The program of one rank for a strategy; `hosts[i]` is the host of group rank i."""
    match strategy:
        case "ring":
            return ring(size, rank, numel)
        case "tree":
            return tree(size, rank, numel, TREE_CHUNK)
        case "hierarchical":
            return hierarchical(size, rank, numel, hosts)
    raise AssertionError(strategy)


def ring(size: int, rank: int, numel: int) -> Program:
    """Around a ring: each rank sends the least possible, and only to its neighbour.

    Reduce-scatter, then all-gather. Which of the tensor's `size` parts goes where, for 3 ranks:

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


@dataclass(frozen=True, slots=True)
class Node:
    """A rank in one of the trees: the group ranks next to it, and how many hops it is from the root."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


def tree(size: int, rank: int, numel: int, chunk: int) -> Program:
    """Up and down two trees at once: about 2 log(size) hops, where a ring has 2 (size - 1).

    Each of two trees reduces half of the elements to its root and sends the result down, for 7 ranks:

          3             2
       1     5       0     4
      0 2   4 6     6 1   3 5

    An inner node has three times a leaf's work, so no rank is an inner node of both.

    The chunks follow each other. Chunk c leaves a rank of depth d upwards at time c - d, is whole at the root at
    time c, and leaves depth d downwards at time c + d; a step is what a rank does at one time, in both trees. What
    root 3, inner rank 1 and leaf 0 of the left tree do, where `+0` receives chunk 0 and reduces, `=0` replaces:

    time     -2     -1            0              1              2
    rank 3   .      +0            +1 0↓          +2 1↓          2↓
    rank 1   +0     0↑ +1         1↑ +2 =0       2↑ 0↓ =1       1↓ =2   …
    rank 0   0↑     1↑            2↑             =0             =1      …

    A leaf sends as many chunks ahead as there are hops on the way up and down, and waits for the first only then.
    A range that a rank sent upwards is only written by the result, which has passed through the rank that read it:
    so it is safe to read in place.
    """
    trees = list(zip(double_tree(size, rank), split(range(numel), 2), strict=True))
    deepest = max(node.depth for node, _ in trees)
    num_chunks = -(-len(trees[0][1]) // chunk)  # the second tree never has more
    return tidy(_tree_step(trees, chunk, time) for time in range(-deepest - 1, num_chunks + deepest))


def double_tree(size: int, rank: int) -> tuple[Node, Node]:
    """The rank's node in the first tree, and in the second: the same tree with every rank one place further."""
    return _node(size, rank, 0), _node(size, rank, 1)


def _node(size: int, rank: int, shift: int) -> Node:
    """Go down from the root of a search tree over the places 0 … size - 1, to the rank's own place."""
    place = (rank + shift) % size
    start, stop, parent, depth = 0, size, None, 0
    while (root := _root(start, stop)) != place:
        start, stop = (start, root) if place < root else (root + 1, stop)
        parent, depth = (root - shift) % size, depth + 1
    below = [_root(first, end) for first, end in ((start, root), (root + 1, stop)) if first < end]
    return Node(parent, tuple((child - shift) % size for child in below), depth)


def _root(start: int, stop: int) -> int:
    """The middle of the places, or near it: an odd number of places from the start.

    So what is left of a root has an odd length and what is right of it begins at an even place: all leaves stand at
    even places, all inner nodes at odd ones. One place further, that is the other way round.
    """
    length = stop - start
    return start if length == 1 else start + ((length // 2 - 1) | 1)


def _tree_step(trees: Iterable[tuple[Node, range]], chunk: int, time: int) -> Step:
    """What a rank does at a time. Every message is received at the time at which it is sent.

    Two ranks can be parent and child in one tree and child and parent in the other: what goes up is sent before what
    comes down, because it is received before.
    """
    up, down, reduces, replaces = [], [], [], []
    for node, elements in trees:
        chunks = _Chunks(elements, chunk)
        if node.parent is not None:
            up.append(transfer(node.parent, chunks[time + node.depth]))
            replaces.append(transfer(node.parent, chunks[time - node.depth + 1]))
        for child in node.children:
            reduces.append(transfer(child, chunks[time + node.depth + 1]))
            down.append(transfer(child, chunks[time - node.depth]))
    return Step(sends=(*up, *down), reduces=tuple(reduces), replaces=tuple(replaces))


@dataclass(frozen=True, slots=True)
class _Chunks:
    """A tree's elements, cut; a chunk before the first or after the last is empty."""

    elements: range
    length: int

    def __getitem__(self, number: int) -> range:
        return self.elements[max(0, number * self.length) : max(0, (number + 1) * self.length)]


def hierarchical(size: int, rank: int, numel: int, hosts: Sequence[int]) -> Program:
    """In two levels: directly inside a host, in rings between hosts.

    Reduce-scatter in the host, ring all-reduce across hosts, all-gather in the host. hosts[i] is rank i's host.

    There are as many slices as the smallest host has ranks, and a ring for each. For hosts [0, 0, 0, 1, 1]:

                 host 0                host 1
    slice 0      rank 0 ←── ring ──→   rank 3
    slice 1      rank 1 ←── ring ──→   rank 4
    none         rank 2

    Rank 0 first gets slice 0 of ranks 1 and 2 and at last sends them the result; rank 2 only sends and receives. So
    each element crosses between hosts as often as in a ring that has one rank per host.
    """
    assert len(hosts) == size, (size, hosts)
    ranks_of: dict[int, list[int]] = {}  # in the order in which hosts occur, so that lonely ranks form a plain ring
    for member, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(member)
    neighbours = ranks_of[hosts[rank]]
    slices = split(range(numel), min(map(len, ranks_of.values())))
    of_others = tuple(transfer(owner, part) for owner, part in zip(neighbours, slices, strict=False) if owner != rank)
    place = neighbours.index(rank)
    if place >= len(slices):
        return tidy([Step(sends=of_others), Step(replaces=of_others)])

    own = tuple(transfer(peer, slices[place]) for peer in neighbours if peer != rank)
    across = [ranks[place] for ranks in ranks_of.values()]
    return tidy(
        [
            Step(sends=of_others, reduces=own),
            *ring_steps(across, across.index(rank), slices[place]),
            Step(sends=own, replaces=of_others),
        ]
    )
