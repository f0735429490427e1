"""Checks before ranks start: whether the run can be built, cut and fed as configured. Loads torch when called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from parallel3d.config.errors import ConfigProblems, Place, problem_of_key
from parallel3d.config.sections import GptModel, LlamaModel, RunConfig
from parallel3d.planning.blueprint import Blueprint, draw, table_of
from runtime.errors import ConfigError, InvalidCall

Locate = Callable[[str], Place]
"""From a key to the place of its value, as errors name it; "" is the file."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the model before ranks start."""

    parameters: int = 0
    flops_per_token: float = 0.0
    """Forward and backward."""


def nowhere(key: str) -> Place:
    """The `Locate` of a configuration without a file."""
    return Place("")


def check_before_start(config: RunConfig, locate: Locate = nowhere, num_local: int | None = None) -> ModelFacts:
    """Build the pipeline's table, the model without memory, its tensor plan, its loss and its dataset.

    locate: finds the place that an error names. num_local: ranks on this host; None for all.
    Raises ConfigError, which names the key.
    """
    with _naming(locate):
        return _check(config, config.world_size if num_local is None else num_local)


def draw_before_start(config: RunConfig, locate: Locate = nowhere) -> Blueprint:
    """The run's blueprint, without memory for its model. Raises ConfigError, which names the key."""
    with _naming(locate):
        return _drawn(config)


@contextlib.contextmanager
def placing(locate: Locate) -> Iterator[None]:
    """Give problems raised inside that have no place yet the place of their key."""
    try:
        yield
    except ConfigProblems as error:
        problems = [each if each.place.source else replace(each, place=locate(each.path)) for each in error.problems]
        raise ConfigProblems(problems) from error


@contextlib.contextmanager
def _naming(locate: Locate) -> Iterator[None]:
    """Like `placing`, and an InvalidCall becomes a ConfigError that names the file."""
    try:
        with placing(locate):
            yield
    except InvalidCall as error:
        raise ConfigError(f"{locate('')}  {error}") from error


def _drawn(config: RunConfig) -> Blueprint:
    try:
        table_of(config)
    except InvalidCall as error:
        raise problem_of_key("pipeline.schedule", config.pipeline.schedule, str(error)) from error
    return draw(config)


def _check(config: RunConfig, num_local: int) -> ModelFacts:
    from parallel3d.data import make_dataset
    from parallel3d.models.losses import make_loss

    _check_devices(config.comm.backend, num_local)
    model = _drawn(config).model
    make_loss(config.model.loss)
    make_dataset(config)
    parameters = sum(parameter.numel() for parameter in model.whole.parameters())
    return ModelFacts(parameters, flops_per_token(config, parameters))


def _check_devices(backend: str, num_local: int) -> None:
    """Whether each local rank has a CUDA device; counting them initializes none."""
    if backend != "nccl":
        return
    import torch

    found = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    if found < num_local:
        have = f"there {'are' if found > 1 else 'is'} {found}" if found else "there is none, or torch has no NCCL"
        message = f"each rank needs a CUDA device, {num_local} of them on this host: {have}."
        raise problem_of_key("comm.backend", backend, message, "Set it to auto or gloo, or start fewer ranks here.")


def flops_per_token(config: RunConfig, parameters: int) -> float:
    """Of forward and backward: 6 a parameter; built-in models add 12 x layers x width x sequence for attention."""
    attention = 0
    if isinstance(config.model, GptModel | LlamaModel):
        attention = 12 * config.model.args.layers * config.model.args.width * config.sequence
    return 6.0 * parameters + attention
