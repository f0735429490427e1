"""The call that a transport receives, the completion that it returns, and the errors that name the ranks involved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch

from runtime.errors import Coords, Mismatch, PeerLost, name_rank

POINT_TO_POINT = frozenset(("send", "recv"))


@lru_cache(maxsize=4096)
def describe_terms(
    kind: str,
    op: str | None = None,
    peer: int | None = None,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] = (),
    strategy: str = "default",
    shared: bool = False,
) -> str:
    """What all ranks must agree on, as text to compare: `all_reduce(sum, ring) of float32 (4, 5)`."""
    what = "" if dtype is None else f"{str(dtype)[6:]} {tuple(shape)}"
    if kind in POINT_TO_POINT:
        return what
    how = op if op is not None else f"root {peer}" if kind == "broadcast" else None
    if strategy != "default":
        how = f"{how}, {strategy}"
    if shared:
        how = f"{how}, shared"
    name = kind if how is None else f"{kind}({how})"
    return f"{name} of {what}" if what else name


@dataclass(slots=True, eq=False)  # one is made per call, and frozen=True would double the cost
class Call:
    """One collective, send or receive of this rank. Tensors are contiguous and never require a gradient.

    `source` is read and `target` is written; for an in-place call they are the same tensor. Transports change only
    `carried_out_by` and `result`.
    """

    kind: str
    """all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, barrier, send or recv."""

    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    op: str | None = None
    peer: int | None = None
    """The group rank at the other end (send, recv), or the root (broadcast)."""

    timeout: float = 30.0
    number: int = 0
    """Sequence number from 1: among this rank's collectives on the group, its sends to `peer`, or its receives from
    `peer`."""

    terms: str = ""
    """What the ranks must agree on, see `describe_terms`."""

    strategy: str = "default"
    """The strategy of an all-reduce: default, ring, tree, hierarchical or adaptive."""

    carried_out_by: str | None = None
    """The strategy that `adaptive` chose."""

    memory: memoryview | None = None
    """The tensor's bytes, set for repeated small calls: copying through it is a microsecond faster."""

    shared: bool = False
    """Whether the ranks may share one result tensor of an all-reduce."""

    result: torch.Tensor | None = None
    """The shared result if there is one; it replaces the target."""

    def copy(self) -> Call:
        """A copy; dataclasses.replace takes four times as long."""
        return Call(
            self.kind, self.source, self.target, self.op, self.peer,
            self.timeout, self.number, self.terms, self.strategy, self.carried_out_by, self.memory,
        )  # fmt: skip

    @property
    def is_point_to_point(self) -> bool:
        return self.kind in POINT_TO_POINT

    @property
    def is_empty(self) -> bool:
        """Whether there are no bytes to move. The same on every rank, because the terms contain the shape."""
        tensor = self.target if self.target is not None else self.source
        return tensor is not None and tensor.numel() == 0

    def describe(self) -> str:
        """The call as shown in messages."""
        return f"{self.kind} of {self.terms}" if self.is_point_to_point else self.terms


@dataclass(frozen=True, slots=True)
class Place:
    """A rank and its mesh coordinates, as shown in messages."""

    rank: int
    coords: Coords

    def __str__(self) -> str:
        return name_rank(self.rank, self.coords)


def mismatch(group_name: str, call: Call, me: Place, peer: Place, their_terms: str) -> Mismatch:
    """The error for ranks whose calls differ; names both ranks and what each called."""
    mine, theirs = {"send": ("sends", "receives"), "recv": ("receives", "sends")}.get(call.kind, ("calls", "calls"))
    return Mismatch(
        f"call number {call.number} on group {group_name}: {me} {mine} {call.terms}, "
        f"but {peer} {theirs} {their_terms}.",
        rank=peer.rank,
        coords=peer.coords,
        action=call.describe(),
    )


def peer_lost(group_name: str, call: Call, peer: Place, how: str) -> PeerLost:
    """The error for a call that can't complete because a peer is gone."""
    return PeerLost(
        f"{peer} {how}; {call.describe()} on group {group_name} can't end.",
        rank=peer.rank,
        coords=peer.coords,
        action=call.describe(),
    )


def not_made(call: Call, num_made: int, last_terms: str | None) -> str:
    """What a peer has not done and what it did last, to follow the peer's name in a message."""
    if call.kind == "send":
        return f"has not received it; of what was sent from here it has asked for {num_made}"
    if call.kind == "recv":
        return f"has not sent it; so far it has sent {num_made} here"
    last = f"its last call there was {last_terms} (number {num_made})" if last_terms else "it has called nothing there"
    return f"has not called it; {last}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The strategy that an all-reduce of some size uses, and why."""

    strategy: str
    why: str
    seconds: dict[str, float] = field(default_factory=dict)
    """Known seconds of each strategy for this size."""

    def __str__(self) -> str:
        known = ", ".join(f"{name} {seconds * 1e6:,.0f} µs" for name, seconds in self.seconds.items())
        return f"{self.strategy}: {self.why}" + (f" ({known})" if known else "")


class Completion(Protocol):
    """Tells when and how a started call ends."""

    @property
    def ended_at(self) -> float | None:
        """When it ended, in time.monotonic() seconds; None if not known."""

    def ended_well(self, seconds: float) -> bool:
        """Whether the call has ended without error. May wait up to `seconds`, which is cheaper than switching threads
        for a call that ends soon."""

    def exception(self) -> BaseException | None:
        """The error of an ended call, if any. Transports use only CommunicationError."""

    def add_done_callback(self, callback: Callable[[Completion], None], /) -> object:
        """Call `callback` from any thread when the call ends; immediately if it has ended."""
