"""Layered models: a model as a row of modules that can be divided into pipeline stages."""

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
    """A model that is its modules called one after another: `before`, then `layers`, then `after`.

    Paths are those of `whole`, where "" is `whole` itself. Modules are looked up when they are asked for, so those
    in `whole` may be replaced.
    """

    whole: nn.Module
    """On `meta`, or real."""
    before: tuple[str, ...]
    """Modules that are called before the first layer, in order: part of the first stage."""
    layers: tuple[str, ...]
    """The modules that are divided into stages."""
    after: tuple[str, ...]
    """Modules that are called after the last layer: part of the last stage."""
    plan: Mapping[str, str]
    """The model's own tensor-parallel plan, from patterns of paths to strategies; empty if it has none."""
    init: Callable[[nn.Module], None]
    """Initializes a module's own parameters and buffers, not those of its children."""
    adapt: Callable[[str, nn.Module], nn.Module] = field(default=as_it_is)
    """Wraps the module at a path for its use in a stage."""
    weights: Callable[[str], torch.Tensor] | None = None
    """Loads a stored parameter by its path, in place of `init`."""
    heads: Mapping[str, int] = field(default_factory=dict)
    """Numbers of attention heads, by the key that says so; empty where they are not known."""

    @property
    def row(self) -> tuple[str, ...]:
        """The paths of all modules in call order."""
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
        """How many layers each stage has, as `partition` says. Modules before the first layer count with it, and those
        after the last layer with that."""
        units = [self.stage([1] * len(self.layers), layer) for layer in range(len(self.layers))]
        cut, _ = cut_layers(units, stages, layers_per_stage, sample=sample, costs=costs, rank_of_stage=rank_of_stage)
        return cut

    def stage(self, layers_per_stage: Sequence[int], stage: int) -> Chain:
        """A stage as one module. Its children are named by their place in the whole row, so that no two stages use the
        same name."""
        span = self._span(layers_per_stage, stage)
        return Chain({str(place): self._adapted(self.row[place]) for place in span})

    def paths(self, layers_per_stage: Sequence[int], stage: int) -> tuple[str, ...]:
        """The paths of a stage's modules in call order."""
        return tuple(self.row[place] for place in self._span(layers_per_stage, stage))

    def module(self, path: str) -> nn.Module:
        return self.whole.get_submodule(path)

    def located(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """This module and all inside it that are also in the whole model, with their first paths there; parents before
        children. In a stage, that is all but the Chain and what `adapt` made."""
        paths = {id(each): path for path, each in self.whole.named_modules()}
        return ((paths[id(each)], each) for each in module.modules() if id(each) in paths)

    def names(self) -> dict[int, str]:
        """From the `id` of each parameter to its path; the first path of a tied one."""
        return {id(parameter): path for path, parameter in self.whole.named_parameters()}

    def tied(self) -> dict[str, tuple[str, ...]]:
        """From the first path of each tied parameter to all of its paths in order."""
        paths: dict[int, list[str]] = {}
        for path, parameter in self.whole.named_parameters(remove_duplicate=False):
            paths.setdefault(id(parameter), []).append(path)
        return {found[0]: tuple(found) for found in paths.values() if len(found) > 1}

    def _adapted(self, path: str) -> nn.Module:
        return self.adapt(path, self.module(path))

    def _span(self, layers_per_stage: Sequence[int], stage: int) -> range:
        """The places of a stage's modules in the row."""
        num_stages = len(layers_per_stage)
        spans = bounds(given_cut(layers_per_stage, len(self.layers), num_stages))
        if not 0 <= stage < num_stages:
            raise InvalidCall(f"stage {stage}: there are {num_stages} stages, 0 to {num_stages - 1}.")
        first, end = (len(self.before) + place for place in spans[stage])
        return range(first if stage else 0, end if stage < num_stages - 1 else len(self.row))
