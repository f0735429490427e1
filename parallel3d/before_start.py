"""What is found out about a run before its ranks start: whether it can be built, cut and fed as configured."""

from __future__ import annotations

from parallel3d.config.models import GptModel, LlamaModel, RunConfig
from parallel3d.run_record import ModelFacts
from runtime.errors import ConfigError, InvalidCall


def check_before_start(config: RunConfig) -> ModelFacts:
    """Build the model without memory, its pipeline's table, its tensor plan and its dataset, and find its loss.

    Raises ConfigError, which names the key at fault.
    """
    from parallel3d.blueprint import draw  # torch takes seconds
    from parallel3d.data import make_dataset
    from parallel3d.losses import make_loss

    try:
        model = draw(config).model
        make_loss(config.model.loss)
        make_dataset(config)
    except InvalidCall as error:
        raise ConfigError(str(error)) from error
    parameters = sum(parameter.numel() for parameter in model.whole.parameters())
    return ModelFacts(parameters, flops_per_token(config, parameters))


def flops_per_token(config: RunConfig, parameters: int) -> float:
    """Forward and backward: 6 operations a parameter, and for attention 12 times layers, width and sequence."""
    attention = 0
    if isinstance(config.model, GptModel | LlamaModel):
        attention = 12 * config.model.args.layers * config.model.args.width * config.sequence
    return 6.0 * parameters + attention
