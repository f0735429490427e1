"""Local checks of the arguments of a group's calls; they raise InvalidCall."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.errors import InvalidCall

REDUCE_OPS = ("sum", "mean", "min", "max")
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


class ArgumentChecks:
    """The checks of one group. `kind` is the name of the call in error messages."""

    __slots__ = ("_device_type", "_group_name", "_is_cpu", "_rank", "_size", "_transport_name")

    def __init__(self, group_name: str, rank: int, size: int, device_type: str, transport_name: str) -> None:
        self._group_name, self._rank, self._size = group_name, rank, size
        self._device_type, self._transport_name, self._is_cpu = device_type, transport_name, device_type == "cpu"

    def tensor(self, kind: str, tensor: torch.Tensor) -> None:
        if type(tensor) is torch.Tensor and tensor.is_cpu and self._is_cpu and tensor.layout is torch.strided:
            return  # the usual case, as fast as possible
        if not isinstance(tensor, torch.Tensor):
            raise InvalidCall(f"{kind}: a torch.Tensor is needed, not {type(tensor).__name__}.")
        if tensor.layout is not torch.strided:
            raise InvalidCall(f"{kind}: the tensor is {tensor.layout}; make it dense with .to_dense() first.")
        if tensor.device.type != self._device_type:
            raise InvalidCall(
                f"{kind}: the tensor is on {tensor.device}, but group {self._group_name} moves {self._device_type} "
                f"tensors ({self._transport_name}). Move it with .to({self._device_type!r}), or choose another "
                "comm.backend."
            )

    def reduction(self, kind: str, tensor: torch.Tensor, op: str) -> None:
        self.tensor(kind, tensor)
        if op not in REDUCE_OPS:
            raise InvalidCall(f"{kind}: op {op!r} is not one of {', '.join(REDUCE_OPS)}.")
        if tensor.dtype not in REDUCIBLE:
            names = [str(dtype)[6:] for dtype in REDUCIBLE]
            known = f"{', '.join(names[:-1])} or {names[-1]}"
            raise InvalidCall(f"{kind}: {tensor.dtype} can't be reduced; convert it to {known}.")
        if op == "mean" and not tensor.dtype.is_floating_point:
            raise InvalidCall(f"{kind}: the mean of {tensor.dtype} is no {tensor.dtype}. Use op='sum' and divide.")

    def divisible(self, kind: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] % self._size:
            raise InvalidCall(
                f"{kind}: the first dimension of {tuple(tensor.shape)} can't be cut into {self._size} equal parts, "
                f"one for each rank of group {self._group_name}."
            )

    def out(self, kind: str, out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """The tensor for the result: `out`, or a new one."""
        if out is None:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        self.tensor(f"{kind} (out)", out)
        if tuple(out.shape) != tuple(shape) or out.dtype != like.dtype:
            raise InvalidCall(
                f"{kind}: out is {out.dtype} {tuple(out.shape)}, but the result is {like.dtype} {tuple(shape)}."
            )
        return out

    def member(self, kind: str, role: str, rank: int) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self._size:
            raise InvalidCall(
                f"{kind}: {role} = {rank!r}, but group {self._group_name} has the ranks 0 to {self._size - 1}."
            )

    def peer(self, kind: str, role: str, rank: int) -> None:
        self.member(kind, role, rank)
        if rank == self._rank:
            raise InvalidCall(f"{kind}: {role} = {rank} is this rank itself.")


def check_strategy(kind: str, strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise InvalidCall(f"{kind}: strategy {strategy!r} is not one of {', '.join(STRATEGIES)}.")


def check_num_bytes(kind: str, nbytes: int) -> None:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise InvalidCall(f"{kind}: nbytes = {nbytes!r}: give a number of bytes.")


def check_timeout(timeout: float) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e9:
        raise InvalidCall(f"timeout = {timeout!r}: give seconds, more than 0.")


def check_writable(kind: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous() and any(
        n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise InvalidCall(f"{kind}: some elements of the tensor are one in memory (expand); give a .clone() of it.")
