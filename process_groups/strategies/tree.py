"""All-reduce up and down two trees at once: about 2 log(size) hops, where a ring has 2 (size - 1). No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from process_groups.strategies.program import Program, Step, split, tidy, transfer


@dataclass(frozen=True, slots=True)
class Node:
    """A rank in one of the trees: the group ranks next to it, and how many hops it is from the root."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


def tree(size: int, rank: int, numel: int, chunk: int) -> Program:
    """Each of two trees reduces half of the elements to its root and sends the result down, for 7 ranks:

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
    return tidy(_step(trees, chunk, time) for time in range(-deepest - 1, num_chunks + deepest))


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


def _step(trees: Iterable[tuple[Node, range]], chunk: int, time: int) -> Step:
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
