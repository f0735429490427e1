"""A Hugging Face model's row: its modules by its pipeline plan, and proof that one after the other they are the model.

The proof runs the model's own `forward` over stand-ins, then the row over the same stand-ins: each must be given the
same. It is made when the model is built, for whatever configuration it has, and takes no memory to speak of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from parallel3d.config.errors import problem_of_key as refusal
from parallel3d.models.hf_calls import (
    Answer,
    Call,
    Closing,
    Layer,
    LayerInputs,
    Opening,
    Row,
    StandIn,
    itself,
    stand_ins,
    with_others,
)
from parallel3d.seeding import numbers_kept

Adapt = Callable[[str, nn.Module], nn.Module]

_pp_plan: Callable[[Any], dict[str, Any] | None] = attrgetter("_pp_plan")
"""Private, but the only name that transformers has for it."""
_REMEDY = "Wrap it in a factory of your own, with a method pipeline_layers()."


def find_row(whole: Any) -> Row:
    """The modules of the pipeline plan in the order of their calls. One of them is the list of layers."""
    base, prefix, modules = whole.base_model, whole.base_model_prefix, dict(whole.named_modules())
    inner = getattr(base, "_pp_plan", None) or whole.config.base_model_pp_plan or {}
    outer = _pp_plan(type(whole)) or {}
    paths = [*(f"{prefix}.{name}" for name in inner), *outer]
    lists = [path for path in paths if isinstance(modules.get(path), nn.ModuleList)]
    if not (inner and outer and base is not whole and len(lists) == 1 and all(path in modules for path in paths)):
        message = f"{whole.config.model_type} has no pipeline plan in transformers, to say what its layers are."
        raise refusal("model.factory", "hf", message, _REMEDY)
    place, layers = paths.index(lists[0]), modules[lists[0]].named_children()
    return Row(
        before=tuple(paths[:place]),
        layers=tuple(f"{lists[0]}.{name}" for name, _ in layers),
        after=tuple(paths[place + 1 :]),
        layer_list=lists[0],
        base=prefix,
    )


def find_adapt(whole: Any, row: Row) -> Adapt:
    """What has to stand in a stage for each module, so that the row is the model; refused if it cannot be."""
    problems = []
    for answer, opens, closes in itertools.product((itself, _in_tuple), (False, True), (False, True)):
        adapt = _adapt(whole, row, LayerInputs(whole, row, answer), opens=opens, closes=closes)
        problem = _difference(whole, row, adapt, answer)
        if problem is None:
            return adapt
        problems.append(problem)
    message = f"{whole.config.model_type} cannot be cut into stages: {problems[0]}."
    raise refusal("model.factory", "hf", message, _REMEDY)


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
    """As layers answer that give more than hidden states. If the model handed that on, the next layer's call would
    show it."""
    return (values, values)


def _difference(whole: nn.Module, row: Row, adapt: Adapt, answer: Answer) -> str | None:
    """Where the row does something else than the model's own forward."""
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
    """Another one from each module, so that none is taken for another's."""
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
    """Of what layers cannot change: an empty list or table, or an object, may be where one leaves something for the
    next."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return bool(one) and one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return (bool(one) or one == ()) and len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool | int | float | str | None | torch.dtype | torch.device) and bool(one == other)
