"""A model's partition: which of its layers make up each pipeline stage.

A model can be divided if it is an `nn.Sequential`, or has the method

    def pipeline_layers(self) -> Sequence[nn.Module]

that returns its layers in order: called one after another, they are the model. A layer gets the output of the one
before, a tuple as that many arguments, inside of a stage and between stages. Every parameter belongs to a layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel3d.models.layer_profile import LayerCost, profile_layers
from parallel3d.models.layer_sequence import find_row
from parallel3d.pipeline.schedules.layer_split import (
    Cut,
    StageCosts,
    best_cut,
    bounds,
    counted_once,
    even_cut,
    given_cut,
    summed,
)
from runtime.errors import InvalidCall


class Chain(nn.Module):
    """Calls layers one after another, a tuple as that many arguments."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *values: Any) -> Any:
        # Not `children()`, which leaves out the second place of a layer.
        for name, layer in self._modules.items():
            assert layer is not None
            try:
                output = layer(*values)
            except Exception as error:
                error.add_note(f"Layer {name} of the model, {type(layer).__name__}, was given {_given(values)}.")
                raise
            values = tuple(output) if isinstance(output, tuple | list) else (output,)
        return output


def _given(values: tuple[Any, ...]) -> str:
    """`float32 (4, 10), int64 (4,)`."""
    return ", ".join(
        f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in values
    )


@dataclass(frozen=True)
class Partition:
    """A model's layers, and how many of them each stage has. `str()` of it is a table."""

    names: tuple[str, ...]
    """The path of each layer in the model."""
    layers: tuple[nn.Module, ...]
    layers_per_stage: tuple[int, ...]
    costs: tuple[LayerCost, ...] | None = None
    """Of each layer, if they were measured."""

    @property
    def num_stages(self) -> int:
        return len(self.layers_per_stage)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each stage, and the layer after its last."""
        return bounds(self.layers_per_stage)

    def layers_of(self, stage: int) -> tuple[nn.Module, ...]:
        return self.layers[self._span(stage)]

    def names_of(self, stage: int) -> tuple[str, ...]:
        return self.names[self._span(stage)]

    def module_of(self, stage: int) -> Chain:
        """The layers of a stage as one module. Its parameters are named by the layer's index in the whole model, such
        as `7.weight`, so that no two stages use the same name."""
        first, _ = self.bounds[self._checked(stage)]
        return Chain({str(index): layer for index, layer in enumerate(self.layers_of(stage), first)})

    def parameters_of(self, stage: int) -> int:
        """The size of its parameters; one that several layers share counts once."""
        return _num_parameters(self.layers_of(stage))

    def seconds_of(self, stage: int) -> float | None:
        """Of one microbatch, forward and backward; None where nothing was measured."""
        return None if self.costs is None else sum(cost.seconds for cost in self.costs[self._span(stage)])

    def _span(self, stage: int) -> slice:
        return slice(*self.bounds[self._checked(stage)])

    def _checked(self, stage: int) -> int:
        if not 0 <= stage < self.num_stages:
            raise InvalidCall(f"stage {stage}: there are {self.num_stages} stages, 0 to {self.num_stages - 1}.")
        return stage

    def __str__(self) -> str:
        rows = [("stage", "layers", "parameters", "seconds", "from", "to")]
        for stage, number in enumerate(self.layers_per_stage):
            names, seconds = self.names_of(stage), self.seconds_of(stage)
            parameters = f"{self.parameters_of(stage):,}"
            rows.append((f"{stage}", f"{number}", parameters, _seconds(seconds), names[0], names[-1]))
        in_all = None if self.costs is None else sum(cost.seconds for cost in self.costs)
        rows.append(("all", f"{len(self.layers)}", f"{_num_parameters(self.layers):,}", _seconds(in_all), "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(_aligned(row, widths) for row in rows)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g}"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers are aligned to the right, the last two columns to the left."""
    cells = zip(row, widths, strict=True)
    texts = [
        text.rjust(width) if column < len(row) - 2 else text.ljust(width) for column, (text, width) in enumerate(cells)
    ]
    return "  ".join(texts).rstrip()


def partition(
    model: nn.Module,
    stages: int,
    layers_per_stage: Sequence[int] | str | None = None,
    *,
    sample: Any = None,
    costs: Sequence[LayerCost] | None = None,
    rank_of_stage: Sequence[int] | None = None,
) -> Partition:
    """Divide a model into this many stages, virtual stages included.

    layers_per_stage: as in the configuration: numbers, or `even` (as is None), `parameters` or `profile`.
    sample: the model's input for one microbatch, for `profile`.
    costs: of `profile_layers`, so that `profile` need not measure. Ranks measure different times: let one of them
        measure, and send the others its `Partition.layers_per_stage`.
    rank_of_stage: for `parameters` and `profile`: balance the ranks, not the stages.
    """
    row = find_row(model).layers
    names = tuple(path or f"layer {index}" for index, (path, _) in enumerate(row))
    layers = tuple(layer for _, layer in row)
    cut, costs = cut_layers(layers, stages, layers_per_stage, sample=sample, costs=costs, rank_of_stage=rank_of_stage)
    return Partition(names, layers, cut, costs)


def cut_layers(
    layers: Sequence[nn.Module],
    stages: int,
    layers_per_stage: Sequence[int] | str | None = None,
    *,
    sample: Any = None,
    costs: Sequence[LayerCost] | None = None,
    rank_of_stage: Sequence[int] | None = None,
) -> tuple[Cut, tuple[LayerCost, ...] | None]:
    """How many layers each stage has, as `partition` says, and the layers' costs if they are known."""
    if costs is not None and len(costs) != len(layers):
        raise InvalidCall(f"costs of {len(costs)} layers, but the model has {len(layers)}: give one a layer.")
    if layers_per_stage is None or layers_per_stage == "even":
        cut = even_cut(len(layers), stages)
    elif layers_per_stage == "parameters":
        cut = best_cut(_parameter_costs(layers), stages, rank_of_stage)
    elif layers_per_stage == "profile":
        even_cut(len(layers), stages)  # refuses a wrong number of stages before anything is measured
        costs = _measured(layers, sample) if costs is None else costs
        cut = best_cut(summed([cost.seconds for cost in costs]), stages, rank_of_stage)
    elif isinstance(layers_per_stage, str):
        raise InvalidCall(
            f'layers_per_stage = "{layers_per_stage}": must be even, parameters, profile or a list of numbers, one a '
            "stage."
        )
    else:
        cut = given_cut(layers_per_stage, len(layers), stages)
    return cut, None if costs is None else tuple(costs)


def _measured(layers: Sequence[nn.Module], sample: Any) -> list[LayerCost]:
    if sample is None:
        raise InvalidCall('layers_per_stage = "profile" measures layers: give a sample, or costs measured before.')
    return profile_layers(layers, sample)


def _parameter_costs(layers: Sequence[nn.Module]) -> StageCosts:
    return counted_once([_sizes(layer) for layer in layers])


def _num_parameters(layers: Sequence[nn.Module]) -> int:
    sizes: dict[Hashable, int] = {}
    for layer in layers:
        sizes |= _sizes(layer)
    return sum(sizes.values())


def _sizes(layer: nn.Module) -> dict[Hashable, int]:
    return {id(each): each.numel() for each in layer.parameters()}
