"""The plan of a mesh, and the formed mesh in one rank."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from process_groups.arena import Arena
from process_groups.arguments import STRATEGIES
from process_groups.group import Group
from process_groups.shared_memory.board import Pulse, Segment
from process_groups.strategies.adaptive import CANDIDATES, Pinned
from process_groups.topology import AXES, Topology, auto_order
from process_groups.torch_backend.backends import BACKENDS
from runtime.errors import CommunicationError, Coords, InvalidCall, LaunchError
from runtime.threads import DaemonThreads

GROUP_NAMES = ("world", *AXES)
_AFTER_A_FAILURE = 5.0  # seconds to wait for peers when closing


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The requested mesh; all ranks must pass the same plan."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    order: str | tuple[Coords, ...] = "auto"
    backend: str = "auto"
    timeout: float = 30.0
    startup_timeout: float = 120.0
    strategy: str = "default"
    strategy_table: Pinned = ()
    """(largest size in bytes, strategy) pairs that `adaptive` uses. Empty: it measures."""

    def __post_init__(self) -> None:
        self.topology(1)  # checks sizes and order
        if self.backend not in BACKENDS:
            raise InvalidCall(f"backend = {self.backend!r}: give one of {', '.join(BACKENDS)}.")
        if self.strategy not in STRATEGIES:
            raise InvalidCall(f"strategy = {self.strategy!r}: give one of {', '.join(STRATEGIES)}.")
        for num_bytes, strategy in self.strategy_table:
            if strategy not in CANDIDATES:  # adaptive would ask the table again
                raise InvalidCall(
                    f"strategy_table: {strategy!r} up to {num_bytes} bytes: give one of {', '.join(CANDIDATES)}."
                )
        for name in ("timeout", "startup_timeout"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 1e9:
                raise InvalidCall(f"{name} = {seconds!r}: give seconds, more than 0.")

    def topology(self, ranks_per_host: int) -> Topology:
        if isinstance(self.order, tuple):
            return Topology(self.dp, self.tp, self.pp, table=self.order)
        order = auto_order(self.tp, self.pp, ranks_per_host) if self.order == "auto" else self.order
        return Topology(self.dp, self.tp, self.pp, order=order)

    def check_world_size(self, world_size: int) -> None:
        """Raise LaunchError if the mesh doesn't have exactly as many ranks as were started."""
        wanted = self.topology(1).world_size
        if wanted == world_size:
            return
        started = "1 was" if world_size == 1 else f"{world_size} were"
        raise LaunchError(
            f"dp({self.dp}) x tp({self.tp}) x pp({self.pp}) = {wanted} ranks, but {started} started. "
            f"Start {wanted}: parallel3d launch -n {wanted} script.py; or choose sizes whose product is {world_size}."
        )


@dataclass(frozen=True, slots=True)
class Formation:
    """A formed mesh in one rank: its groups and the resources they use."""

    rank: int
    topology: Topology
    hosts: tuple[str, ...]
    """The host of each rank."""

    groups: dict[str, Group]
    _own: Segment | None = None
    _segments: tuple[Segment, ...] = ()
    _pulses: tuple[Pulse, ...] = ()
    _arena: Arena | None = None
    _issuing: DaemonThreads | None = None
    _store: object = None
    """Kept alive because rank 0 may be the store's server, which stops when this is released."""

    def beat(self) -> None:
        """Show the peers that this rank's event loop is running."""
        if self._own is not None:
            self._own.beat()

    def abort(self, error: CommunicationError) -> None:
        """Abort all groups; peers that wait for this rank get the reason."""
        for group in self.groups.values():
            group.abort(error)

    async def close(self) -> None:
        """Close normally. After a failure, wait only a few seconds, because a lost peer never reports that it is
        done."""
        deadline = time.monotonic() + _AFTER_A_FAILURE
        while not self._all_have_formed() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        failed = any(group.has_failed for group in self.groups.values())
        closing = (group.close(_AFTER_A_FAILURE if failed else group.timeout) for group in self.groups.values())
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _all_have_formed(self) -> bool:
        """Whether all peers on this host have formed the mesh and no longer need the store, or one has died."""
        return all(s.heartbeats for s in self._segments) or any(p.is_dead() for p in self._pulses)

    def release(self) -> None:
        """Unmap the peers' memory; call it after the groups are closed."""
        for segment in self._segments:
            segment.close()
        for pulse in self._pulses:
            pulse.close()
        if self._arena is not None:
            self._arena.close()
        if self._issuing is not None:
            self._issuing.stop()


def ranks_of(topology: Topology, name: str, rank: int) -> tuple[int, ...]:
    return tuple(range(topology.world_size)) if name == "world" else topology.group(name, rank)
