"""Causal models of Hugging Face `transformers`, unmodified, with their own pipeline and tensor-parallel plans."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel3d.config.errors import nearest, problem_of_key
from parallel3d.config.sections import HfModel, RunConfig
from parallel3d.models.hf_row import Row, find_adapt, find_row
from parallel3d.models.layered import LayeredModel
from parallel3d.models.stored_weights import StoredWeights, find_weights
from parallel3d.torch_internals import buffers_of, copy_module

_init_weights: Callable[[Any], Callable[[nn.Module], None]] = attrgetter("_init_weights")
"""Private, but the only name that transformers has for it."""
_OLDEST = 5  # the oldest major version that was tried
_INSTALL = "Install what it needs: pip install 'parallel3d[hf]'"
_STRATEGIES = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab",
    "replicate": "replicated",
    "replicated": "replicated",
    # Norms of single heads: tensor.layers finds partial gradients by itself.
    "replicated_with_grad_allreduce": "replicated",
    # Norms on a slice of the sequence: here `parallel.sequence_parallel` says so for all of them.
    "sequence_parallel": "replicated",
}
_PLAN_REMEDY = "Give a plan of your own in parallel.tensor_plan, or set parallel.tp to 1."
# transformers takes these too, but lists them nowhere.
_UNLISTED_KEYS = {
    "attn_implementation",
    "experts_implementation",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
}


def build_hf(config: RunConfig) -> LayeredModel:
    """The model of `model.args`, on `meta`. Only the given folder is read, and no code in it is run."""
    assert isinstance(config.model, HfModel)
    args, transformers = config.model.args, _transformers()
    _refuse_sequence_parallel(config)
    settings = _read_settings(transformers, args.path) if args.config is None else _settings(transformers, args.config)
    _refuse_settings(settings)
    whole = _on_meta(transformers, settings)
    row = find_row(whole)
    _fill_beside(whole, row)
    _refuse_empty_buffers(whole, row)
    return LayeredModel(
        whole=whole,
        before=row.before,
        layers=row.layers,
        after=row.after,
        plan=tensor_plan(whole, config),
        init=partial(_init, whole),
        adapt=find_adapt(whole, row),
        weights=None if args.path is None else _stored(whole, Path(args.path)),
        heads=_heads(settings),
    )


def _transformers() -> Any:
    """Import transformers, which takes seconds, and check its version."""
    try:
        import safetensors  # noqa: F401
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
    except ImportError as error:
        message = f"transformers and safetensors cannot be imported: {error}."
        raise problem_of_key("model.factory", "hf", message, _INSTALL) from error
    if int(transformers.__version__.partition(".")[0]) < _OLDEST:
        message = f"transformers {transformers.__version__} is too old: {_OLDEST} or later is needed."
        raise problem_of_key("model.factory", "hf", message, _INSTALL)
    return transformers


def _settings(transformers: Any, given: Mapping[str, Any]) -> Any:
    """The model's configuration, from `model.args.config`."""
    keys = copy.deepcopy(dict(given))
    model_type, known = keys.pop("model_type", None), transformers.CONFIG_MAPPING
    if model_type not in known:
        similar = nearest(str(model_type), known)
        message = f"transformers {transformers.__version__} has no such model."
        raise problem_of_key(
            "model.args.config.model_type", model_type, message, f"Did you mean {similar}?" if similar else ""
        )
    try:
        settings = known[model_type](**copy.deepcopy(keys))
    except Exception as error:  # of many kinds, from checks of its own
        raise problem_of_key("model.args.config", given, f"transformers refuses it: {_in_short(error)}") from error
    _refuse_unknown_keys(known[model_type], keys)
    return settings


def _refuse_unknown_keys(kind: Any, keys: Mapping[str, Any]) -> None:
    """transformers accepts any key, and ignores those that it does not know."""
    known = {*vars(kind()), *inspect.signature(kind).parameters, *kind.attribute_map, *_UNLISTED_KEYS}
    for key in keys:
        if key not in known and not key.startswith("_"):
            similar = nearest(key, (each for each in known if not each.startswith("_")))
            remedy = f"Did you mean {similar}?" if similar else "Remove it."
            raise problem_of_key(f"model.args.config.{key}", keys[key], f"{kind.model_type} has no such key.", remedy)


def _read_settings(transformers: Any, path: str | None) -> Any:
    """The model's configuration, from `config.json` in the folder `model.args.path`."""
    folder = Path(str(path))
    if not (folder / "config.json").is_file():
        remedy = "Give a folder that save_pretrained has written; nothing is downloaded."
        raise problem_of_key("model.args.path", path, f"there is no {folder / 'config.json'}.", remedy)
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, from checks of its own
        message = f"transformers refuses its config.json: {_in_short(error)}"
        raise problem_of_key("model.args.path", path, message) from error


def _in_short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:299]}…"


def _refuse_settings(settings: Any) -> None:
    kernel = str(getattr(settings, "_attn_implementation", None) or "")
    if "/" in kernel:
        message = f"its attention {kernel} would have to be downloaded."
        raise problem_of_key("model.factory", "hf", message, "Set attn_implementation to sdpa or eager.")
    if getattr(settings, "quantization_config", None):
        raise problem_of_key(
            "model.factory", "hf", "quantized weights cannot be trained.", "Remove quantization_config."
        )


def _refuse_sequence_parallel(config: RunConfig) -> None:
    if config.parallel.sequence_parallel and config.parallel.tp > 1:
        message = "attention of Hugging Face models needs the whole sequence as its input."
        raise problem_of_key("parallel.sequence_parallel", True, message, "Set it to false.")


def _on_meta(transformers: Any, settings: Any) -> Any:
    """In float32, whatever dtype is stored: `train.precision` is applied when weights are materialized."""
    settings.use_cache = False
    try:
        with torch.device("meta"):
            kind = transformers.AutoModelForCausalLM
            model = kind.from_config(settings, dtype=torch.float32, trust_remote_code=False).train()
            model.tie_weights()  # early versions don't do so on `meta`
            return model
    except Exception as error:  # of many kinds, from checks of its own
        message = f"transformers cannot build a causal {settings.model_type}: {_in_short(error)}"
        raise problem_of_key("model.factory", "hf", message) from error


def _fill_beside(whole: Any, row: Row) -> None:
    """Give values to buffers of modules beside the row, such as rotary frequencies: small, and real on every rank."""
    for path, module in whole.named_modules():
        if any(path == each or path.startswith(f"{each}.") for each in row.paths):
            continue
        for name, _ in module.named_parameters(recurse=False):
            message = f"the pipeline plan of {whole.config.model_type} has no place for {path}.{name}."
            raise problem_of_key("model.factory", "hf", message, "Wrap the model in a factory of your own.")
        _fill_buffers(whole, path, module)


def _refuse_empty_buffers(whole: Any, row: Row) -> None:
    """Refuse, before anything starts, buffers that would get no values."""
    for path, module in whole.named_modules():
        if any(path == each or path.startswith(f"{each}.") for each in row.paths):
            # A copy: its parameters are on `meta`, where nothing can be filled.
            _fill_buffers(whole, path, copy_module(module, "buffers"))


def _fill_buffers(whole: Any, path: str, module: nn.Module) -> None:
    empty = dict(module.named_buffers(recurse=False))
    if not empty:
        return
    for name, buffer in empty.items():
        none = torch.nan if buffer.is_floating_point() else 0
        buffers_of(module)[name] = torch.full_like(buffer, none, device="cpu")
    _init(whole, module)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and buffer.isnan().any():
            message = f"_init_weights of transformers gives {path}.{name} no values."
            raise problem_of_key("model.factory", "hf", message, "Wrap the model in a factory of your own.")


@torch.no_grad()
def _init(whole: Any, module: nn.Module) -> None:
    """Initialize a module by the model's own rules."""
    _init_weights(whole)(module)


def _heads(settings: Any) -> dict[str, int]:
    found = {name: getattr(settings, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: number for name, number in found.items() if isinstance(number, int)}


def _stored(whole: Any, folder: Path) -> StoredWeights:
    paths: dict[int, list[str]] = {}
    for path, parameter in whole.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    buffers = [path for path in whole.state_dict(keep_vars=True) if path not in parameters]
    if buffers:
        message = f"{buffers[0]} is stored, but no parameter: only parameters are read."
        raise problem_of_key(
            "model.args.path", str(folder), message, "Give model.args.config instead, to begin at random."
        )
    return find_weights(folder, parameters, paths.values())


# Tensor-parallel plans.


def tensor_plan(model: Any, config: RunConfig) -> dict[str, str]:
    """The model's own plan. Strategies that are not known here are refused; they are left out where the plan is not
    used, because tp is 1 or the user gave another plan."""
    tp, model_type, plan = config.parallel.tp, model.config.model_type, _ends(model)
    is_needed = tp > 1 and config.parallel.tensor_plan is None
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for pattern, word in (getattr(model, "_tp_plan", None) or {}).items():
        # A plan is for all models of its type; this one need not have every module.
        if any(_matches(pattern, path) for path in modules) and word in _STRATEGIES:
            plan.setdefault(pattern, _STRATEGIES[word])
        elif is_needed and pattern not in plan and any(_matches(pattern, path) for path in (*modules, *parameters)):
            message = f'the tensor-parallel plan of {model_type} says "{word}" of {pattern}, which is not known here.'
            raise problem_of_key("model.factory", "hf", message, _PLAN_REMEDY)
    if is_needed:
        _refuse_no_plan(plan, tp, model_type)
    return plan


def _ends(model: nn.Module) -> dict[str, str]:
    """The token embedding and the head: most plans leave them out, or have all logits gathered."""
    of_model: Any = model
    embedding, head = of_model.get_input_embeddings(), of_model.get_output_embeddings()
    strategies = dict.fromkeys((id(embedding), id(head)), "vocab")
    if type(embedding) is not nn.Embedding:  # a forward of its own may scale the output
        strategies[id(embedding)] = "replicated"
        if head.weight is embedding.weight:
            strategies[id(head)] = "replicated"
    return {path: strategies[id(module)] for path, module in model.named_modules() if id(module) in strategies}


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


def _refuse_no_plan(plan: Mapping[str, str], tp: int, model_type: str) -> None:
    if not {"column", "row"} & {*plan.values()}:
        message = f"{model_type} has no tensor-parallel plan in transformers."
        raise problem_of_key("parallel.tp", tp, message, _PLAN_REMEDY)
