"""Column- and row-parallel Linears, and what a sharded module is.

    replicated ─ column ─ sharded features ─ … ─ row ─ replicated

A column-parallel Linear has some outputs of the whole one, a row-parallel Linear some inputs. Nothing is exchanged
between them; `mappings` has what is exchanged around them.

A parameter that every rank has but uses on sharded features, such as a norm of single heads, gets a partial gradient
on each rank. `reduce_partial_grads` finds such parameters in autograd's graph and has their gradients summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from parallel3d.gradients.deferred import add_linear, adds_by_hand, anchor, cast_weight, defer_weight_grad
from parallel3d.gradients.finalize import needs_tp_sum
from parallel3d.tensor.mappings import ColumnInput, GatherSequence, SplitSequence, TPContext, product_dtype
from parallel3d.torch_internals import copy_module, function_of_node, lean_apply, parameters_of, version_of
from runtime.errors import InvalidCall


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """The part of a parameter that a rank has: `start` to `stop` along a dimension of `whole_size`."""

    dim: int
    start: int
    stop: int
    whole_size: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @classmethod
    def of_rank(cls, dim: int, whole_size: int, rank: int, num_ranks: int) -> ShardSlice:
        """Sizes differ by at most one; the first ranks have the larger ones."""
        each, over = divmod(whole_size, num_ranks)
        start = rank * each + min(rank, over)
        return cls(dim, start, start + each + (rank < over), whole_size)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of that part."""
        return whole.narrow(self.dim, self.start, self.size)


def shard_slice_of(parameter: torch.Tensor) -> ShardSlice | None:
    """Which part of the whole parameter this is; None for a replicated one."""
    found: ShardSlice | None = getattr(parameter, "shard_slice", None)
    return found


class ShardedModule(nn.Module):
    """Has this rank's shards of another module's parameters, under the same names."""

    def __init__(
        self,
        whole: nn.Module,
        slices: Mapping[str, ShardSlice],
        known: dict[int, nn.Parameter] | None = None,
        path: str = "",
    ) -> None:
        """known: shards that exist already, by the `id` of their whole parameters: tied parameters stay tied."""
        super().__init__()
        self.slices, self.path = dict(slices), path
        known = {} if known is None else known
        for name, parameter in parameters_of(whole).items():
            own = self.slices.get(name)
            if parameter is not None and own is not None:
                if id(parameter) not in known:
                    known[id(parameter)] = _shard(parameter, own)
                parameter = known[id(parameter)]
            self.register_parameter(name, parameter)
        self._whole = (_twin(whole),)  # in a tuple, or it would be a child

    def whole_module(self) -> nn.Module:
        """The other module: on `meta`, to be given its values; or real, until `copy_shards` is called."""
        return _twin(self._whole[0])

    @torch.no_grad()
    def copy_shards(self, whole: nn.Module) -> None:
        """Copy this rank's shards of that module's parameters."""
        given = parameters_of(whole)
        for name, parameter in self._parameters.items():
            source = given[name]
            if parameter is not None and source is not None and source is not parameter:
                parameter.copy_(self.slices[name].of(source) if name in self.slices else source)
        self._whole = (_twin(self._whole[0], is_blank=True),)

    def extra_repr(self) -> str:
        whole = parameters_of(self._whole[0])
        return ", ".join(
            f"{name}={tuple(each.shape)} of {tuple(of.shape)}"
            for name, each in self._parameters.items()
            if each is not None and (of := whole[name]) is not None
        )


def _shard(parameter: nn.Parameter, own: ShardSlice) -> nn.Parameter:
    made = nn.Parameter(own.of(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    made.shard_slice = own  # type: ignore[attr-defined]
    return made


def _twin(module: nn.Module, *, is_blank: bool = False) -> nn.Module:
    """A copy whose parameters are new ones on `meta` where the module's are there; all of them, if it is blank."""
    twin = copy_module(module, "parameters", "buffers")
    own = parameters_of(twin)
    for name, each in own.items():
        if each is not None and (is_blank or each.is_meta):
            own[name] = nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
    return twin


class _Column(torch.autograd.Function):
    """Weight and bias are no inputs: autograd has nothing to add to them. See `gradients.deferred`."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        anchor: torch.Tensor | None,
        module: ColumnLinear,
        column_input: ColumnInput | None,
    ) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        used = weight if weight.dtype is values.dtype else cast_weight(weight, values.dtype)
        values = values.contiguous()
        ctx.save_for_backward(values)
        ctx.column_input, ctx.module, ctx.used, ctx.version = column_input, module, used, version_of(weight)
        return functional.linear(values, used, None if bias is None else bias.to(values.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        (values,), module, column_input = ctx.saved_tensors, ctx.module, ctx.column_input
        module.check_unchanged(ctx.version)
        gradients = gradient.reshape(-1, gradient.shape[-1])
        job = partial(add_linear, module.weight, module.bias, gradients, values.view(-1, values.shape[-1]))
        if column_input is None:
            defer_weight_grad(job)
        else:
            column_input.add(gradients, ctx.used, values.shape)
            column_input.overlap(job)
        return None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, anchor: torch.Tensor | None, module: RowLinear) -> torch.Tensor:
        weight, bias, tp = module.weight, module.bias, module.tp
        dtype, shape = product_dtype(values), (*values.shape[:-1], weight.shape[0])
        used = weight if weight.dtype is dtype else cast_weight(weight, dtype)
        inputs = values.to(dtype).reshape(-1, values.shape[-1])
        ctx.save_for_backward(inputs)
        ctx.module, ctx.used, ctx.version = module, used, version_of(weight)
        torch.mm(inputs, used.t(), out=tp.buffer(shape, dtype).view(-1, shape[-1]))
        tp.post_sum(module.sequence_parallel)
        total = tp.exchange.result()
        return total if bias is None else total.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (inputs,), module = ctx.saved_tensors, ctx.module
        module.check_unchanged(ctx.version)
        if module.sequence_parallel:
            gradient = module.tp.all_gather(gradient)
        gradients = gradient.reshape(-1, gradient.shape[-1])
        # The whole sequence, also for the bias: then every rank has its whole gradient, and none has to be summed.
        defer_weight_grad(partial(add_linear, module.weight, module.bias, gradients, inputs))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return torch.mm(gradients, ctx.used).view(*gradient.shape[:-1], -1), None, None


_apply_column, _apply_row = lean_apply(_Column), lean_apply(_Row)
_GIVE_REPLICATED_VALUES = (_Row, SplitSequence, GatherSequence)


class _ShardedLinear(ShardedModule):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        tp: TPContext,
        whole: nn.Module,
        slices: Mapping[str, ShardSlice],
        known: dict[int, nn.Parameter] | None = None,
        path: str = "",
        *,
        sequence_parallel: bool = False,
    ) -> None:
        """sequence_parallel: whether the activations around it are slices of the sequence."""
        super().__init__(whole, slices, known, path)
        self.tp, self.sequence_parallel = tp, sequence_parallel

    def anchor_for(self, values: torch.Tensor) -> torch.Tensor | None:
        """An input that needs a gradient, so that autograd runs the backward where the values need none."""
        if values.requires_grad or not torch.is_grad_enabled():
            return None
        return anchor() if any(each.requires_grad for each in self.parameters()) else None

    def check_unchanged(self, version: int) -> None:
        if version_of(self.weight) != version:
            raise InvalidCall(f"the weight of {self.path} was changed between forward and backward.")

    def check_input(self, values: torch.Tensor, hint: str) -> None:
        found, wanted = values.shape[-1], self.weight.shape[1]
        if found != wanted:
            raise InvalidCall(f"{self.path} got {found} features, but it has weights for {wanted}. {hint}")


class ColumnLinear(_ShardedLinear):
    """Some outputs of a Linear."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.check_input(values, "The input of a column must not be sharded: see parallel.tensor_plan.")
        shared, column_input = self.tp.column_input(values, self.sequence_parallel)
        return _apply_column(shared, self.anchor_for(shared), self, column_input)


class RowLinear(_ShardedLinear):
    """Some inputs of a Linear; gives the sum over all ranks."""

    _is_input_checked = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.check_input(values, "The input of a row must come from columns: see parallel.tensor_plan.")
        if not self._is_input_checked and values.requires_grad and torch.is_grad_enabled():
            self._is_input_checked = True
            reduce_partial_grads(values, self.path, self.tp)
        return _apply_row(values, self.anchor_for(values), self)


# Between columns and rows: what autograd's graph says of sharded values.


def reduce_partial_grads(values: torch.Tensor, path: str, tp: TPContext) -> None:
    """Have the gradients of replicated parameters between columns and these values all-reduced from now on.

    path: the module whose input the values are, for messages.
    """
    if _is_column(values.grad_fn):
        return
    for node in _graph(values, end=_is_column):
        if adds_by_hand(node):
            raise _mixed(path, "a Linear or Embedding that is not sharded")
        leaf: Any = getattr(node, "variable", None)
        if _gives_replicated_values(node) or (leaf is not None and not isinstance(leaf, nn.Parameter)):
            raise _mixed(path, "replicated values")
        if leaf is not None and _has_partial_grad(leaf) and not hasattr(leaf, "has_tp_hook"):
            leaf.has_tp_hook = True  # type: ignore[attr-defined]
            leaf.register_hook(tp.all_reduce)  # type: ignore[no-untyped-call]


def is_column_sharded(values: torch.Tensor) -> bool:
    """Whether these values lie between columns and a row. Only autograd's graph says so: False without gradients. The
    nearest node that says so is enough, because sharded and replicated values are never mixed."""
    for node in _graph(values, end=lambda _: False):
        if _is_column(node) or _gives_replicated_values(node):
            return _is_column(node)
    return False


def _has_partial_grad(parameter: nn.Parameter) -> bool:
    """Whether a parameter between columns and a row gets a gradient that nothing else sums."""
    return shard_slice_of(parameter) is None and not needs_tp_sum(parameter)


def _is_column(node: object) -> bool:
    return function_of_node(node) is _Column


def _gives_replicated_values(node: object) -> bool:
    return function_of_node(node) in _GIVE_REPLICATED_VALUES


def _graph(values: torch.Tensor, end: Callable[[object], bool]) -> Iterator[Any]:
    """The nodes of autograd's graph from these values back to those at which it ends."""
    seen: set[Any] = set()
    found: list[Any] = [values.grad_fn]
    while found:
        node = found.pop()
        if node is not None and node not in seen and not end(node):
            seen.add(node)
            yield node
            found += [before for before, _ in node.next_functions]


def _mixed(path: str, what: str) -> InvalidCall:
    return InvalidCall(
        f"parallel.tensor_plan: the input of {path}, which is sharded over the ranks, comes from columns and also from "
        f"{what}, whose gradient would be wrong on every rank. Between columns and their row there may be parameters "
        "that are used directly, such as a norm's. Shard the rest as well, or have all of it replicated."
    )
