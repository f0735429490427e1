"""A Hugging Face model as a row of modules, by its pipeline plan, and proof that this row computes what the model does.

The pipeline plan names the modules, but layers get more than hidden states: positions, masks, and what else their type
needs. Only the model's own `forward` knows. So it is run over stand-ins: modules that compute nothing, and record what
they are given. Then the row is run over the same stand-ins, and each must be given the same. This happens when the
model is built, for its configuration, and takes hardly any memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from parallel3d.config.errors import problem_of_key
from parallel3d.seeding import numbers_kept
from parallel3d.torch_internals import children_of, copy_module

Adapt = Callable[[str, nn.Module], nn.Module]

_pp_plan: Callable[[Any], dict[str, Any] | None] = attrgetter("_pp_plan")
"""Private, but the only name that transformers has for it."""
_REMEDY = "Wrap it in a factory of your own, with a method pipeline_layers()."
_MOST_SHAPES = 8  # training and evaluation have two or three; more would only keep masks alive
Answer = Callable[[Any], Any]


@dataclass(frozen=True)
class Row:
    """Paths of the modules that are called one after another."""

    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]
    layer_list: str
    """The path of the ModuleList of the layers."""
    base: str
    """The path of the model without its head."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.before, *self.layers, *self.after)


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    path: str
    values: Any
    """Its first argument, the output of the module before."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def itself(values: Any) -> Any:
    return values


class StandIn(nn.Module):
    """Takes the place of a module: records its calls, and computes nothing."""

    def __init__(self, path: str, module: nn.Module, calls: list[Call], answer: Answer = itself) -> None:
        super().__init__()
        self.path, self.calls, self.answer = path, calls, answer
        self._module = (module,)  # in a tuple, so that it is not registered as a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values, *rest = args or (kwargs.pop("hidden_states"),)
        self.calls.append(Call(self.path, values, tuple(rest), kwargs))
        return self.answer(values)

    def __getattr__(self, name: str) -> Any:
        """Attributes that a model reads from its layers, such as their type of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_module"][0], name)


def stand_ins(model: nn.Module, row: Row, calls: list[Call], answers: Mapping[str, Answer]) -> dict[str, nn.Module]:
    """Stand-ins for every module of the row, by the paths that `with_others` replaces."""
    made = {path: StandIn(path, model.get_submodule(path), calls, answers.get(path, itself)) for path in row.paths}
    layers = nn.ModuleList(made.pop(path) for path in row.layers)
    return {**made, row.layer_list: layers}


def with_others(module: nn.Module, others: Mapping[str, nn.Module], prefix: str = "") -> nn.Module:
    """A copy of the module with others at these paths; all else is shared."""
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
    """The arguments of each layer besides hidden states; the model computes them once for each shape."""

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

    @torch.inference_mode(False)  # what an evaluation makes may be saved for a backward later
    @torch.no_grad()
    def _asked(self, hidden: torch.Tensor) -> dict[str, Call]:
        self._calls.clear()
        # Zeros: only their shape matters, or the check of the row would have failed.
        zeros = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        self._model.to(hidden.device)
        self._model(inputs_embeds=zeros, use_cache=False)
        return {call.path: replace(call, values=None) for call in self._calls}


class Layer(nn.Module):
    """A layer with its other arguments bound: from hidden states to hidden states."""

    def __init__(self, path: str, layer: nn.Module, inputs: LayerInputs) -> None:
        super().__init__()
        self.path, self.layer, self.inputs = path, layer, inputs

    def forward(self, hidden: torch.Tensor) -> Any:
        call = self.inputs(self.path, hidden)
        output = self.layer(hidden, *call.args, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output


class Opening(nn.Module):
    """The embedding, and what the model computes between it and the first layer."""

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
    """The head, and what the model computes before and after it."""

    def __init__(self, model: nn.Module, row: Row, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self._model = (with_others(model, {row.base: _Given(), row.after[-1]: head}),)

    def forward(self, hidden: torch.Tensor) -> Any:
        (model,) = self._model
        model.training = self.training
        return model(inputs_embeds=hidden, use_cache=False).logits


class _Given(nn.Module):
    """Takes the place of the model without its head: returns its input."""

    def forward(self, *, inputs_embeds: torch.Tensor, **_: Any) -> _Output:
        return _Output((inputs_embeds,))


class _Output(tuple[torch.Tensor]):
    """The output of a model without its head; its other fields are None."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def find_row(whole: Any) -> Row:
    """The modules of the pipeline plan in call order; one of them is the list of layers."""
    base, prefix, modules = whole.base_model, whole.base_model_prefix, dict(whole.named_modules())
    inner = getattr(base, "_pp_plan", None) or whole.config.base_model_pp_plan or {}
    outer = _pp_plan(type(whole)) or {}
    paths = [*(f"{prefix}.{name}" for name in inner), *outer]
    lists = [path for path in paths if isinstance(modules.get(path), nn.ModuleList)]
    if not (inner and outer and base is not whole and len(lists) == 1 and all(path in modules for path in paths)):
        message = f"{whole.config.model_type} has no pipeline plan in transformers, to say what its layers are."
        raise problem_of_key("model.factory", "hf", message, _REMEDY)
    place, layers = paths.index(lists[0]), modules[lists[0]].named_children()
    return Row(
        before=tuple(paths[:place]),
        layers=tuple(f"{lists[0]}.{name}" for name, _ in layers),
        after=tuple(paths[place + 1 :]),
        layer_list=lists[0],
        base=prefix,
    )


def find_adapt(whole: Any, row: Row) -> Adapt:
    """What wraps each module, so that the row computes what the model does. Raises ConfigError if nothing does."""
    problems = []
    for answer, opens, closes in itertools.product((itself, _in_tuple), (False, True), (False, True)):
        adapt = _adapt(whole, row, LayerInputs(whole, row, answer), opens=opens, closes=closes)
        problem = _difference(whole, row, adapt, answer)
        if problem is None:
            return adapt
        problems.append(problem)
    message = f"{whole.config.model_type} cannot be cut into stages: {problems[0]}."
    raise problem_of_key("model.factory", "hf", message, _REMEDY)


def _adapt(whole: nn.Module, row: Row, inputs: LayerInputs, *, opens: bool, closes: bool) -> Adapt:
    def adapt(path: str, module: nn.Module) -> nn.Module:
        if path in row.layers:
            return Layer(path, module, inputs)
        if opens and (path,) == row.before:
            return Opening(whole, row, module)
        if closes and path == row.after[-1]:
            return Closing(whole, row, module)
        return module

    return adapt


def _in_tuple(values: Any) -> Any:
    """The output of layers that return more than hidden states. If the model passed that on, the next layer's call
    would show it."""
    return (values, values)


def _difference(whole: nn.Module, row: Row, adapt: Adapt, answer: Answer) -> str | None:
    """The first difference between the row and the model's own forward."""
    answers, expected, calls = _answers(whole, row, answer), list[Call](), list[Call]()
    tokens = torch.zeros(2, 3, dtype=torch.long)
    values: Any = tokens
    try:
        with torch.no_grad(), numbers_kept():
            model = with_others(whole, stand_ins(whole, row, expected, answers))
            logits = model(input_ids=tokens, use_cache=False).logits
            for path in row.paths:
                values = adapt(path, StandIn(path, whole.get_submodule(path), calls, answers[path]))(values)
    except Exception as error:  # whatever the model's own code raises over stand-ins
        return f"its forward cannot be followed ({type(error).__name__}: {error})"
    return _first_difference(expected, calls) or (None if _same(logits, values) else "it changes the logits")


def _answers(whole: Any, row: Row, answer: Answer) -> dict[str, Answer]:
    """A different output for each module, so that none is mistaken for another's."""
    settings, random = whole.config.get_text_config(), torch.Generator().manual_seed(0)
    widths = dict.fromkeys(row.paths, settings.hidden_size) | {row.after[-1]: settings.vocab_size}
    values = {path: torch.rand(2, 3, width, generator=random) for path, width in widths.items()}
    return {path: partial(_always, answer(values[path]) if path in row.layers else values[path]) for path in values}


def _always(answer: Any, _: Any) -> Any:
    return answer


def _first_difference(expected: Sequence[Call], calls: Sequence[Call]) -> str | None:
    for own, ours in zip(expected, calls, strict=False):
        if own.path != ours.path:
            return f"it calls {own.path} where its plan has {ours.path}"
        if not _same(own.values, ours.values):
            return f"it changes what {own.path} is given"
        if not _same((own.args, *sorted(own.kwargs.items())), (ours.args, *sorted(ours.kwargs.items()))):
            return f"what it gives {own.path} is not the same for all inputs"
    if len(expected) != len(calls):
        return f"it makes {len(expected)} calls where its plan has {len(calls)} modules"
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal and cannot be changed by layers: in an empty list or dict, or an object, one may
    leave something for the next."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return bool(one) and one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return (bool(one) or one == ()) and len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool | int | float | str | None | torch.dtype | torch.device) and bool(one == other)
