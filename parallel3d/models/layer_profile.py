"""Layer costs: how long each layer of a model takes, measured on a sample. The model is not changed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel3d.seeding import numbers_kept
from parallel3d.torch_internals import buffers_of
from runtime.errors import InvalidCall

Clock = Callable[[], float]
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one microbatch."""

    forward: float
    input_backward: float
    """The backward without weight gradients; 0 where no input needs a gradient."""
    weight_backward: float
    """The rest of the backward."""

    @property
    def seconds(self) -> float:
        return self.forward + self.input_backward + self.weight_backward


def profile_layers(
    layers: Sequence[nn.Module], sample: Any, repeats: int = 5, *, clock: Clock = time.perf_counter
) -> list[LayerCost]:
    """The cost of each layer: medians of `repeats` passes over all layers, after one warm-up pass. In a pass each layer
    runs on the output of the one before.

    sample: the first layer's input for one microbatch: a tensor, or a tuple of tensors.

    Parameters, their `.grad`, buffers, and the random states of torch and Python are restored afterwards.
    """
    if repeats < 1:
        raise InvalidCall(f"repeats = {repeats}: give at least 1.")
    inputs = as_tensors(sample, "the sample")
    profiles = [_Profile(layer, f"layer {index} ({type(layer).__name__})", clock) for index, layer in enumerate(layers)]
    with numbers_kept(_cuda_devices(layers, inputs)), torch.enable_grad():
        # Whole passes, not one layer at a time: if the machine is busy for a moment, that spoils one run of many
        # layers, which the median ignores, and not all runs of one layer.
        passes = [_pass(profiles, inputs) for _ in range(repeats + 1)][1:]
    return [_median(costs) for costs in zip(*passes, strict=True)]


def _pass(profiles: Sequence[_Profile], values: Tensors) -> list[LayerCost]:
    costs = []
    for profile in profiles:
        try:
            cost, values = profile.measure(values)
        except Exception as error:
            error.add_note(f"This is from measuring {profile.name}.")
            raise
        costs.append(cost)
    return costs


def _median(costs: Sequence[LayerCost]) -> LayerCost:
    return LayerCost(
        median(cost.forward for cost in costs),
        median(cost.input_backward for cost in costs),
        median(cost.weight_backward for cost in costs),
    )


def as_tensors(output: Any, name: str) -> Tensors:
    """A module's output as the arguments of the next."""
    tensors = tuple(output) if isinstance(output, tuple | list) else (output,)
    for each in tensors:
        if not isinstance(each, torch.Tensor):
            raise InvalidCall(f"{name} gives {type(each).__name__}; give a tensor or a tuple of tensors.")
    return tensors


class _Run(NamedTuple):
    forward: float
    backward: float
    outputs: Tensors


class _Profile:
    """Measures one layer."""

    def __init__(self, layer: nn.Module, name: str, clock: Clock) -> None:
        self.name, self._layer, self._clock = name, layer, clock
        self._trained = [each for each in layer.parameters() if each.requires_grad]
        self._devices: Sequence[torch.device] = ()

    def measure(self, values: Tensors) -> tuple[LayerCost, Tensors]:
        """Its cost, and its output for the next layer."""
        inputs = tuple(_cut_off(each) for each in values)
        self._devices = _cuda_devices([self._layer], inputs)
        with _state_kept(self._layer):
            whole = self._run(inputs)
            if not any(each.requires_grad for each in inputs):
                return LayerCost(whole.forward, 0.0, whole.backward), whole.outputs
            # With frozen weights autograd computes no weight gradients, in any kind of layer.
            with self._frozen():
                inputs_only = self._run(inputs).backward
        inputs_only = min(inputs_only, whole.backward)  # noise may make it longer
        return LayerCost(whole.forward, inputs_only, whole.backward - inputs_only), whole.outputs

    def _run(self, given: Tensors) -> _Run:
        for each in self._trained:
            each.grad = None
        # Copies: a layer may work in place, which autograd does not allow on a leaf.
        inputs = [each.clone() for each in given]
        start = self._now()
        output = self._layer(*inputs)
        forward = self._now() - start
        outputs = as_tensors(output, self.name)
        ends = [each for each in outputs if each.requires_grad]
        gradients = [torch.ones_like(each) for each in ends]
        start = self._now()
        if ends:
            torch.autograd.backward(ends, gradients)
        return _Run(forward, self._now() - start, tuple(_cut_off(each) for each in outputs))

    def _now(self) -> float:
        for device in self._devices:
            torch.cuda.synchronize(device)
        return self._clock()

    @contextlib.contextmanager
    def _frozen(self) -> Iterator[None]:
        try:
            for each in self._trained:
                each.requires_grad_(False)
            yield
        finally:
            for each in self._trained:
                each.requires_grad_(True)


def _cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, with the same `requires_grad`."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _cuda_devices(layers: Sequence[nn.Module], tensors: Tensors) -> list[torch.device]:
    found = {each.device for layer in layers for each in layer.parameters()} | {each.device for each in tensors}
    return [device for device in found if device.type == "cuda"]


@contextlib.contextmanager
def _state_kept(layer: nn.Module) -> Iterator[None]:
    """Restore the layer's tensors afterwards; one layer at a time, so that only one is in memory twice."""
    gradients = [(each, each.grad) for each in layer.parameters()]
    buffers = [(buffers_of(each), dict(buffers_of(each))) for each in layer.modules()]
    # Parameters too: an embedding with max_norm changes its weight in the forward.
    tensors = [*layer.parameters(), *layer.buffers()]
    saved = [(each, each.detach().clone()) for each in tensors]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for now, before in buffers:
            now.clear()
            now.update(before)
        with torch.no_grad():
            for tensor, values in saved:
                if not torch.equal(tensor, values):  # the version does not say so: writes of BatchNorm don't change it
                    tensor.copy_(values)
