"""Parameters that every tensor-parallel rank has, but uses for its part of the values: a norm of cut heads, say.

Each rank's gradient of such a parameter is a part of it, and the parts have to be added up. Nobody has to say which
parameters those are: autograd's graph has them between a rank's part of the values and the columns it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from parallel3d.gradients.deferred import adds_by_hand
from parallel3d.gradients.finalize import needs_tp_sum
from parallel3d.tensor.sharded import cut_of
from runtime.errors import InvalidCall

Judge = Callable[[Any], bool]
"""Of a node of autograd's graph."""
Sum = Callable[[torch.Tensor], torch.Tensor]
"""A gradient's sum over the ranks."""


def sum_partial_gradients(values: torch.Tensor, path: str, is_column: Judge, is_whole: Judge, add_up: Sum) -> None:
    """Have gradients added up from now on, of parameters that these values, a rank's part, come from.

    path: whose input the values are, for messages.
    is_column: the search ends at these nodes.
    is_whole: nodes that give values of which every rank has all.
    """
    for node in _nodes(values, is_column):
        if is_whole(node):
            raise _mixed(path, "values of which every rank has all")
        if adds_by_hand(node):
            raise _mixed(path, "a Linear or Embedding that is not cut")
        leaf = getattr(node, "variable", None)
        if leaf is None:
            continue
        if not isinstance(leaf, nn.Parameter):
            raise _mixed(path, "values of which every rank has all")
        if cut_of(leaf) is None and not needs_tp_sum(leaf) and not hasattr(leaf, "is_added_up"):
            leaf.is_added_up = True  # type: ignore[attr-defined]
            leaf.register_hook(add_up)  # type: ignore[no-untyped-call]


def is_part(values: torch.Tensor, is_column: Judge, is_whole: Judge) -> bool:
    """Whether each rank has another part of such values, as far as autograd's graph tells. The nearest node that knows
    is enough, for parts and whole values are not mixed."""
    for node in _nodes(values, lambda _: False):
        if is_column(node) or is_whole(node):
            return is_column(node)
    return False


def _nodes(values: torch.Tensor, is_end: Judge) -> Iterator[Any]:
    """The graph from these values back to where it ends."""
    seen: set[Any] = set()
    found: list[Any] = [values.grad_fn]
    while found:
        node = found.pop()
        if node is not None and node not in seen and not is_end(node):
            seen.add(node)
            yield node
            found += [before for before, _ in node.next_functions]


def _mixed(path: str, what: str) -> InvalidCall:
    return InvalidCall(
        f"parallel.tensor_plan: the input of {path}, of which each rank has a part, comes from columns and also from "
        f"{what}, whose gradient would be wrong on every rank. Between columns and what joins them again there may be "
        "parameters that are used directly, as a norm's. Cut the rest as well, or have all of it replicated."
    )
