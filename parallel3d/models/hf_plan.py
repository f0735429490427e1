"""Tensor-parallel plans of Hugging Face models, in our words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from parallel3d.config.models import RunConfig
from parallel3d.factories import refusal

_STRATEGIES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab",
    "replicate": "replicated",
    "replicated": "replicated",
    # What it says of norms, that they see a part of the sequence, `parallel.sequence_parallel` says of all at once.
    "sequence_parallel": "replicated",
}
_REMEDY = "Give a plan of your own in parallel.tensor_plan, or set parallel.tp to 1."


def tensor_plan(model: Any, config: RunConfig) -> dict[str, str]:
    """The model's own plan. Where it is not used, because nothing is cut or the user gave another, what has no
    counterpart here is left out of it; else it is refused."""
    tp, model_type = config.parallel.tp, model.config.model_type
    needed = tp > 1 and config.parallel.tensor_plan is None
    plan = dict.fromkeys(_ends(model), "vocab")
    for pattern, word in _matching(model, getattr(model, "_tp_plan", None) or {}).items():
        if word in _STRATEGIES:
            plan.setdefault(pattern, _STRATEGIES[word])
        elif needed and pattern not in plan:
            _refuse_unknown(pattern, word, model_type)
    if needed:
        _refuse_no_plan(plan, tp, model_type)
        _refuse_forgotten(model, plan, model_type)
        _refuse_heads(model.config, tp)
    return plan


def _ends(model: nn.Module) -> list[str]:
    """The token embedding and the head. Most plans don't speak of the first, and gather what the second gives."""
    modules: Any = model
    found = [id(each) for each in (modules.get_input_embeddings(), modules.get_output_embeddings()) if each is not None]
    return [path for path, module in model.named_modules() if id(module) in found]


def _matching(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Without the patterns that this model has nothing for: a plan speaks of all models of its type."""
    paths = [path for path, _ in (*model.named_modules(), *model.named_parameters())]
    return {pattern: word for pattern, word in plan.items() if any(_matches(pattern, path) for path in paths)}


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


def _refuse_unknown(pattern: str, word: str, model_type: str) -> NoReturn:
    message = f'the tensor-parallel plan of {model_type} says "{word}" of {pattern}, which has no counterpart here.'
    raise refusal("model.factory", "hf", message, _REMEDY)


def _refuse_no_plan(plan: Mapping[str, str], tp: int, model_type: str) -> None:
    if not {"column", "row"} & {*plan.values()}:
        message = f"{model_type} has no tensor-parallel plan in transformers."
        raise refusal("parallel.tp", tp, message, _REMEDY)


def _refuse_forgotten(model: nn.Module, plan: Mapping[str, str], model_type: str) -> None:
    """What stands beside a column and a row sees a part of the activations. If a plan says nothing of it, each rank
    would change its parameters in another way."""
    for path, module in model.named_modules():
        children = {_strategy(f"{path}.{name}", plan) for name, _ in module.named_children()}
        if {"column", "row"} <= children:
            for name, _ in module.named_parameters(prefix=path):
                if not _has_strategy(name, plan):
                    message = f"the tensor-parallel plan of {model_type} forgets {name}, between modules that are cut."
                    raise refusal("model.factory", "hf", message, _REMEDY)


def _has_strategy(path: str, plan: Mapping[str, str]) -> bool:
    """The parameter's own, or that of a module that has it."""
    parts = path.split(".")
    return any(_strategy(".".join(parts[:end]), plan) for end in range(1, len(parts) + 1))


def _strategy(path: str, plan: Mapping[str, str]) -> str | None:
    return next((strategy for pattern, strategy in plan.items() if _matches(pattern, path)), None)


def _refuse_heads(settings: Any, tp: int) -> None:
    """A rank has whole heads: attention would only see a width, which it cannot cut into heads."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(settings, name, None)
        if isinstance(heads, int) and heads % tp:
            message = f"{settings.model_type} has {name} = {heads}, which is no multiple of tp."
            raise refusal("parallel.tp", tp, message, f"Set it to a number that divides {heads}.")
