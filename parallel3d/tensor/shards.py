"""Shards: what each tensor-parallel rank has of a model, as a table and as the modules that replace the whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from parallel3d.config.errors import problem_of_key
from parallel3d.config.findings import near_divisors
from parallel3d.gradients.finalize import mark_for_sum
from parallel3d.models.layered import LayeredModel
from parallel3d.tensor.layers import ColumnLinear, RowLinear, ShardedModule, ShardSlice
from parallel3d.tensor.mappings import TPContext, gather_sequence, split_sequence
from parallel3d.tensor.plan import KEY, TensorPlan, is_inside, sharded_dim
from parallel3d.tensor.vocabulary import VocabEmbedding, VocabHead
from parallel3d.torch_internals import parameters_of
from process_groups.tensor_exchange import TensorExchange
from runtime.errors import InvalidCall

ALL_REDUCE = "AllReduce"
_ATTENTION, _MLP = ("attention", "attn"), ("mlp", "feed_forward", "feedforward", "ffn")


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter, and the dimension along which it is sharded."""

    name: str
    """In its module."""
    path: str
    """In the model; the first path of a tied parameter."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int | None
    """None: every rank has the whole parameter."""
    tp: int

    def slice(self, rank: int) -> ShardSlice | None:
        return None if self.dim is None else ShardSlice.of_rank(self.dim, self.shape[self.dim], rank, self.tp)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        own = self.slice(rank)
        return tuple(own.size if own and dim == own.dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Shard:
    """A module with parameters of its own, as one rank has it. Shapes and numbers are the first rank's: where a
    vocabulary does not divide evenly, the others have fewer rows."""

    path: str
    kind: str
    """embedding, attention, MLP, linear, norm or other."""
    stage: int
    strategy: str
    """column, row, vocab or replicated."""
    pattern: str | None
    """The collectives of forward and backward: AllReduce (in one of them), AllGatherThenReduceScatter or
    ReduceScatterThenAllGather; None where there are none."""
    parameters: tuple[ShardedParameter, ...]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of its largest parameter."""
        return self._largest.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self._largest.local_shape(0)

    @property
    def num_parameters(self) -> int:
        """On a rank."""
        return sum(prod(each.local_shape(0)) for each in self.parameters)

    @property
    def _largest(self) -> ShardedParameter:
        return max(self.parameters, key=lambda each: prod(each.shape))

    def slices(self, rank: int) -> dict[str, ShardSlice]:
        """A rank's slices of the parameters that are sharded, by name."""
        return {each.name: own for each in self.parameters if (own := each.slice(rank)) is not None}


@dataclass(frozen=True)
class Shards:
    """All modules of a model that have parameters, stage by stage."""

    modules: tuple[Shard, ...]
    tp: int
    num_stages: int
    sequence: tuple[str, str] | None
    """With sequence parallelism, the first and the last of the called modules that see a slice of the sequence."""
    head: str | None
    """The path of the vocabulary-parallel head, if there is one."""

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.modules)

    def sliced(self, row: Sequence[str]) -> Sequence[str]:
        """The modules of this row that see a slice of the sequence."""
        if self.sequence is None:
            return ()
        first, last = map(row.index, self.sequence)
        return row[first : last + 1]

    def logits_slice(self, rank: int) -> ShardSlice | None:
        """The slice of the vocabulary whose logits a rank has; None: all of it."""
        return next((each.slices(rank)["weight"] for each in self if each.path == self.head), None)

    def num_parameters(self, stages: Sequence[int] | None = None, rank: int = 0) -> int:
        """Of these stages on a tensor-parallel rank; a tied parameter counts once."""
        wanted = range(self.num_stages) if stages is None else stages
        shapes = {
            each.path: each.local_shape(rank) for shard in self if shard.stage in wanted for each in shard.parameters
        }
        return sum(map(prod, shapes.values()))


def plan_shards(
    model: LayeredModel,
    plan: Mapping[str, str],
    tp: int,
    *,
    sequence_parallel: bool = False,
    layers_per_stage: Sequence[int],
) -> Shards:
    """How a plan shards a model, which is not changed. Raises ConfigError, which names the key and the module."""
    tensor_plan = TensorPlan(model, plan, tp, layers_per_stage, sequence_parallel=sequence_parallel)
    names = model.names()
    shards = [
        _shard(names, tensor_plan, path, stage, tp)
        for stage in range(len(layers_per_stage))
        for path in _paths_with_parameters(tensor_plan, model.paths(layers_per_stage, stage))
    ]
    _refuse_split_heads(model.heads, shards, tp)
    return Shards(tuple(shards), tp, len(layers_per_stage), tensor_plan.sequence, tensor_plan.head)


def _refuse_split_heads(heads: Mapping[str, int], shards: Sequence[Shard], tp: int) -> None:
    """Each rank must have whole heads: attention derives their number from the width it sees."""
    for shard in shards:
        for name, number in heads.items() if shard.kind == "attention" and shard.strategy in ("column", "row") else ():
            if number % tp:
                message = (
                    f"{shard.path} ({shard.strategy}) splits heads, but {name}({number}) is no multiple of tp({tp})."
                )
                remedy = f"Set tp to {near_divisors(number, tp)}, or have {KEY} replicate attention."
                raise problem_of_key("parallel.tp", tp, message, remedy)


def _paths_with_parameters(plan: TensorPlan, places: Sequence[str]) -> list[str]:
    """One path for each module inside these places that has parameters of its own, in order."""
    found: dict[int, str] = {}
    for place in places:
        for path, module in plan.modules.items():
            if is_inside(path, place) and any(each is not None for each in parameters_of(module).values()):
                found.setdefault(id(module), path)
    return list(found.values())


def _shard(names: Mapping[int, str], plan: TensorPlan, path: str, stage: int, tp: int) -> Shard:
    module, strategy = plan.modules[path], plan.strategy(path)
    parameters = tuple(
        ShardedParameter(name, names[id(each)], tuple(each.shape), sharded_dim(strategy, name), tp)
        for name, each in parameters_of(module).items()
        if each is not None
    )
    return Shard(path, _kind(path, module), stage, strategy, _pattern(strategy, plan), parameters)


def _pattern(strategy: str, plan: TensorPlan) -> str | None:
    if strategy == "replicated":
        return None
    if plan.sequence is None or strategy == "vocab":
        return ALL_REDUCE
    return "AllGatherThenReduceScatter" if strategy == "column" else "ReduceScatterThenAllGather"


def _kind(path: str, module: nn.Module) -> str:
    """By the type of the module, else by the names of the modules around it."""
    names = path.lower()
    if "norm" in type(module).__name__.lower():
        return "norm"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.MultiheadAttention) or any(word in names for word in _ATTENTION):
        return "attention"
    if any(word in names for word in _MLP):
        return "MLP"
    return "linear" if isinstance(module, nn.Linear) else "other"


def apply_shards(model: LayeredModel, shards: Shards, exchange: TensorExchange) -> TPContext | None:
    """Replace modules of `model.whole` by sharded ones; call it before stages are made and before weights are
    materialized. Parameters stay on `meta` or real, tied ones stay tied. Returns what the sharded modules share; None
    where tp is 1, which changes nothing."""
    if shards.tp == 1:
        return None
    if exchange.size != shards.tp:
        raise InvalidCall(f"the shards are for tp = {shards.tp}, but the exchange has {exchange.size} ranks.")
    tp, sliced = TPContext(exchange), shards.sliced(model.row)
    _replace(model, shards, tp, sliced)
    if shards.sequence is not None:
        _shard_sequence(model, sliced, tp)
    return tp


def _replace(model: LayeredModel, shards: Shards, tp: TPContext, sliced: Sequence[str]) -> None:
    known: dict[int, nn.Parameter] = {}
    made: dict[int, ShardedModule] = {}
    modules = list(model.whole.named_modules(remove_duplicate=False))
    at = dict(modules)
    for shard in shards:
        module = at[shard.path]
        if shard.strategy != "replicated" and id(module) not in made:
            sequence_parallel = any(is_inside(shard.path, place) for place in sliced)
            made[id(module)] = _sharded(shard, module, tp, known, sequence_parallel)
    for path, module in modules:
        if id(module) in made:
            holder, _, name = path.rpartition(".")
            setattr(model.module(holder), name, made[id(module)])


def _sharded(
    shard: Shard, module: nn.Module, tp: TPContext, known: dict[int, nn.Parameter], sequence_parallel: bool
) -> ShardedModule:
    slices = shard.slices(tp.rank)
    if isinstance(module, nn.Embedding):
        return VocabEmbedding(tp, module, slices, known, shard.path)
    kind = {"column": ColumnLinear, "row": RowLinear, "vocab": VocabHead}[shard.strategy]
    return kind(tp, module, slices, known, shard.path, sequence_parallel=sequence_parallel)


def _shard_sequence(model: LayeredModel, sliced: Sequence[str], tp: TPContext) -> None:
    model.module(sliced[0]).register_forward_pre_hook(partial(_split_first, tp, sliced[0]), with_kwargs=True)
    model.module(sliced[-1]).register_forward_hook(partial(_gather_first, tp))
    for path in sliced:
        for module in model.module(path).modules():
            if not isinstance(module, ShardedModule):  # those see the whole sequence
                for parameter in module.parameters(recurse=False):
                    mark_for_sum(parameter)


def _split_first(tp: TPContext, path: str, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Split the first argument, the hidden states; the others stay as they are."""
    if not args:
        name, values = next(iter(kwargs.items()))
        return (), {**kwargs, name: _split(tp, path, values)}
    values, *others = args
    return (_split(tp, path, values), *others), kwargs


def _split(tp: TPContext, path: str, values: torch.Tensor) -> torch.Tensor:
    if values.dim() < 3 or values.shape[1] % tp.size:
        raise InvalidCall(
            f"parallel.sequence_parallel splits dimension 1 of the input of {path} into {tp.size} slices, but the "
            f"input is {tuple(values.shape)}. Set it to false, or give samples of another length."
        )
    return split_sequence(values, tp)


def _gather_first(tp: TPContext, _: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return gather_sequence(output, tp)
    values, *others = output
    return (gather_sequence(values, tp), *others)
