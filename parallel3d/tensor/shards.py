"""Shards: what each tensor-parallel rank has of a model, as a table and as modules."""

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
from parallel3d.models.layered import LayeredModel
from parallel3d.tensor.layers import ColumnLinear, Partners, RowLinear, join_sequence, split_sequence
from parallel3d.tensor.plan import KEY, TensorPlan, cut_dim, is_inside
from parallel3d.tensor.sharded import Cut, Sharded, mark_for_sum
from parallel3d.tensor.vocabulary import VocabEmbedding, VocabHead
from process_groups.tensor_exchange import TensorExchange
from runtime.errors import InvalidCall

ALL_REDUCE = "AllReduce"
_ATTENTION, _MLP = ("attention", "attn"), ("mlp", "feed_forward", "feedforward", "ffn")


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter, and how it is cut."""

    name: str
    """In its module."""
    home: str
    """Its path in the model; the first one, where it is tied."""
    shape: tuple[int, ...]
    """Of the whole one."""
    dim: int | None
    """Along which it is cut; None: every rank has all of it."""
    tp: int

    def cut(self, rank: int) -> Cut | None:
        return None if self.dim is None else Cut.of_rank(self.dim, self.shape[self.dim], rank, self.tp)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        cut = self.cut(rank)
        return tuple(cut.size if cut and dim == cut.dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class Shard:
    """A module with parameters of its own, as the ranks share it. Ranks may differ by some rows of the vocabulary:
    shapes and numbers are the first rank's, which has the most."""

    path: str
    kind: str
    """embedding, attention, MLP, linear, norm or other."""
    stage: int
    strategy: str
    """column, row, vocab or replicated."""
    pattern: str | None
    """What the ranks exchange for it, in forward and backward: AllReduce in one of them, AllGatherThenReduceScatter,
    ReduceScatterThenAllGather; None: nothing."""
    parts: tuple[Part, ...]

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
        return sum(prod(part.local_shape(0)) for part in self.parts)

    @property
    def _largest(self) -> Part:
        return max(self.parts, key=lambda part: prod(part.shape))

    def cuts(self, rank: int) -> dict[str, Cut]:
        """Of the parameters that are cut."""
        return {part.name: cut for part in self.parts if (cut := part.cut(rank)) is not None}


@dataclass(frozen=True)
class Shards:
    """All modules of a model that have parameters, stage by stage."""

    modules: tuple[Shard, ...]
    tp: int
    num_stages: int
    sequence: tuple[str, str] | None
    """The first and the last of the called modules in which each rank has a slice of the sequence."""
    head: str | None
    """What gives each rank a part of the logits, if something does."""

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.modules)

    def sliced(self, row: Sequence[str]) -> Sequence[str]:
        """Of the called modules, those in which each rank has a slice of the sequence."""
        if self.sequence is None:
            return ()
        first, last = map(row.index, self.sequence)
        return row[first : last + 1]

    def logits_cut(self, rank: int) -> Cut | None:
        """The part of the vocabulary whose logits the model gives on a rank; None: all of it."""
        return next((each.cuts(rank)["weight"] for each in self if each.path == self.head), None)

    def num_parameters(self, stages: Sequence[int] | None = None, rank: int = 0) -> int:
        """Of these stages together on a tensor-parallel rank; a tied parameter counts once."""
        wanted = range(self.num_stages) if stages is None else stages
        shapes = {part.home: part.local_shape(rank) for each in self if each.stage in wanted for part in each.parts}
        return sum(map(prod, shapes.values()))


def plan_shards(
    model: LayeredModel,
    plan: Mapping[str, str],
    tp: int,
    *,
    sequence_parallel: bool = False,
    layers_per_stage: Sequence[int],
) -> Shards:
    """What a plan makes of a model; nothing is changed. Raises ConfigError, which names the key and the module."""
    tensor_plan = TensorPlan(model, plan, tp, layers_per_stage, sequence_parallel=sequence_parallel)
    names = model.names()
    shards = [
        _shard(names, tensor_plan, path, stage, tp)
        for stage in range(len(layers_per_stage))
        for path in _paths_with_parameters(tensor_plan, model.paths(layers_per_stage, stage))
    ]
    _refuse_cut_heads(model.heads, shards, tp)
    return Shards(tuple(shards), tp, len(layers_per_stage), tensor_plan.sequence, tensor_plan.head)


def _refuse_cut_heads(heads: Mapping[str, int], shards: Sequence[Shard], tp: int) -> None:
    """A rank has whole heads: attention would only see a width, which it cannot cut into heads."""
    for shard in shards:
        for name, number in heads.items() if shard.kind == "attention" and shard.strategy in ("column", "row") else ():
            if number % tp:
                message = (
                    f"{shard.path} ({shard.strategy}) cuts heads, but {name}({number}) is no multiple of tp({tp})."
                )
                remedy = f"Set tp to {near_divisors(number, tp)}, or have {KEY} replicate attention."
                raise problem_of_key("parallel.tp", tp, message, remedy)


def _paths_with_parameters(plan: TensorPlan, places: Sequence[str]) -> list[str]:
    """Of each module inside these that has parameters of its own, one path, in the order of places."""
    found: dict[int, str] = {}
    for place in places:
        for path, module in plan.modules.items():
            if is_inside(path, place) and any(each is not None for each in module._parameters.values()):
                found.setdefault(id(module), path)
    return list(found.values())


def _shard(names: Mapping[int, str], plan: TensorPlan, path: str, stage: int, tp: int) -> Shard:
    module, strategy = plan.modules[path], plan.strategy(path)
    parts = tuple(
        Part(name, names[id(each)], tuple(each.shape), cut_dim(strategy, name), tp)
        for name, each in module._parameters.items()
        if each is not None
    )
    return Shard(path, _kind(path, module), stage, strategy, _pattern(strategy, plan), parts)


def _pattern(strategy: str, plan: TensorPlan) -> str | None:
    if strategy == "replicated":
        return None
    if plan.sequence is None or strategy == "vocab":
        return ALL_REDUCE
    return "AllGatherThenReduceScatter" if strategy == "column" else "ReduceScatterThenAllGather"


def _kind(path: str, module: nn.Module) -> str:
    """By its type, else by what the modules around it are called."""
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


def apply_shards(model: LayeredModel, shards: Shards, exchange: TensorExchange) -> Partners | None:
    """Replace what is cut in `model.whole`, before stages are made of it and before it is materialized. Parameters
    stay on `meta` or real, tied ones stay tied. What the cut modules have in common; None where tp is 1, which changes
    nothing."""
    if shards.tp == 1:
        return None
    if exchange.size != shards.tp:
        raise InvalidCall(f"the shards are for tp = {shards.tp}, but {exchange.size} ranks exchange tensors.")
    partners, sliced = Partners(exchange), shards.sliced(model.row)
    _replace(model, shards, partners, sliced)
    if shards.sequence is not None:
        _cut_sequence(model, sliced, partners)
    return partners


def _replace(model: LayeredModel, shards: Shards, partners: Partners, sliced: Sequence[str]) -> None:
    known: dict[int, nn.Parameter] = {}
    made: dict[int, Sharded] = {}
    modules = list(model.whole.named_modules(remove_duplicate=False))
    at = dict(modules)
    for shard in shards:
        module = at[shard.path]
        if shard.strategy != "replicated" and id(module) not in made:
            cuts_sequence = any(is_inside(shard.path, place) for place in sliced)
            made[id(module)] = _sharded(shard, module, partners, known, cuts_sequence)
    for path, module in modules:
        if id(module) in made:
            holder, _, name = path.rpartition(".")
            setattr(model.module(holder), name, made[id(module)])


def _sharded(
    shard: Shard, module: nn.Module, partners: Partners, known: dict[int, nn.Parameter], cuts_sequence: bool
) -> Sharded:
    cuts = shard.cuts(partners.rank)
    if isinstance(module, nn.Embedding):
        return VocabEmbedding(partners, module, cuts, known, shard.path)
    kind = {"column": ColumnLinear, "row": RowLinear, "vocab": VocabHead}[shard.strategy]
    return kind(partners, module, cuts, known, shard.path, cuts_sequence=cuts_sequence)


def _cut_sequence(model: LayeredModel, sliced: Sequence[str], partners: Partners) -> None:
    model.module(sliced[0]).register_forward_pre_hook(partial(_split_first, partners, sliced[0]), with_kwargs=True)
    model.module(sliced[-1]).register_forward_hook(partial(_join_first, partners))
    for path in sliced:
        for module in model.module(path).modules():
            if not isinstance(module, Sharded):  # those see the whole sequence
                for parameter in module.parameters(recurse=False):
                    mark_for_sum(parameter)


def _split_first(partners: Partners, path: str, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Of what a module is given, the first are the values that have a sequence; the others stay as they are."""
    if not args:
        name, values = next(iter(kwargs.items()))
        return (), {**kwargs, name: _split(partners, path, values)}
    values, *others = args
    return (_split(partners, path, values), *others), kwargs


def _split(partners: Partners, path: str, values: torch.Tensor) -> torch.Tensor:
    if values.dim() < 3 or values.shape[1] % partners.size:
        raise InvalidCall(
            f"parallel.sequence_parallel cuts dimension 1 of what {path} is given into {partners.size} slices, but "
            f"that is {tuple(values.shape)}. Set it to false, or give samples of another length."
        )
    return split_sequence(values, partners)


def _join_first(partners: Partners, _: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return join_sequence(output, partners)
    values, *others = output
    return (join_sequence(values, partners), *others)
