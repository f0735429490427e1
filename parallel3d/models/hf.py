"""Causal models of Hugging Face `transformers`, unmodified, as rows of layers with their own plans."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel3d.config.errors import nearest
from parallel3d.config.errors import problem_of_key as refusal
from parallel3d.config.sections import HfModel, RunConfig
from parallel3d.models.hf_calls import Row
from parallel3d.models.hf_plan import tensor_plan
from parallel3d.models.hf_row import find_adapt, find_row
from parallel3d.models.layered import LayeredModel
from parallel3d.models.stored_weights import StoredWeights, find_weights
from parallel3d.torch_internals import buffers_of, copy_module

_init_weights: Callable[[Any], Callable[[nn.Module], None]] = attrgetter("_init_weights")
"""Private, but the only name that transformers has for it."""
_OLDEST = 5  # 5.0.0 was tried; what is older was not
_INSTALL = "Install what it needs: pip install 'parallel3d[hf]'"
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
    """The model of `model.args`, on `meta`. Nothing is read but the folder that is given, and no code of it is run."""
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
    """Imported only here: it takes seconds."""
    try:
        import safetensors  # noqa: F401
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
    except ImportError as error:
        message = f"transformers and safetensors cannot be imported: {error}."
        raise refusal("model.factory", "hf", message, _INSTALL) from error
    if int(transformers.__version__.partition(".")[0]) < _OLDEST:
        message = f"transformers {transformers.__version__} is too old: {_OLDEST} or later is needed."
        raise refusal("model.factory", "hf", message, _INSTALL)
    return transformers


def _settings(transformers: Any, given: Mapping[str, Any]) -> Any:
    """The model's configuration, from `model.args.config`."""
    keys = copy.deepcopy(dict(given))
    model_type, known = keys.pop("model_type", None), transformers.CONFIG_MAPPING
    if model_type not in known:
        similar = nearest(str(model_type), known)
        message = f"transformers {transformers.__version__} has no such model."
        raise refusal(
            "model.args.config.model_type", model_type, message, f"Did you mean {similar}?" if similar else ""
        )
    try:
        settings = known[model_type](**copy.deepcopy(keys))
    except Exception as error:  # of many kinds, from checks of its own
        raise refusal("model.args.config", given, f"transformers refuses it: {_in_short(error)}") from error
    _refuse_unknown_keys(known[model_type], keys)
    return settings


def _refuse_unknown_keys(kind: Any, keys: Mapping[str, Any]) -> None:
    """transformers takes them all, and does nothing with those that it does not know."""
    known = {*vars(kind()), *inspect.signature(kind).parameters, *kind.attribute_map, *_UNLISTED_KEYS}
    for key in keys:
        if key not in known and not key.startswith("_"):
            similar = nearest(key, (each for each in known if not each.startswith("_")))
            remedy = f"Did you mean {similar}?" if similar else "Remove it."
            raise refusal(f"model.args.config.{key}", keys[key], f"{kind.model_type} has no such key.", remedy)


def _read_settings(transformers: Any, path: str | None) -> Any:
    """The model's configuration, from `config.json` in the folder `model.args.path`."""
    folder = Path(str(path))
    if not (folder / "config.json").is_file():
        remedy = "Give a folder that save_pretrained has written; nothing is downloaded."
        raise refusal("model.args.path", path, f"there is no {folder / 'config.json'}.", remedy)
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, from checks of its own
        message = f"transformers refuses its config.json: {_in_short(error)}"
        raise refusal("model.args.path", path, message) from error


def _in_short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:299]}…"


def _refuse_settings(settings: Any) -> None:
    kernel = str(getattr(settings, "_attn_implementation", None) or "")
    if "/" in kernel:
        message = f"its attention {kernel} would have to be downloaded."
        raise refusal("model.factory", "hf", message, "Set attn_implementation to sdpa or eager.")
    if getattr(settings, "quantization_config", None):
        raise refusal("model.factory", "hf", "quantized weights cannot be trained.", "Remove quantization_config.")


def _refuse_sequence_parallel(config: RunConfig) -> None:
    if config.parallel.sequence_parallel and config.parallel.tp > 1:
        message = "attention of Hugging Face models needs the whole sequence as its input."
        raise refusal("parallel.sequence_parallel", True, message, "Set it to false.")


def _on_meta(transformers: Any, settings: Any) -> Any:
    """In float32, whatever was stored: `train.precision` counts, when the model is given memory."""
    settings.use_cache = False
    try:
        with torch.device("meta"):
            kind = transformers.AutoModelForCausalLM
            model = kind.from_config(settings, dtype=torch.float32, trust_remote_code=False).train()
            model.tie_weights()  # which early versions don't do on `meta`
            return model
    except Exception as error:  # of many kinds, from checks of its own
        message = f"transformers cannot build a causal {settings.model_type}: {_in_short(error)}"
        raise refusal("model.factory", "hf", message) from error


def _fill_beside(whole: Any, row: Row) -> None:
    """What stands beside the row, such as rotary frequencies, is small, and real on every rank."""
    for path, module in whole.named_modules():
        if any(path == each or path.startswith(f"{each}.") for each in row.paths):
            continue
        for name, _ in module.named_parameters(recurse=False):
            message = f"the pipeline plan of {whole.config.model_type} has no place for {path}.{name}."
            raise refusal("model.factory", "hf", message, "Wrap the model in a factory of your own.")
        _fill_buffers(whole, path, module)


def _refuse_empty_buffers(whole: Any, row: Row) -> None:
    """Before anything starts: what will get no values then."""
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
            message = f"transformers does not say how {path}.{name} begins, in its _init_weights."
            raise refusal("model.factory", "hf", message, "Wrap the model in a factory of your own.")


@torch.no_grad()
def _init(whole: Any, module: nn.Module) -> None:
    """First values by the model's own rules."""
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
        raise refusal("model.args.path", str(folder), message, "Give model.args.config instead, to begin at random.")
    return find_weights(folder, parameters, paths.values())
