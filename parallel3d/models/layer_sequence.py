"""A model's row: the modules that are called one after another, and which of them are layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from parallel3d.torch_internals import children_of
from runtime.errors import InvalidCall

Places = tuple[tuple[str, nn.Module], ...]
"""Modules in order, with their paths in the model. A module that is not registered there has the path "layer N"."""


@dataclass(frozen=True)
class LayerRow:
    """Layers, and the modules that are called before the first and after the last of them."""

    layers: Places
    before: Places = ()
    after: Places = ()

    @property
    def all(self) -> Places:
        return (*self.before, *self.layers, *self.after)


class CannotBeCut(InvalidCall):
    """The model does not say what its layers are."""


def find_row(model: nn.Module, pattern: str | None = None) -> LayerRow:
    """The row of a model.

    pattern: the paths of the layers, such as `blocks.*`. None: what the model's `pipeline_layers()` returns, else the
        children of an `nn.Sequential`. Other models cannot be divided.
    """
    given = getattr(model, "pipeline_layers", None)
    if pattern is not None:
        row = _matching(model, pattern)
        remedy = "Put it into a module of its own that stands before or after the layers."
    elif callable(given):
        row = LayerRow(_with_paths(model, tuple(given())))
        remedy = "Put it into one of the modules that pipeline_layers() returns."
    else:
        row, remedy = LayerRow(_children_of_sequential(model)), ""
    _refuse_wrong_modules(model, row)
    _refuse_lost_parameters(model, row, remedy)
    return row


def _with_paths(model: nn.Module, layers: Sequence[nn.Module]) -> Places:
    own = {id(module): name for name, module in model.named_modules()}
    return tuple((own.get(id(layer), f"layer {index}"), layer) for index, layer in enumerate(layers))


def _children_of_sequential(model: nn.Module) -> Places:
    kind = type(model)
    if not isinstance(model, nn.Sequential) or kind.forward is not nn.Sequential.forward:
        why = "has a forward of its own" if isinstance(model, nn.Sequential) else "is no nn.Sequential"
        raise CannotBeCut(
            f"{kind.__name__} cannot be cut into stages: it {why}. "
            "Give it a method pipeline_layers() that returns its layers in order."
        )
    return _children(model, "")


def _children(module: nn.Module, path: str) -> Places:
    # Not `named_children()`, which leaves out the second place of a child.
    prefix = f"{path}." if path else ""
    return tuple((f"{prefix}{name}", child) for name, child in children_of(module).items() if child is not None)


def _matching(model: nn.Module, pattern: str) -> LayerRow:
    """Go down to the layers' parent; on each level, the siblings of the path come before or after the layers."""
    *way, last = pattern.split(".")
    if last != "*" or "*" in way:
        raise InvalidCall("the pattern must end in its only star, such as blocks.*.")
    before: Places = ()
    after: Places = ()
    path, module = "", model
    for name in way:
        children = _children(module, path)
        place = _place_of(name, children, _nothing(model, path))
        before, after = (*before, *children[:place]), (*children[place + 1 :], *after)
        path, module = children[place]
    layers = _children(module, path)
    if not layers:
        raise InvalidCall(f"{_nothing(model, path)} has no children.")
    return LayerRow(layers, before, after)


def _place_of(name: str, children: Places, nothing: str) -> int:
    names = [path.rpartition(".")[2] for path, _ in children]
    if name not in names:
        raise InvalidCall(f"{nothing} has {'the children ' + ', '.join(names) if names else 'no children'}.")
    return names.index(name)


def _nothing(model: nn.Module, path: str) -> str:
    return f"the pattern matches nothing: {path or type(model).__name__}"


def _refuse_wrong_modules(model: nn.Module, row: LayerRow) -> None:
    kind = type(model).__name__
    for index, (_, layer) in enumerate(row.layers):
        if not isinstance(layer, nn.Module):
            raise InvalidCall(f"{kind}: layer {index} is {type(layer).__name__}; each layer must be an nn.Module.")
    for path, module in row.all:
        if getattr(module.forward, "__func__", None) is nn.Module.forward:  # as of a ModuleList
            raise InvalidCall(
                f"{kind}: {path} is {type(module).__name__}, which cannot be called. "
                "Give the model a method pipeline_layers() that returns its layers in order."
            )


def _refuse_lost_parameters(model: nn.Module, row: LayerRow, remedy: str) -> None:
    placed = {id(each) for each in _parameters(module for _, module in row.all)}
    lost = [name for name, each in model.named_parameters() if id(each) not in placed]
    if lost:
        more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
        raise InvalidCall(f"{type(model).__name__}: no layer has the parameter {lost[0]}{more}. {remedy}")


def _parameters(modules: Iterable[nn.Module]) -> Iterable[nn.Parameter]:
    return (parameter for module in modules for parameter in module.parameters())
