"""A call as transports get it, what they give back for it, and the errors that name its ranks."""

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
    """What the ranks must agree on, as the same text on each: `all_reduce(sum, ring) of float32 (4, 5)`."""
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


@dataclass(slots=True, eq=False)  # made for every call, and freezing would double what that costs
class Call:
    """One collective, send or receive as this rank makes it. Tensors are contiguous and never need a gradient.

    `source` is read and `target` is written; for an in-place call they are the same tensor. Nothing but
    `carried_out_by` and `result` is changed after it was made.
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
    """Its place, from 1, among this rank's collectives of the group, its sends to `peer` or receives from it."""

    terms: str = ""
    """What the ranks must agree on, see `describe_terms`."""

    strategy: str = "default"
    """How an all-reduce is carried out: default, ring, tree, hierarchical or adaptive."""

    carried_out_by: str | None = None
    """The strategy that `adaptive` chose."""

    memory: memoryview | None = None
    """The bytes of the one tensor of a small call, where they are at hand: copying them so saves a microsecond."""

    shared: bool = False
    """Whether the ranks may have one result of an all-reduce in common."""

    result: torch.Tensor | None = None
    """That one, where they have; it takes the place of the target."""

    def copy(self) -> Call:
        """What dataclasses.replace gives, but it takes four times as long."""
        return Call(
            self.kind, self.source, self.target, self.op, self.peer,
            self.timeout, self.number, self.terms, self.strategy, self.carried_out_by, self.memory,
        )  # fmt: skip

    @property
    def is_point_to_point(self) -> bool:
        return self.kind in POINT_TO_POINT

    @property
    def is_empty(self) -> bool:
        """Whether there are no bytes to move; on every rank, for the terms say so."""
        tensor = self.target if self.target is not None else self.source
        return tensor is not None and tensor.numel() == 0

    def describe(self) -> str:
        """How messages show the call."""
        return f"{self.kind} of {self.terms}" if self.is_point_to_point else self.terms


@dataclass(frozen=True, slots=True)
class Place:
    """A rank and where it sits, as messages name it."""

    rank: int
    coords: Coords

    def __str__(self) -> str:
        return name_rank(self.rank, self.coords)


def mismatch(group_name: str, call: Call, me: Place, peer: Place, their_terms: str) -> Mismatch:
    """The error that names both ranks and what each of them called."""
    mine, theirs = {"send": ("sends", "receives"), "recv": ("receives", "sends")}.get(call.kind, ("calls", "calls"))
    return Mismatch(
        f"call number {call.number} on group {group_name}: {me} {mine} {call.terms}, "
        f"but {peer} {theirs} {their_terms}.",
        rank=peer.rank,
        coords=peer.coords,
        action=call.describe(),
    )


def peer_lost(group_name: str, call: Call, peer: Place, how: str) -> PeerLost:
    """The error for a call that a peer will never take part in."""
    return PeerLost(
        f"{peer} {how}; {call.describe()} on group {group_name} can't end.",
        rank=peer.rank,
        coords=peer.coords,
        action=call.describe(),
    )


def not_made(call: Call, num_made: int, last_terms: str | None) -> str:
    """What a peer has not done, and what it did last: the rest of a sentence that begins with its name."""
    if call.kind == "send":
        return f"has not received it; of what was sent from here it has asked for {num_made}"
    if call.kind == "recv":
        return f"has not sent it; so far it has sent {num_made} here"
    last = f"its last call there was {last_terms} (number {num_made})" if last_terms else "it has called nothing there"
    return f"has not called it; {last}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What carries an all-reduce of some size out, and why."""

    strategy: str
    why: str
    seconds: dict[str, float] = field(default_factory=dict)
    """What each strategy is known to take for such a size."""

    def __str__(self) -> str:
        known = ", ".join(f"{name} {seconds * 1e6:,.0f} µs" for name, seconds in self.seconds.items())
        return f"{self.strategy}: {self.why}" + (f" ({known})" if known else "")


class Completion(Protocol):
    """The end of one started call."""

    @property
    def ended_at(self) -> float | None:
        """The moment it ended, of time.monotonic, where that is known."""

    def ended_well(self, seconds: float) -> bool:
        """Whether the call has ended without error; may wait so long where that costs less than a hand-over."""

    def exception(self) -> BaseException | None:
        """What went wrong, once done. A transport raises CommunicationError only."""

    def add_done_callback(self, callback: Callable[[Completion], None], /) -> object:
        """Call back from any thread, at once when already done."""
