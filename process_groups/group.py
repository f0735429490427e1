"""A group of ranks as users see it: collectives that are issued at the call and finished at the await."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import increment_version

from monitoring.events.collectives import CollectiveRecorder
from process_groups.call_queue import ENDED
from process_groups.shared_memory.collectives import FLAT
from process_groups.shared_memory.engine_collectives import CallTensorExchange, TensorExchange
from process_groups.shared_memory.pipes import CallPipe, Pipe
from process_groups.shared_memory.repeated import Repeated
from process_groups.shared_memory.transport import SharedMemoryTransport
from process_groups.transport import POINT_TO_POINT, REDUCE_OPS, Call, Explanation, Transport, describe_terms
from process_groups.work import CopyBack, Work
from runtime.errors import CommunicationError, Coords, DeadlineExceeded, GroupClosed, InvalidCall, name_rank

REDUCIBLE = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
)
STRATEGIES = ("default", "ring", "tree", "hierarchical", "adaptive")
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor | None]
"""Makes a registered buffer; None where there is too little memory for it."""

_TURN = 0.005  # seconds
_MOST_REPEATED = 256  # tensors
_SIZED_BY_RESULT = frozenset(("all_gather", "recv"))  # what is recorded as the size is otherwise the input's


class Group:
    """Some ranks of the mesh in a fixed order; `mesh.world`, `mesh.dp`, `mesh.tp` and `mesh.pp` are groups.

    Every method that communicates is a plain function: it puts the call in order at once and returns a `Work`
    to await. All ranks of the group must make the same calls in the same order. Ranks given to `broadcast`,
    `send` and `recv` count within the group.
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
        self._transport, self._allocate, self._is_cpu = transport, allocate, device.type == "cpu"
        self._coords_of, self._recorder = coords_of, recorder
        self._under_way: set[Work] = set()
        self._loop_had_its_turn = 0.0
        self._numbers: dict[tuple[str, int | None] | None, int] = {}
        self._repeated: dict[tuple[str, int | None, int], Repeated | None] = {}
        self._pipes: dict[int, Pipe] = {}
        self._tensor_exchange: TensorExchange | None = None
        self._closed: CommunicationError | None = None

    def __repr__(self) -> str:
        return f"<Group {self.name}: rank {self.rank} of {self.size}, {self.transport_name}>"

    @property
    def transport_name(self) -> str:
        """What moves this group's bytes; a group of one moves none."""
        return "none" if self._transport is None else self._transport.name

    # Calls.

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new tensor where this mesh's transports move bytes best, uninitialised. Local; never waits.

        On a CPU it is registered: peers on this host read and write it in place. It works in every group of the mesh.
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
        the mesh's (`comm.strategy`). Only `default` adds up in the same order on every mesh, and only in shared memory:
        with gloo or NCCL the order is theirs.

        With `shared`, take what the await gives as the result: where all ranks are on one host and the tensors are
        registered, that is one in common, which saves writing a copy for each rank. It is for reading, and good until
        a rank uses its own tensor again or lets go of it; that tensor then holds this rank's part of the result only.
        """
        again = None if timeout is not None or shared else self._again("all_reduce", tensor, None, op, strategy)
        if again is not None:
            return again
        self._check_reduction("all_reduce", tensor, op)
        wanted = self.strategy if strategy is None else strategy
        if wanted not in STRATEGIES:
            raise InvalidCall(f"all_reduce: strategy {wanted!r} is not one of {', '.join(STRATEGIES)}.")
        work = self._start("all_reduce", tensor, tensor, tensor, op=op, timeout=timeout, strategy=wanted, shared=shared)
        if not shared:
            self._remember(tensor, strategy, work.call)
        return work

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Reduce, and keep this rank's part: the tensor is cut along its first dimension, a part a rank."""
        self._check_reduction("reduce_scatter", tensor, op)
        self._check_divisible("reduce_scatter", tensor)
        shape = (tensor.shape[0] // self.size, *tensor.shape[1:])
        out = self._checked_out("reduce_scatter", out, shape, tensor)
        return self._start("reduce_scatter", tensor, tensor, out, op=op, timeout=timeout)

    def all_gather(
        self, tensor: torch.Tensor, *, out: torch.Tensor | None = None, timeout: float | None = None
    ) -> Work:
        """All ranks' tensors, joined along the first dimension in rank order."""
        self._check_tensor("all_gather", tensor)
        shape = (self.size * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:])
        out = self._checked_out("all_gather", out, shape, tensor)
        return self._start("all_gather", tensor, tensor, out, timeout=timeout)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, timeout: float | None = None) -> Work:
        """Every rank's tensor becomes that of group rank `root`."""
        self._check_tensor("broadcast", tensor)
        self._check_peer("broadcast", "root", root)
        return self._start("broadcast", tensor, tensor, tensor, peer=root, timeout=timeout)

    def all_to_all(
        self, tensor: torch.Tensor, *, out: torch.Tensor | None = None, timeout: float | None = None
    ) -> Work:
        """Part i of this rank's tensor goes to rank i, and part i of the result came from there."""
        self._check_tensor("all_to_all", tensor)
        self._check_divisible("all_to_all", tensor)
        out = self._checked_out("all_to_all", out, tuple(tensor.shape), tensor)
        return self._start("all_to_all", tensor, tensor, out, timeout=timeout)

    def send(self, tensor: torch.Tensor, dst: int, timeout: float | None = None) -> Work:
        """To group rank `dst`, which must `recv`. Sends to one rank arrive in the order of the calls."""
        again = None if timeout is not None or type(dst) is not int else self._again("send", tensor, dst)
        if again is not None:
            return again
        self._check_tensor("send", tensor)
        self._check_peer("send", "dst", dst, other=True)
        work = self._start("send", tensor, tensor, None, peer=dst, timeout=timeout)
        self._remember(tensor, None, work.call)
        return work

    def recv(self, tensor: torch.Tensor, src: int, timeout: float | None = None) -> Work:
        """Fill the tensor with what group rank `src` sends."""
        again = None if timeout is not None or type(src) is not int else self._again("recv", tensor, src)
        if again is not None:
            return again
        self._check_tensor("recv", tensor)
        self._check_peer("recv", "src", src, other=True)
        work = self._start("recv", tensor, None, tensor, peer=src, timeout=timeout)
        self._remember(tensor, None, work.call)
        return work

    def barrier(self, timeout: float | None = None) -> Work:
        """Ends when every rank has come."""
        limit = self._limit(timeout)
        call = Call("barrier", timeout=limit, number=self._number("barrier", None), terms=describe_terms("barrier"))
        return self._issue(call, None, None)

    def explain(self, nbytes: int, strategy: str = "adaptive") -> Explanation:
        """Which strategy carries an all-reduce of so many bytes out, and why. Local; never waits."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise InvalidCall(f"explain: nbytes = {nbytes!r}: give a number of bytes.")
        if strategy not in STRATEGIES:
            raise InvalidCall(f"explain: strategy {strategy!r} is not one of {', '.join(STRATEGIES)}.")
        if self._transport is None:
            return Explanation("default", "a group of one has nothing to reduce")
        return self._transport.explain(strategy, nbytes)

    def pipe(self, peer: int) -> Pipe:
        """The pipe to and from a group rank, for one thread at a time. Call it on the event loop."""
        self._check_peer("pipe", "peer", peer, other=True)
        if peer not in self._pipes:
            if isinstance(self._transport, SharedMemoryTransport):
                self._pipes[peer] = self._transport.pipe(peer)
            else:
                self._pipes[peer] = CallPipe(self, peer, asyncio.get_running_loop())
        return self._pipes[peer]

    def tensor_exchange(self) -> TensorExchange:
        """The exchange of tensors with all ranks of the group, for one thread at a time. Call it on the event loop."""
        if self._tensor_exchange is None:
            loop = asyncio.get_running_loop()
            if isinstance(self._transport, SharedMemoryTransport):
                self._tensor_exchange = self._transport.tensor_exchange(
                    self.timeout, lambda error: loop.call_soon_threadsafe(self.abort, error)
                )
            else:
                self._tensor_exchange = CallTensorExchange(self, loop)
        return self._tensor_exchange

    # Checks that need no other rank.

    def _check_tensor(self, kind: str, tensor: torch.Tensor) -> None:
        if type(tensor) is torch.Tensor and tensor.is_cpu and self._is_cpu and tensor.layout is torch.strided:
            return  # nearly always, and as quickly as can be
        if not isinstance(tensor, torch.Tensor):
            raise InvalidCall(f"{kind}: a torch.Tensor is needed, not {type(tensor).__name__}.")
        if tensor.layout is not torch.strided:
            raise InvalidCall(f"{kind}: the tensor is {tensor.layout}; make it dense with .to_dense() first.")
        if tensor.device.type != self.device.type:
            raise InvalidCall(
                f"{kind}: the tensor is on {tensor.device}, but group {self.name} moves {self.device.type} tensors "
                f"({self.transport_name}). Move it with .to({self.device.type!r}), or choose another comm.backend."
            )

    def _check_reduction(self, kind: str, tensor: torch.Tensor, op: str) -> None:
        self._check_tensor(kind, tensor)
        if op not in REDUCE_OPS:
            raise InvalidCall(f"{kind}: op {op!r} is not one of {', '.join(REDUCE_OPS)}.")
        if tensor.dtype not in REDUCIBLE:
            names = [str(dtype)[6:] for dtype in REDUCIBLE]
            known = f"{', '.join(names[:-1])} or {names[-1]}"
            raise InvalidCall(f"{kind}: {tensor.dtype} can't be reduced; convert it to {known}.")
        if op == "mean" and not tensor.dtype.is_floating_point:
            raise InvalidCall(f"{kind}: the mean of {tensor.dtype} is no {tensor.dtype}. Use op='sum' and divide.")

    def _check_divisible(self, kind: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] % self.size:
            raise InvalidCall(
                f"{kind}: the first dimension of {tuple(tensor.shape)} can't be cut into {self.size} equal parts, "
                f"one for each rank of group {self.name}."
            )

    def _checked_out(
        self, kind: str, out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor
    ) -> torch.Tensor:
        if out is None:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        self._check_tensor(f"{kind} (out)", out)
        if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype:
            raise InvalidCall(
                f"{kind}: out is {out.dtype} {tuple(out.shape)}, but the result is {like.dtype} {tuple(shape)}."
            )
        return out

    def _check_peer(self, kind: str, role: str, peer: int, *, other: bool = False) -> None:
        if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < self.size:
            raise InvalidCall(f"{kind}: {role} = {peer!r}, but group {self.name} has the ranks 0 to {self.size - 1}.")
        if other and peer == self.rank:
            raise InvalidCall(f"{kind}: {role} = {peer} is this rank itself.")

    def _limit(self, timeout: float | None) -> float:
        if timeout is None:
            return self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e9:
            raise InvalidCall(f"timeout = {timeout!r}: give seconds, more than 0.")
        return float(timeout)

    # Small calls that were made before on the same tensor.

    def _again(
        self, kind: str, tensor: torch.Tensor, peer: int | None, op: str | None = None, strategy: str | None = None
    ) -> Work | None:
        repeated = self._repeated.get((kind, peer, id(tensor)))
        return repeated.start(tensor) if repeated is not None and repeated.is_for(tensor, op, strategy) else None

    def _remember(self, tensor: torch.Tensor, strategy: str | None, call: Call) -> None:
        """The next call on this tensor shall be quicker, if it is small and its bytes are in a row."""
        transport = self._transport
        if tensor.nbytes > FLAT or not isinstance(transport, SharedMemoryTransport) or not tensor.is_contiguous():
            return
        quick = transport.quick(call)
        if quick is None or type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
            return
        if len(self._repeated) >= _MOST_REPEATED:
            self._repeated.clear()
        key = (call.kind, call.peer, id(tensor))
        seen_before = key in self._repeated  # a tensor that is used once is not worth the trouble
        self._repeated[key] = Repeated(self, transport, quick, tensor, strategy, call) if seen_before else None

    # From call to end.

    def _start(
        self,
        kind: str,
        shown: torch.Tensor,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        *,
        op: str | None = None,
        peer: int | None = None,
        timeout: float | None,
        strategy: str = "default",
        shared: bool = False,
    ) -> Work:
        limit = self._limit(timeout)
        if strategy == "adaptive" and self._transport is not None and target is not None:
            limit += self._transport.extra_seconds(target.nbytes)
        moved_from = None if source is None else _plain(source)
        moved_to = copy_back = None
        if target is not None:
            moved_to = moved_from if source is target and moved_from is not None else _plain(target)
            if moved_to is not target and moved_to.data_ptr() != target.data_ptr():
                _check_writable(kind, target)
                copy_back = CopyBack(staging=moved_to, to=target.detach())
            if not target.is_inference():  # autograd shall find out that a tensor it has saved is overwritten
                increment_version(target)
        terms = describe_terms(kind, op, peer, shown.dtype, shown.shape, strategy, shared)
        number = self._number(kind, peer)
        call = Call(kind, moved_from, moved_to, op, peer, limit, number, terms, strategy, shared=shared)
        return self._issue(call, target if target is not None else source, copy_back)

    def _number(self, kind: str, peer: int | None) -> int:
        channel = self._channel(kind, peer)
        number = self._numbers.get(channel, 0) + 1
        self._numbers[channel] = number
        return number

    @staticmethod
    def _channel(kind: str, peer: int | None) -> tuple[str, int | None] | None:
        """What calls are numbered by: all collectives, the sends to a peer, the receives from it."""
        return (kind, peer) if kind in POINT_TO_POINT else None

    def _issue(self, call: Call, result: torch.Tensor | None, copy_back: CopyBack | None) -> Work:
        if self._closed is not None:
            raise GroupClosed(
                f"{call.kind}: group {self.name} is closed: {self._closed}",
                rank=self._closed.rank,
                coords=self._closed.coords,
                action=call.describe(),
            )
        began = time.monotonic()
        if self._transport is None:
            work = Work(self, call, result, copy_back, began)
            if call.source is not None and call.target is not None:
                call.target.copy_(call.source.view_as(call.target))
            work.end_well()
            return work
        completion, error = None, None
        try:
            completion = self._transport.start(call)  # before all else that need not be done first: peers wait
        except CommunicationError as refused:
            error = refused
        work = Work(self, call, result, copy_back, began, completion)
        if completion is ENDED:
            work.end_well()
            return work
        self._under_way.add(work)
        if error is not None:
            self._fail(work, error)
        return work

    def _settled(self, work: Work, error: CommunicationError | None) -> None:
        self._under_way.discard(work)
        if error is None and self._transport is not None:
            self._transport.finished(work.call)
        if error is None and self._recorder is not None:
            self._record(work, self._recorder)

    def _record(self, work: Work, recorder: CollectiveRecorder) -> None:
        seconds, call = work.ended_at() - work.began, work.call
        tensor = call.target if call.kind in _SIZED_BY_RESULT else call.source
        num_bytes = 0 if tensor is None else tensor.nbytes
        strategy = call.carried_out_by or ("default" if call.strategy == "adaptive" else call.strategy)
        recorder.record(self.name, call.kind, strategy, call.strategy, num_bytes, self.size, seconds, work.began)

    def _has_kept_the_loop(self) -> bool:
        """Whether calls that ended on the spot have kept everything else from running for some milliseconds."""
        now = time.monotonic()
        if now - self._loop_had_its_turn < _TURN:
            return False
        self._loop_had_its_turn = now
        return True

    def _trouble(self, call: Call) -> CommunicationError | None:
        assert self._transport is not None
        return self._transport.trouble(call)

    def _too_late(self, call: Call, seconds: float) -> DeadlineExceeded:
        assert self._transport is not None
        what = f"{call.describe()} on group {self.name} did not end within {round(seconds, 3):g} s"
        culprit = self._transport.culprit(call)
        if culprit is None:
            return DeadlineExceeded(f"{what}, though every rank has called it.", action=call.describe())
        who, how = culprit
        rank = self.ranks[who]
        coords = self._coords_of(rank)
        return DeadlineExceeded(
            f"{what}: {name_rank(rank, coords)} {how}.",
            rank=rank,
            coords=coords,
            action=call.describe(),
        )

    def _cancelled(self, call: Call) -> None:
        me = self.ranks[self.rank]
        coords = self._coords_of(me)
        message = f"{name_rank(me, coords)} cancelled {call.describe()} on group {self.name}"
        self.abort(GroupClosed(message, rank=me, coords=coords, action=call.describe()))

    def _fail(self, work: Work, error: CommunicationError) -> None:
        if error.action is None:
            error.action = work.call.describe()
        work.settle(error)
        self.abort(error)

    def abort(self, error: CommunicationError) -> None:
        """Close the group on every rank: bytes of the failed call may still be on their way."""
        self._closed = self._closed or error
        if self._transport is not None:
            self._transport.abort(error)
        for work in list(self._under_way):
            closed = f"group {self.name} was closed: {error}"
            work.settle(GroupClosed(closed, rank=error.rank, coords=error.coords, action=work.call.describe()))

    @property
    def has_failed(self) -> bool:
        """Whether a call on it failed, here or on another rank, so that it is closed."""
        return self._closed is not None

    async def close(self, seconds: float) -> None:
        """Finish what is under way, within so many seconds, then leave; the peers lose nothing. No call is possible
        afterwards.

        Raises the error of a call that nobody awaited: it would be lost otherwise.
        """
        deadline = time.monotonic() + seconds
        try:
            for work in list(self._under_way):
                work.hurry(deadline)
                await work
        finally:
            self._closed = self._closed or GroupClosed("this rank has left the mesh")
            if self._transport is not None:
                await self._transport.close(time.monotonic() + seconds)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as bytes in a row: the tensor itself where it already is that, else a copy."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        if tensor.numel() == 1 and tensor.dim() and tensor.stride(-1) != 1:  # torch can't view that as bytes
            tensor = tensor.view(()).view(tensor.shape)
        return tensor.detach() if tensor.requires_grad or type(tensor) is not torch.Tensor else tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _check_writable(kind: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous() and any(
        n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise InvalidCall(f"{kind}: some elements of the tensor are one in memory (expand); give a .clone() of it.")
