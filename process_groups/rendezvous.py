"""The rendezvous of a mesh's ranks: they agree on its shape, find who shares a host, and open their groups.

Everything here blocks, so a thread does it.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from monitoring.events.collectives import CollectiveRecorder
from process_groups.arena import Arena, ArenaUnavailable, Mapping, open_peer
from process_groups.call import Place
from process_groups.counters import CAN_WAIT
from process_groups.formation import GROUP_NAMES, Formation, MeshPlan, ranks_of
from process_groups.group import Group
from process_groups.shared_memory.board import Pulse, Segment
from process_groups.shared_memory.exchange import Exchange
from process_groups.shared_memory.layout import lay_out
from process_groups.shared_memory.ledger import Member
from process_groups.shared_memory.sharing import RegisteredMemory, warn_if_not_shared
from process_groups.shared_memory.transport import SharedMemoryTransport
from process_groups.topology import Topology
from process_groups.torch_backend.backends import (
    choose_backend,
    device_of,
    explain_store_error,
    open_backend,
    open_store,
)
from process_groups.torch_backend.connections import loopback_address
from process_groups.torch_backend.nccl_strategies import NcclStrategies
from process_groups.torch_backend.transport import TorchTransport, translate
from process_groups.transport import Transport
from runtime.environment import InheritedFile, RankEnvironment
from runtime.errors import CommunicationError, DeadlineExceeded, LaunchError, Mismatch, PeerLost
from runtime.threads import DaemonThreads

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between looks: a wait of the store's would notice no death


class Rendezvous:
    """One rank's part in forming a mesh, step by step."""

    def __init__(
        self, plan: MeshPlan, environment: RankEnvironment, number: int, recorder: CollectiveRecorder | None = None
    ) -> None:
        self._plan, self._environment, self._number, self._recorder = plan, environment, number, recorder
        self._deadline = time.monotonic() + plan.startup_timeout
        self._rank, self._size = environment.rank, environment.world_size
        self._group_sizes = (self._size, plan.dp, plan.tp, plan.pp)
        self._is_launched = isinstance(environment.meeting_place, InheritedFile) and environment.host is None
        self._layouts = lay_out(self._group_sizes)
        self._segments: list[Segment | None] = []
        self._pulses: list[Pulse | None] = []
        self._arena: Arena | None = None
        self._memory: RegisteredMemory | None = None
        self._arenas: list[Mapping | None] = []
        self._shares: list[list[bool]] = []
        """For each rank, whose arenas it has mapped."""
        self._issuing = DaemonThreads("parallel3d-nccl", limit=1)
        self._hosts: list[int] = []
        """For each rank, the first rank on its host."""

    def form(self) -> Formation:
        try:
            return self._form()
        except BaseException as error:
            for thing in (*self._segments, *self._pulses, self._arena):
                if thing is not None:
                    thing.close()
            if isinstance(error, dist.DistNetworkError):
                raise explain_store_error(error, self._environment, self._plan.startup_timeout) from error
            raise

    def _form(self) -> Formation:
        self._kind = choose_backend(self._plan.backend)
        store = open_store(self._environment, self._plan.startup_timeout)
        store = dist.PrefixStore(f"attempt{self._environment.attempt}/mesh{self._number}", store)
        store.set_timeout(timedelta(seconds=self._plan.startup_timeout))
        own = self._make_segment()
        self._segments = [own if rank == self._rank else None for rank in range(self._size)]
        problem = self._make_arena()
        greetings = self._meet(store, own, problem)
        self._check_agreement(greetings)
        self._nonce = greetings[0]["segment"]
        topology = self._plan.topology(min(greeting["local_world_size"] for greeting in greetings))
        self._map_peers(store, greetings)
        if self._wants_shared_memory:
            warn_if_not_shared(self._rank, greetings, self._shares)
        places = [Place(rank, topology.coords(rank)) for rank in range(self._size)]
        hosts = tuple(greeting["host"] for greeting in greetings)
        groups = {
            name: self._open_group(store, topology, name, index, places) for index, name in enumerate(GROUP_NAMES)
        }
        # A rank that fails right after the start must not break the groups that others still form.
        self._exchange(store, "formed", True)
        pulses = tuple(pulse for pulse in self._pulses if pulse is not None)
        segments = tuple(filter(None, self._segments))
        own.beat()  # from now on the store is not needed
        return Formation(self._rank, topology, hosts, groups, own, segments, pulses, self._arena, self._issuing, store)

    def _make_segment(self) -> Segment:
        try:
            return Segment.create(self._group_sizes)
        except OSError as error:
            raise LaunchError(
                f"start-up: rank {self._rank} can't make the shared memory in which ranks compare their calls: {error}"
                ". Raise its limits, of file size (ulimit -f) above all."
            ) from error

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    @property
    def _wants_shared_memory(self) -> bool:
        """A backend that is asked for by name is used for everything."""
        return self._plan.backend == "auto" and self._kind == "gloo" and self._size > 1

    def _make_arena(self) -> str | None:
        """Memory that peers may map; why not, where there is none."""
        if not self._wants_shared_memory:
            return None
        if not CAN_WAIT:
            return f"ranks can't wait for each other in memory on {platform.machine()}"
        try:
            self._arena = Arena(self._layouts[-1].stop, self._size)
            self._memory = RegisteredMemory(self._arena)
        except ArenaUnavailable as unavailable:
            return str(unavailable)
        return None

    def _meet(self, store: dist.Store, own: Segment, problem: str | None) -> list[dict[str, Any]]:
        """Publish this rank's settings and addresses; returns those of all ranks."""
        greeting = {
            "shape": [self._plan.dp, self._plan.tp, self._plan.pp],
            "order": self._plan.order,
            "backend": self._plan.backend,
            "strategy": self._plan.strategy,
            "strategy_table": [list(entry) for entry in self._plan.strategy_table],
            "local_world_size": self._environment.local_world_size,
            "segment": own.address,
            "arena": self._arena.address_for_peers if self._arena is not None else None,
            "arena_problem": problem,
            "host": self._environment.host or socket.gethostname(),
            "host_is_given": self._environment.host is not None,
        }
        return self._exchange(store, "greeting", greeting)

    def _check_agreement(self, greetings: Sequence[dict[str, Any]]) -> None:
        for what in ("shape", "order", "backend", "strategy", "strategy_table"):
            mine = greetings[self._rank][what]
            for rank, greeting in enumerate(greetings):
                if greeting[what] != mine:
                    raise Mismatch(
                        f"the ranks ask for different meshes: {what} is {mine} on rank {self._rank}, "
                        f"but {greeting[what]} on rank {rank}.",
                        rank=rank,
                        action="start-up",
                    )

    def _map_peers(self, store: dist.Store, greetings: Sequence[dict[str, Any]]) -> None:
        """On one host means: either can map the other's segment. Namespaces share host names, containers may not
        share pids, and permission may go one way only."""
        mine = greetings[self._rank]
        self._arenas = [self._arena if rank == self._rank else None for rank in range(self._size)]
        for rank, greeting in enumerate(greetings):
            apart = mine["host_is_given"] and greeting["host"] != mine["host"]
            if rank != self._rank and not apart:
                self._segments[rank] = Segment.open(greeting["segment"], self._group_sizes)
                if self._arena is not None and greeting["arena"] is not None:
                    self._arenas[rank] = open_peer(greeting["arena"])
        mapped = {"segments": [s is not None for s in self._segments], "arenas": [a is not None for a in self._arenas]}
        mapped_by = self._exchange(store, "mapped", mapped)
        self._shares = [theirs["arenas"] for theirs in mapped_by]
        self._hosts = _number_hosts([theirs["segments"] for theirs in mapped_by])
        self._pulses = [None] * self._size
        for rank, segment in enumerate(self._segments):
            if segment is not None and not mapped_by[rank]["segments"][self._rank]:
                segment.close()
                self._segments[rank] = None
            elif segment is not None and rank != self._rank:
                self._pulses[rank] = self._feel_pulse(rank, segment)

    def _feel_pulse(self, rank: int, segment: Segment) -> Pulse:
        try:
            return Pulse(segment)
        except ProcessLookupError:
            raise _ended_early(rank) from None

    def _exchange(self, store: dist.Store, what: str, mine: Any) -> list[Any]:
        """Publish a value, and return every rank's."""
        store.set(f"{what}/{self._rank}", json.dumps(mine))
        keys = [f"{what}/{rank}" for rank in range(self._size)]
        pause = _SHORTEST_PAUSE
        while not store.check(keys):
            self._check_pulses()
            if time.monotonic() > self._deadline:
                raise self._missing_ranks(store, keys)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return [json.loads(store.get(key)) for key in keys]

    def _missing_ranks(self, store: dist.Store, keys: Sequence[str]) -> DeadlineExceeded:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        return DeadlineExceeded(
            f"start-up: {'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing[:20])} of {self._size} did "
            f"not come within {self._plan.startup_timeout:g} s. "
            "Look at their output, or raise comm.startup_timeout.",
            rank=int(missing[0]) if missing else None,
            action="start-up",
        )

    def _check_pulses(self) -> None:
        for rank, pulse in enumerate(self._pulses):
            if pulse is not None and pulse.is_dead():
                raise _ended_early(rank)

    def _open_group(
        self, store: dist.Store, topology: Topology, name: str, index: int, places: Sequence[Place]
    ) -> Group:
        ranks = ranks_of(topology, name, self._rank)
        me = ranks.index(self._rank)
        kind, device = self._kind, device_of(self._kind, self._environment.local_rank)
        transport: Transport | None = None
        if len(ranks) > 1:
            members = []
            for rank in ranks:
                segment = self._segments[rank]
                members.append(Member(places[rank], segment.pages[index] if segment else None, self._pulses[rank]))
            if all(self._shares[one][other] and self._segments[one] for one in ranks for other in ranks):
                arenas = [arena for rank in ranks if (arena := self._arenas[rank]) is not None]
                num_here = sum(self._shares[self._rank])
                pinned = self._plan.strategy_table
                transport = SharedMemoryTransport(name, members, arenas, me, self._layouts[index], num_here, pinned)
            else:
                group_store = dist.PrefixStore(f"{name}/{ranks[0]}", store)
                transport = self._connect(kind, group_store, index, ranks, members, device)
        return Group(
            name,
            ranks,
            me,
            transport,
            coords_of=topology.coords,
            timeout=self._plan.timeout,
            device=device,
            allocate=self._memory.empty if self._memory is not None else None,
            strategy=self._plan.strategy,
            recorder=self._recorder,
        )

    def _connect(
        self,
        kind: str,
        store: dist.Store,
        index: int,
        ranks: Sequence[int],
        members: Sequence[Member],
        device: torch.device,
    ) -> TorchTransport:
        name, me = GROUP_NAMES[index], ranks.index(self._rank)
        # The launcher's ranks are on one host even where they can't map each other.
        one_host = self._is_launched or all(member.page is not None for member in members)
        loopback = loopback_address(f"{self._nonce} {name} {members[0].place.rank}") if one_host else None
        try:
            backend = open_backend(kind, store, me, len(members), loopback=loopback, timeout=self._left())
        except RuntimeError as error:
            what = f"group {name} of {', '.join(str(m.place) for m in members)}"
            raise _failed_start(what, error, members) from error
        hosts = tuple(self._hosts[rank] for rank in ranks)
        arenas = [self._arenas[rank] if self._shares_memory(rank) else None for rank in ranks]
        exchange = Exchange(arenas, me, self._layouts[index]) if sum(map(bool, arenas)) > 1 else None
        num_here = hosts.count(hosts[me])
        nccl = issuing = None
        if kind == "nccl":
            nccl = NcclStrategies(store, me, len(ranks), hosts, device, backend.backend, self._left())
            nccl.connect()
            issuing = self._issuing
        pinned = self._plan.strategy_table
        return TorchTransport(
            kind, backend, store, name, members, me, device, hosts, exchange, num_here, nccl, issuing, pinned
        )

    def _shares_memory(self, rank: int) -> bool:
        return self._shares[rank][self._rank] and self._shares[self._rank][rank] and self._segments[rank] is not None


def _ended_early(rank: int) -> PeerLost:
    return PeerLost(f"start-up: rank {rank} ended before the mesh was formed.", rank=rank, action="start-up")


def _number_hosts(mapped_by: Sequence[Sequence[bool]]) -> list[int]:
    """For each rank the first one that shares its host: each of the two has mapped the other."""
    ranks = range(len(mapped_by))
    return [next(i for i in ranks if mapped_by[i][rank] and mapped_by[rank][i]) for rank in ranks]


def _failed_start(what: str, error: RuntimeError, members: Sequence[Member]) -> CommunicationError:
    dead = [member.place for member in members if member.pulse is not None and member.pulse.is_dead()]
    if dead:
        return PeerLost(
            f"start-up: {' and '.join(map(str, dead))} ended before the mesh was formed.",
            rank=dead[0].rank,
            coords=dead[0].coords,
            action="start-up",
        )
    kind = type(translate(error))
    return kind(f"start-up: {what} could not connect: {str(error).partition(chr(10))[0]}", action="start-up")
