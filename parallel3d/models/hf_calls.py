"""How a Hugging Face model calls its modules, found by running its own `forward` over stand-ins.

Its pipeline plan names the modules that are called one after the other, but layers get more than hidden states:
positions, masks, and what else their type needs. Only the model's own `forward` knows. So it is run, with modules in
their places that compute nothing and write down what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallel3d.torch_internals import children_of, copy_module

_MOST_SHAPES = 8  # training and evaluation have two or three; more would only pile up masks

Answer = Callable[[Any], Any]


@dataclass(frozen=True)
class Row:
    """Paths of the modules that are called one after the other."""

    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]
    layer_list: str
    """Of the list that has the layers."""
    base: str
    """Of the model without its head."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.before, *self.layers, *self.after)


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    path: str
    values: Any
    """Its first argument: what the module before has given."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def itself(values: Any) -> Any:
    return values


class StandIn(nn.Module):
    """In place of a module: writes its calls down, and computes nothing."""

    def __init__(self, path: str, module: nn.Module, calls: list[Call], answer: Answer = itself) -> None:
        super().__init__()
        self.path, self.calls, self.answer = path, calls, answer
        self._module = (module,)  # in a tuple, so that it is no child, and its parameters are not ours

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values, *rest = args or (kwargs.pop("hidden_states"),)
        self.calls.append(Call(self.path, values, tuple(rest), kwargs))
        return self.answer(values)

    def __getattr__(self, name: str) -> Any:
        """What a model asks its layers about themselves, such as their type of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_module"][0], name)


def stand_ins(model: nn.Module, row: Row, calls: list[Call], answers: Mapping[str, Answer]) -> dict[str, nn.Module]:
    """For every module of the row, by the paths that `with_others` replaces."""
    made = {path: StandIn(path, model.get_submodule(path), calls, answers.get(path, itself)) for path in row.paths}
    layers = nn.ModuleList(made.pop(path) for path in row.layers)
    return {**made, row.layer_list: layers}


def with_others(module: nn.Module, others: Mapping[str, nn.Module], prefix: str = "") -> nn.Module:
    """A copy of the module with others at these paths; what is not replaced is shared."""
    twin = copy_module(module, "modules")
    children = children_of(twin)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in others:
            children[name] = others[path]
        elif any(each.startswith(f"{path}.") for each in others):
            children[name] = with_others(child, others, f"{path}.")
    return twin


class LayerInputs:
    """What the model gives each of its layers besides hidden states: made once for each shape, by the model."""

    def __init__(self, model: nn.Module, row: Row, answer: Answer) -> None:
        self._calls: list[Call] = []
        self._model = with_others(model, stand_ins(model, row, self._calls, dict.fromkeys(row.layers, answer)))
        self._known: dict[Any, dict[str, Call]] = {}

    def __call__(self, path: str, hidden: torch.Tensor) -> Call:
        key = (hidden.shape, hidden.dtype, hidden.device)
        if key not in self._known:
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[key] = self._asked(hidden)
        return self._known[key][path]

    @torch.inference_mode(False)  # what is made while evaluating may be saved for a backward later
    @torch.no_grad()
    def _asked(self, hidden: torch.Tensor) -> dict[str, Call]:
        self._calls.clear()
        # Zeros: if more than their shape mattered, it would have shown when the row was checked.
        zeros = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        self._model.to(hidden.device)
        self._model(inputs_embeds=zeros, use_cache=False)
        return {call.path: replace(call, values=None) for call in self._calls}


class Layer(nn.Module):
    """A layer that is given all that it needs; takes and gives hidden states."""

    def __init__(self, path: str, layer: nn.Module, inputs: LayerInputs) -> None:
        super().__init__()
        self.path, self.layer, self.inputs = path, layer, inputs

    def forward(self, hidden: torch.Tensor) -> Any:
        call = self.inputs(self.path, hidden)
        output = self.layer(hidden, *call.args, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output


class Opening(nn.Module):
    """The embedding, and what the model does to its output before the first layer."""

    def __init__(self, model: nn.Module, row: Row, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        others = stand_ins(model, row, [], {}) | {row.before[0]: embedding, row.layer_list: nn.ModuleList()}
        self._base = (with_others(model, others).get_submodule(row.base),)

    def forward(self, tokens: torch.Tensor) -> Any:
        (base,) = self._base
        base.training = self.training
        return base(input_ids=tokens, use_cache=False).last_hidden_state


class Closing(nn.Module):
    """The head, and what the model does to its input and its output."""

    def __init__(self, model: nn.Module, row: Row, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self._model = (with_others(model, {row.base: _Given(), row.after[-1]: head}),)

    def forward(self, hidden: torch.Tensor) -> Any:
        (model,) = self._model
        model.training = self.training
        return model(inputs_embeds=hidden, use_cache=False).logits


class _Given(nn.Module):
    """In place of the model without its head: gives what it is given."""

    def forward(self, *, inputs_embeds: torch.Tensor, **_: Any) -> _Output:
        return _Output((inputs_embeds,))


class _Output(tuple[torch.Tensor]):
    """What a model without a head returns, whatever its class has beside; that is None here."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None
