"""The public Group: collectives that are issued by the call and finished by the await."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import torch

from monitoring.events.collectives import CollectiveRecorder
from process_groups.arguments import ArgumentChecks, check_num_bytes, check_strategy
from process_groups.call import Explanation
from process_groups.issuing import Issuer
from process_groups.pipes import CallPipe, Pipe
from process_groups.repeated import RepeatedCalls
from process_groups.tensor_exchange import CallTensorExchange, TensorExchange
from process_groups.transport import Transport
from process_groups.work import Work
from runtime.errors import CommunicationError, Coords, InvalidCall

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor | None]
"""Makes a registered buffer; None if there is not enough memory."""


class Group:
    """Some ranks of the mesh in a fixed order; `mesh.world`, `mesh.dp`, `mesh.tp` and `mesh.pp` are groups.

    Every method that communicates is a plain function: it issues the call immediately and returns a `Work` to await.
    All ranks of the group must make the same calls in the same order. `broadcast`, `send` and `recv` take group ranks.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        transport: Transport | None,
        *,
        coords_of: Callable[[int], Coords],
        timeout: float,
        device: torch.device,
        allocate: Allocate | None = None,
        strategy: str = "default",
        recorder: CollectiveRecorder | None = None,
    ) -> None:
        self.name, self.ranks, self.rank, self.size = name, tuple(ranks), rank, len(ranks)
        self.device, self.timeout, self.strategy = device, timeout, strategy
        self._transport, self._allocate = transport, allocate
        self._issuer = Issuer(name, self.ranks, rank, transport, coords_of, timeout, recorder)
        self._repeated = RepeatedCalls(self._issuer)
        self._check = ArgumentChecks(name, rank, self.size, device.type, self.transport_name)
        self._pipes: dict[int, Pipe] = {}
        self._tensor_exchange: TensorExchange | None = None

    def __repr__(self) -> str:
        return f"<Group {self.name}: rank {self.rank} of {self.size}, {self.transport_name}>"

    @property
    def transport_name(self) -> str:
        """The transport that moves this group's bytes; `none` for a group of one."""
        return "none" if self._transport is None else self._transport.name

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new uninitialised tensor in the memory that this mesh's transports move fastest. Local; never waits.

        On a CPU it is registered if possible: peers on this host then read and write it in place. It works in every
        group of the mesh.
        """
        size: Sequence[int] = shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape  # type: ignore[assignment]
        if any(length < 0 for length in size):
            raise InvalidCall(f"empty: {tuple(size)} has a negative size.")
        tensor = self._allocate(size, dtype) if self._allocate is not None else None
        return torch.empty(size, dtype=dtype, device=self.device) if tensor is None else tensor

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        strategy: str | None = None,
        timeout: float | None = None,
        *,
        shared: bool = False,
    ) -> Work:
        """Every rank's tensor becomes the sum (mean, min, max) of all.

        `strategy` is `default` (the transport's own), `ring`, `tree`, `hierarchical` or `adaptive`; left out, it is
        the mesh's (`comm.strategy`). Only `default` adds in the same order on every mesh, and only in shared memory:
        gloo and NCCL choose their own order.

        With `shared`, use the tensor that the await returns: if all ranks are on one host and the tensors are
        registered, the ranks share one result, which saves writing a copy for each. It is read-only, and valid until
        a rank writes or frees its own tensor, which then holds this rank's part of the result only.
        """
        if timeout is None and not shared:
            again = self._repeated.start("all_reduce", tensor, None, op, strategy)
            if again is not None:
                return again
        self._check.reduction("all_reduce", tensor, op)
        wanted = self.strategy if strategy is None else strategy
        check_strategy("all_reduce", wanted)
        work = self._issuer.start(
            "all_reduce", tensor, tensor, tensor, op=op, timeout=timeout, strategy=wanted, shared=shared
        )
        if not shared:
            self._repeated.remember(tensor, strategy, work.call)
        return work

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Reduce, and keep this rank's part: the tensor is split along its first dimension, one part per rank."""
        self._check.reduction("reduce_scatter", tensor, op)
        self._check.divisible("reduce_scatter", tensor)
        shape = (tensor.shape[0] // self.size, *tensor.shape[1:])
        out = self._check.out("reduce_scatter", out, shape, tensor)
        return self._issuer.start("reduce_scatter", tensor, tensor, out, op=op, timeout=timeout)

    def all_gather(
        self, tensor: torch.Tensor, *, out: torch.Tensor | None = None, timeout: float | None = None
    ) -> Work:
        """All ranks' tensors, joined along the first dimension in rank order."""
        self._check.tensor("all_gather", tensor)
        shape = (self.size * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:])
        out = self._check.out("all_gather", out, shape, tensor)
        return self._issuer.start("all_gather", tensor, tensor, out, timeout=timeout)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, timeout: float | None = None) -> Work:
        """Every rank's tensor becomes that of group rank `root`."""
        self._check.tensor("broadcast", tensor)
        self._check.member("broadcast", "root", root)
        return self._issuer.start("broadcast", tensor, tensor, tensor, peer=root, timeout=timeout)

    def all_to_all(
        self, tensor: torch.Tensor, *, out: torch.Tensor | None = None, timeout: float | None = None
    ) -> Work:
        """Part i of this rank's tensor goes to rank i, and part i of the result comes from rank i."""
        self._check.tensor("all_to_all", tensor)
        self._check.divisible("all_to_all", tensor)
        out = self._check.out("all_to_all", out, tuple(tensor.shape), tensor)
        return self._issuer.start("all_to_all", tensor, tensor, out, timeout=timeout)

    def send(self, tensor: torch.Tensor, dst: int, timeout: float | None = None) -> Work:
        """Send to group rank `dst`, which must `recv`. Sends to one rank arrive in the order of the calls."""
        if timeout is None and type(dst) is int:
            again = self._repeated.start("send", tensor, dst)
            if again is not None:
                return again
        self._check.tensor("send", tensor)
        self._check.peer("send", "dst", dst)
        work = self._issuer.start("send", tensor, tensor, None, peer=dst, timeout=timeout)
        self._repeated.remember(tensor, None, work.call)
        return work

    def recv(self, tensor: torch.Tensor, src: int, timeout: float | None = None) -> Work:
        """Fill the tensor with what group rank `src` sends."""
        if timeout is None and type(src) is int:
            again = self._repeated.start("recv", tensor, src)
            if again is not None:
                return again
        self._check.tensor("recv", tensor)
        self._check.peer("recv", "src", src)
        work = self._issuer.start("recv", tensor, None, tensor, peer=src, timeout=timeout)
        self._repeated.remember(tensor, None, work.call)
        return work

    def barrier(self, timeout: float | None = None) -> Work:
        """Ends when every rank has called it."""
        return self._issuer.barrier(timeout)

    def explain(self, nbytes: int, strategy: str = "adaptive") -> Explanation:
        """Which strategy an all-reduce of this many bytes uses, and why. Local; never waits."""
        check_num_bytes("explain", nbytes)
        check_strategy("explain", strategy)
        if self._transport is None:
            return Explanation("default", "a group of one has nothing to reduce")
        return self._transport.explain(strategy, nbytes)

    def pipe(self, peer: int) -> Pipe:
        """The pipe to and from a group rank, for one thread at a time. Call it on the event loop."""
        self._check.peer("pipe", "peer", peer)
        if peer not in self._pipes:
            direct = None if self._transport is None else self._transport.pipe(peer)
            self._pipes[peer] = direct or CallPipe(self, peer, asyncio.get_running_loop())
        return self._pipes[peer]

    def tensor_exchange(self) -> TensorExchange:
        """The exchange of tensors with all ranks of the group, for one thread at a time. Call it on the event loop."""
        if self._tensor_exchange is None:
            loop = asyncio.get_running_loop()

            def abort(error: CommunicationError) -> None:
                loop.call_soon_threadsafe(self.abort, error)

            direct = None if self._transport is None else self._transport.tensor_exchange(self.timeout, abort)
            self._tensor_exchange = direct or CallTensorExchange(self, loop)
        return self._tensor_exchange

    @property
    def has_failed(self) -> bool:
        """Whether the group is closed because a call on it failed, here or on another rank."""
        return self._issuer.closed is not None

    def abort(self, error: CommunicationError) -> None:
        """Close the group on every rank. It can't be used afterwards, because data of the failed call may still be in
        flight."""
        self._issuer.abort(error)

    async def close(self, seconds: float) -> None:
        """Finish the calls under way within `seconds`, then leave the group without disturbing its peers.

        No call is possible afterwards. Raises the error of a call that was not awaited, which would be lost otherwise.
        """
        await self._issuer.close(seconds)
