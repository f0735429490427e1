"""Layered models: a model as a row of modules that can be cut into stages. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallel3d.models.layer_profile import LayerCost
from parallel3d.models.partition import Chain, cut_layers
from parallel3d.pipeline.schedules.layer_split import Cut, bounds, given_cut
from runtime.errors import InvalidCall


def as_it_is(path: str, module: nn.Module) -> nn.Module:
    return module


@dataclass(frozen=True)
class LayeredModel:
    """A model whose modules, called one after the other, are the model: `before`, then `layers`, then `after`.

    Paths are those of `whole`, where "" is `whole` itself. Modules and parameters are looked up when asked for, so that
    a module may be replaced in `whole` by another one.
    """

    whole: nn.Module
    """On `meta`, or real."""
    before: tuple[str, ...]
    """What is called before the first layer, in order: it belongs to the first stage."""
    layers: tuple[str, ...]
    """What is cut into stages."""
    after: tuple[str, ...]
    """What is called after the last layer: it belongs to the last stage."""
    plan: Mapping[str, str]
    """The model's own tensor-parallel plan, from patterns of paths to strategies; empty where none is known."""
    init: Callable[[nn.Module], None]
    """Gives a module's own parameters and buffers, not those of its children, their first values."""
    adapt: Callable[[str, nn.Module], nn.Module] = field(default=as_it_is)
    """What stands in a stage for the module at a path."""
    weights: Callable[[str], torch.Tensor] | None = None
    """A stored whole parameter by its path, which `init` is then not asked for."""
    heads: Mapping[str, int] = field(default_factory=dict)
    """How many its attention has of each sort, by what says so; empty where that is not known."""

    @property
    def row(self) -> tuple[str, ...]:
        """All that is called, in order."""
        return (*self.before, *self.layers, *self.after)

    def cut(
        self,
        stages: int,
        layers_per_stage: Sequence[int] | str | None = None,
        *,
        sample: Any = None,
        costs: Sequence[LayerCost] | None = None,
        rank_of_stage: Sequence[int] | None = None,
    ) -> Cut:
        """How many layers each stage has, as `partition` says. What is called before the first layer counts with it,
        and what is called after the last with that."""
        units = [self.stage([1] * len(self.layers), layer) for layer in range(len(self.layers))]
        cut, _ = cut_layers(units, stages, layers_per_stage, sample=sample, costs=costs, rank_of_stage=rank_of_stage)
        return cut

    def stage(self, layers_per_stage: Sequence[int], stage: int) -> Chain:
        """A stage's part of the row as one module. Its children are called after their place in the whole row, so that
        no two stages use the same name."""
        span = self._span(layers_per_stage, stage)
        return Chain({str(place): self._adapted(self.row[place]) for place in span})

    def paths(self, layers_per_stage: Sequence[int], stage: int) -> tuple[str, ...]:
        """What a stage calls, in order."""
        return tuple(self.row[place] for place in self._span(layers_per_stage, stage))

    def module(self, path: str) -> nn.Module:
        return self.whole.get_submodule(path)

    def located(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Every module inside this one, itself included, that is also in the whole, with its first path there. Parents
        come before their children. For a stage that is all but the chain and what `adapt` made."""
        paths = {id(each): path for path, each in self.whole.named_modules()}
        return ((paths[id(each)], each) for each in module.modules() if id(each) in paths)

    def names(self) -> dict[int, str]:
        """From the `id` of each parameter to its path; to the first one, where it stands at several."""
        return {id(parameter): path for path, parameter in self.whole.named_parameters()}

    def tied(self) -> dict[str, tuple[str, ...]]:
        """Of each parameter that stands at several paths the first one, and all of them in order."""
        paths: dict[int, list[str]] = {}
        for path, parameter in self.whole.named_parameters(remove_duplicate=False):
            paths.setdefault(id(parameter), []).append(path)
        return {found[0]: tuple(found) for found in paths.values() if len(found) > 1}

    def _adapted(self, path: str) -> nn.Module:
        return self.adapt(path, self.module(path))

    def _span(self, layers_per_stage: Sequence[int], stage: int) -> range:
        """The stage's places in the row."""
        num_stages = len(layers_per_stage)
        spans = bounds(given_cut(layers_per_stage, len(self.layers), num_stages))
        if not 0 <= stage < num_stages:
            raise InvalidCall(f"stage {stage}: there are {num_stages} stages, 0 to {num_stages - 1}.")
        first, end = (len(self.before) + place for place in spans[stage])
        return range(first if stage else 0, end if stage < num_stages - 1 else len(self.row))
