"""Builds a run's model from its configuration: built-in, Hugging Face, or a user's factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from parallel3d.config.errors import ConfigProblems, enumerate_words, problem_of_key
from parallel3d.config.factories import blaming, call_factory
from parallel3d.config.fields import TensorStrategy
from parallel3d.config.sections import CustomModel, GptModel, LlamaModel, RunConfig
from parallel3d.models.gpt import build_gpt
from parallel3d.models.layer_sequence import CannotBeCut, LayerRow, find_row
from parallel3d.models.layered import LayeredModel
from parallel3d.models.llama import build_llama
from parallel3d.seeding import seeded
from runtime.errors import InvalidCall


def build_model(config: RunConfig) -> LayeredModel:
    """The run's model, the same on every rank. Raises ConfigError, which names the key at fault."""
    with seeded(config.train.seed):  # models on `meta` may draw random numbers too
        model = _built(config)
    _check_stages(model, config)
    return model


def _built(config: RunConfig) -> LayeredModel:
    if isinstance(config.model, GptModel):
        return build_gpt(config.model.args)
    if isinstance(config.model, LlamaModel):
        return build_llama(config.model.args)
    if isinstance(config.model, CustomModel):
        return _of_user(config.model, config.num_stages, config.train.seed)
    from parallel3d.models.hf import build_hf  # few runs need it

    return build_hf(config)


def _check_stages(model: LayeredModel, config: RunConfig) -> None:
    """Check the stages, once the number of layers is known."""
    given = config.pipeline.layers_per_stage
    key, value = ("parallel.pp", config.parallel.pp) if given is None else ("pipeline.layers_per_stage", given)
    try:
        model.cut(config.num_stages, "even" if given == "profile" else given)
    except InvalidCall as error:
        raise problem_of_key(key, value, str(error)) from error


def _of_user(config: CustomModel, num_stages: int, seed: int) -> LayeredModel:
    whole = _called(config, seed)
    _refuse_without_values(config.factory, whole)
    row = _row(config, whole, num_stages)
    known = {id(module) for module in whole.modules()}
    for path, module in row.layers:
        if id(module) not in known:  # so that every called module has a path
            whole.add_module(path, module)
    before, layers, after = (tuple(path for path, _ in part) for part in (row.before, row.layers, row.after))
    return LayeredModel(whole, before, layers, after, _plan(config.factory, whole), reset_parameters)


def _called(config: CustomModel, seed: int) -> nn.Module:
    # GPUs are seeded too: every rank calls the factory and must get the same model. But CUDA must not be initialized
    # here, because ranks may still be forked from this process.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = list(range(torch.cuda.device_count())) if used else []
    with seeded(seed), torch.random.fork_rng(gpus):
        torch.manual_seed(seed)
        model = call_factory("model.factory", config.factory, "model.args", **config.args)
    if isinstance(model, nn.Module):
        return model
    message = f"it returned a value of type {type(model).__name__}, which is no nn.Module."
    raise _refused(config.factory, message, "Return the model.")


def _refused(factory: str, message: str, remedy: str = "") -> ConfigProblems:
    return problem_of_key("model.factory", factory, message, remedy)


def _row(config: CustomModel, model: nn.Module, num_stages: int) -> LayerRow:
    try:
        return _found_row(config, model)
    except CannotBeCut as error:
        if num_stages == 1:
            return LayerRow((("", model),))
        remedy = (
            f"Or say with model.layers where they are, such as blocks.*; else it can have 1 stage, not {num_stages}."
        )
        raise _refused(config.factory, str(error), remedy) from error
    except InvalidCall as error:
        key, value = ("model.factory", config.factory) if config.layers is None else ("model.layers", config.layers)
        raise problem_of_key(key, value, str(error)) from error


def _found_row(config: CustomModel, model: nn.Module) -> LayerRow:
    with blaming("model.factory", config.factory, "pipeline_layers()"):
        try:
            return find_row(model, config.layers)
        except InvalidCall as error:
            refused = error
    raise refused


def _plan(factory: str, model: nn.Module) -> Mapping[str, str]:
    given: Any = getattr(model, "tensor_plan", {})
    with blaming("model.factory", factory, "tensor_plan()"):
        plan = given() if callable(given) else given
    if not isinstance(plan, Mapping):
        message = f"the model's tensor_plan is {type(plan).__name__}, but must map patterns to strategies."
        raise _refused(factory, message, 'For example {"blocks.*.up": "column"}.')
    for pattern, strategy in plan.items():
        if strategy not in get_args(TensorStrategy):
            message = f"the model's tensor_plan has {strategy!r} for {pattern!r}."
            remedy = f"A strategy must be {enumerate_words(get_args(TensorStrategy))}."
            raise _refused(factory, message, remedy)
    return dict(plan)


def _refuse_without_values(factory: str, model: nn.Module) -> None:
    """Refuse parameters that could not be initialized, before anything starts."""
    for path, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        name = f"{path or 'the model'} ({type(module).__name__})"
        if any(is_lazy(each) for each in own):
            raise _refused(factory, f"{name} has no shape yet.", "Give it its sizes.")
        if any(each.is_meta for each in own) and _reset_of(module) is None:
            message = f"{name} is on meta and has no method reset_parameters() to initialize it."
            raise _refused(factory, message, "Write one, or build the model with real memory.")


def reset_parameters(module: nn.Module) -> None:
    """Initialize a module by its own method."""
    reset = _reset_of(module)
    if reset is not None:
        reset()


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    # Some modules of torch, such as MultiheadAttention, have it under a private name.
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next((each for each in found if callable(each)), None)
