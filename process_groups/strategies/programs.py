"""Finds a rank's program by the strategy's name."""

from __future__ import annotations

from functools import lru_cache

from process_groups.strategies.hierarchical import hierarchical
from process_groups.strategies.program import Program
from process_groups.strategies.ring import ring
from process_groups.strategies.tree import tree

TREE_CHUNK = 64 << 10  # elements: small enough that a chunk goes down while the next goes up, large enough to move well


@lru_cache(maxsize=256)
def program_of(strategy: str, size: int, rank: int, numel: int, hosts: tuple[int, ...]) -> Program:
    """The steps of one rank; `hosts` are the hosts of the group's ranks."""
    match strategy:
        case "ring":
            return ring(size, rank, numel)
        case "tree":
            return tree(size, rank, numel, TREE_CHUNK)
        case "hierarchical":
            return hierarchical(size, rank, numel, hosts)
    raise AssertionError(strategy)
