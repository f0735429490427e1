"""Materializing: gives the modules of one rank memory and initial weights, the same on every mesh.

A module on `meta` is initialized from a seed of its own, made of the run's seed and its path, whole and in float32, one
module at a time. So weights depend neither on the stages nor on the tensor-parallel shards, and a rank never holds more
than its own part and one whole module. Modules that are real already are only converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeGuard

import torch
from torch import nn

from parallel3d.models.layered import LayeredModel
from parallel3d.seeding import seed_of, seeded
from parallel3d.torch_internals import buffers_of, parameters_of
from runtime.errors import InvalidCall


class Sharded(Protocol):
    """A module that has shards of another one's parameters, under the same names."""

    def whole_module(self) -> nn.Module:
        """The other module: on `meta`, to be initialized, or real."""

    def copy_shards(self, whole: nn.Module) -> None:
        """Copy this rank's shards of its parameters."""


def materialize(
    model: LayeredModel,
    modules: Iterable[tuple[str, nn.Module]],
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Give memory and initial values to these modules and all modules inside.

    modules: with their paths in the whole model. A module that is in the whole model is seeded by its path there.
    dtype: of floating-point tensors afterwards.

    Parameters stay the same objects. A tied parameter gets the values of its first path, even if this rank does not
    have the module there.
    """
    filling = _Filling(model, seed, dtype, torch.device(device))
    with torch.no_grad():
        for path, module in modules:
            for path_inside, inside in _walk(path, module):
                filling.fill(path_inside, inside)


def _is_sharded(module: nn.Module) -> TypeGuard[Sharded]:
    return callable(getattr(module, "whole_module", None)) and callable(getattr(module, "copy_shards", None))


def _walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Parents before children; modules inside a sharded module are left to it."""
    yield path, module
    if not _is_sharded(module):
        for name, child in module.named_children():
            yield from _walk(f"{path}.{name}" if path else name, child)


class _Filling:
    def __init__(self, model: LayeredModel, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._seed, self._dtype, self._device = model, seed, dtype, device
        self._paths = {id(each): path for path, each in model.whole.named_modules()}
        self._names = model.names()
        self._done: set[int] = set()

    def fill(self, path: str, module: nn.Module) -> None:
        path = self._paths.get(id(module), path)
        if id(module) in self._done:
            return
        self._done.add(id(module))
        if _is_sharded(module):
            self._fill_shards(path, module)
            return
        self._give_values(path, module, self._homes(path, module))
        self._convert(_own_tensors(module))

    def _fill_shards(self, path: str, module: Sharded) -> None:
        assert isinstance(module, nn.Module)
        whole = module.whole_module()
        # Ask the sharded module which of its parameters are tied: the whole one may be a copy.
        self._give_values(path, whole, self._homes(path, module))
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_meta:
                dtype = self._dtype if tensor.is_floating_point() else None
                _become(tensor, torch.empty_like(tensor, dtype=dtype, device=self._device))
        module.copy_shards(whole)
        self._convert([*module.named_parameters(), *module.named_buffers()])

    def _convert(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            tensor.data = tensor.data.to(self._device, self._dtype if tensor.is_floating_point() else None)

    def _homes(self, path: str, module: nn.Module) -> dict[str, str]:
        """The first path of each of the module's own parameters that is tied to an earlier one."""
        own = ((name, self._names.get(id(each))) for name, each in parameters_of(module).items())
        return {name: home for name, home in own if home not in (None, _joined(path, name))}

    def _give_values(self, path: str, module: nn.Module, homes: Mapping[str, str]) -> None:
        """Give values to its own tensors that are on `meta`."""
        missing = {name: each for name, each in _own_tensors(module) if each.is_meta}
        by_init = set(missing) if self._model.weights is None else set(missing) - set(parameters_of(module))
        values = self._initial(path, module, by_init - set(homes)) if by_init - set(homes) else {}
        for name, tensor in missing.items():
            home = homes.get(name, _joined(path, name))
            if name not in by_init:
                _become(tensor, self._stored(home, tensor))
            elif name in homes:
                _become(tensor, self._initial_at(home))
            else:
                _become(tensor, values.pop(name))

    def _stored(self, home: str, wanted: torch.Tensor) -> torch.Tensor:
        assert self._model.weights is not None
        value = self._model.weights(home)
        if value.shape != wanted.shape:
            raise InvalidCall(
                f"{home}: the stored weight's shape is {tuple(value.shape)}, but the model's is {tuple(wanted.shape)}."
            )
        return value

    def _initial_at(self, home: str) -> torch.Tensor:
        """The initial values of a parameter whose module this rank need not have."""
        path, _, name = home.rpartition(".")
        module = self._model.module(path)
        return self._initial(path, module.whole_module() if _is_sharded(module) else module, [name])[name]

    def _initial(self, path: str, module: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The initial values of a module's tensors, computed on the CPU so that they don't depend on the device."""
        before = dict(parameters_of(module)), dict(buffers_of(module))
        try:
            _make_real(module)
            self._init(path, module)
            values = dict(_own_tensors(module))
            return {name: _checked(path, name, module, values[name].detach()) for name in names}
        finally:
            parameters_of(module).update(before[0])
            buffers_of(module).update(before[1])

    def _init(self, path: str, module: nn.Module) -> None:
        try:
            with seeded(seed_of(self._seed, path)):
                self._model.init(module)
        except Exception as error:
            error.add_note(f"This is from initializing {path or 'the model'} ({type(module).__name__}).")
            raise


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Its parameters and buffers, but not those of its children."""
    for own in (parameters_of(module), buffers_of(module)):
        yield from ((name, each) for name, each in own.items() if each is not None)


def _make_real(module: nn.Module) -> None:
    """Replace its tensors by real ones full of NaN, which shows afterwards what got no value."""
    for name, parameter in parameters_of(module).items():
        if parameter is not None:
            parameters_of(module)[name] = nn.Parameter(_empty(parameter), requires_grad=parameter.requires_grad)
    for name, buffer in buffers_of(module).items():
        if buffer is not None:
            buffers_of(module)[name] = _empty(buffer)


def _empty(like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point():
        return torch.full(like.shape, torch.nan, dtype=torch.float32, device="cpu")
    return torch.zeros(like.shape, dtype=like.dtype, device="cpu")


def _checked(path: str, name: str, module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    if value.is_meta or (value.is_floating_point() and value.isnan().any()):
        raise InvalidCall(
            f"{_joined(path, name)} has no initial values: {type(module).__name__} is on meta, and nothing gave it any."
            " Give it a method reset_parameters() that does, or build it with real memory."
        )
    return value


def _become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Swap the contents, not the object: others know the tensor by identity, and it may be at several paths."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
