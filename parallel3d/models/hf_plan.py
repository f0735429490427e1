"""Tensor-parallel plans of Hugging Face models, in our words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from parallel3d.config.errors import problem_of_key as refusal
from parallel3d.config.sections import RunConfig

_STRATEGIES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab",
    "replicate": "replicated",
    "replicated": "replicated",
    # Of norms of single heads, which see a rank's heads only: that their gradients are parts is found anyway.
    "replicated_with_grad_allreduce": "replicated",
    # Of norms, which see a part of the sequence: `parallel.sequence_parallel` says that of all at once.
    "sequence_parallel": "replicated",
}
_REMEDY = "Give a plan of your own in parallel.tensor_plan, or set parallel.tp to 1."


def tensor_plan(model: Any, config: RunConfig) -> dict[str, str]:
    """The model's own plan. Where it is not used, because nothing is cut or the user gave another, what has no
    counterpart here is left out of it; else it is refused."""
    tp, model_type, plan = config.parallel.tp, model.config.model_type, _ends(model)
    is_needed = tp > 1 and config.parallel.tensor_plan is None
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for pattern, word in (getattr(model, "_tp_plan", None) or {}).items():
        # A plan speaks of all models of its type, and this one need not have everything.
        if any(_matches(pattern, path) for path in modules) and word in _STRATEGIES:
            plan.setdefault(pattern, _STRATEGIES[word])
        elif is_needed and pattern not in plan and any(_matches(pattern, path) for path in (*modules, *parameters)):
            message = f'the tensor-parallel plan of {model_type} says "{word}" of {pattern}, which is not known here.'
            raise refusal("model.factory", "hf", message, _REMEDY)
    if is_needed:
        _refuse_no_plan(plan, tp, model_type)
    return plan


def _ends(model: nn.Module) -> dict[str, str]:
    """The token embedding and the head, of which most plans say nothing, or that all logits are gathered."""
    of_model: Any = model
    embedding, head = of_model.get_input_embeddings(), of_model.get_output_embeddings()
    strategies = dict.fromkeys((id(embedding), id(head)), "vocab")
    if type(embedding) is not nn.Embedding:  # it has a forward of its own, which may scale
        strategies[id(embedding)] = "replicated"
        if head.weight is embedding.weight:
            strategies[id(head)] = "replicated"
    return {path: strategies[id(module)] for path, module in model.named_modules() if id(module) in strategies}


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


def _refuse_no_plan(plan: Mapping[str, str], tp: int, model_type: str) -> None:
    if not {"column", "row"} & {*plan.values()}:
        message = f"{model_type} has no tensor-parallel plan in transformers."
        raise refusal("parallel.tp", tp, message, _REMEDY)
