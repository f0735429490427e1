"""First values: gives the modules of one rank memory, and the weights that they would have on any other mesh.

A module on `meta` gets its values from a seed of its own, made of the run's seed and its path, in float32 and whole,
one module at a time. So neither the cut into stages nor that into tensor-parallel slices changes a weight, and no rank
has more than its own part and one whole module at once. What is real already is only converted.
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
    """A module that has slices of another one's parameters, under the same names."""

    def whole_module(self) -> nn.Module:
        """That other one: on `meta` and to be given its values, or real."""

    def copy_shards(self, whole: nn.Module) -> None:
        """Copy this rank's slices of its parameters."""


def materialize(
    model: LayeredModel,
    modules: Iterable[tuple[str, nn.Module]],
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Give real memory and first values to these modules and to what is inside them.

    modules: with their paths in the whole. What is in the whole goes by its path there, whatever it is called here.
    dtype: of floating-point tensors afterwards.

    Parameters stay the objects they are. One that stands at several paths gets the values of the first, also where
    this rank does not have the module there.
    """
    filling = _Filling(model, seed, dtype, torch.device(device))
    with torch.no_grad():
        for path, module in modules:
            for path_inside, inside in _walk(path, module):
                filling.fill(path_inside, inside)


def _is_sharded(module: nn.Module) -> TypeGuard[Sharded]:
    return callable(getattr(module, "whole_module", None)) and callable(getattr(module, "copy_shards", None))


def _walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Parents before their children. What is inside a sharded module is its own business."""
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
            self._fill_slices(path, module)
            return
        self._give_values(path, module, self._homes(path, module))
        self._convert(_own_tensors(module))

    def _fill_slices(self, path: str, module: Sharded) -> None:
        assert isinstance(module, nn.Module)
        whole = module.whole_module()
        # The sharded module knows which of its parameters stand elsewhere too; the whole one may be new.
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
        """Of those of the module's own parameters that stand at an earlier path too, that one."""
        own = ((name, self._names.get(id(each))) for name, each in parameters_of(module).items())
        return {name: home for name, home in own if home not in (None, _joined(path, name))}

    def _give_values(self, path: str, module: nn.Module, homes: Mapping[str, str]) -> None:
        """To those of its own tensors that are on `meta`."""
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
        """The first values of a parameter of the whole, whose module need not be one of this rank's."""
        path, _, name = home.rpartition(".")
        module = self._model.module(path)
        return self._initial(path, module.whole_module() if _is_sharded(module) else module, [name])[name]

    def _initial(self, path: str, module: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """What `init` gives a module of these names, on the CPU, so that every device begins with the same values."""
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
            error.add_note(f"This is from giving {path or 'the model'} ({type(module).__name__}) its first values.")
            raise


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Its parameters and buffers, but not those of its children."""
    for own in (parameters_of(module), buffers_of(module)):
        yield from ((name, each) for name, each in own.items() if each is not None)


def _make_real(module: nn.Module) -> None:
    """NaN shows afterwards what got no value."""
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
            f"{_joined(path, name)} has no first values: {type(module).__name__} is on meta, and nothing gave it any. "
            "Give it a method reset_parameters() that does, or build it with real memory."
        )
    return value


def _become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Not a new tensor in its place: others may know it by its identity, and it may have several places."""
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
