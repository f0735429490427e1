"""Rules of the model, the data and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from parallel3d.config.errors import enumerate_words
from parallel3d.config.factories import missing_module
from parallel3d.config.fields import is_factory
from parallel3d.config.findings import Check, Finding, Rule, near_divisors, near_multiples
from parallel3d.config.sections import CustomModel, GptModel, HfModel, LlamaModel, RunConfig


def _heads_divide_width(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if not isinstance(config.model, GptModel | LlamaModel):
        return
    width, heads = config.model.args.width, config.model.args.heads
    if width % heads:
        yield Finding(
            ("model.args.heads", "model.args.width"),
            f"width({width}) is not a multiple of heads({heads}).",
            f"Set heads to {near_divisors(width, heads)}, or width to {near_multiples(width, heads)}.",
        )


def _kv_heads_divide_heads(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if not isinstance(config.model, LlamaModel) or config.model.args.kv_heads is None:
        return
    heads, kv_heads = config.model.args.heads, config.model.args.kv_heads
    if heads % kv_heads:
        yield Finding(
            ("model.args.kv_heads", "model.args.heads"),
            f"heads({heads}) is not a multiple of kv_heads({kv_heads}).",
            f"Set kv_heads to {near_divisors(heads, kv_heads)}.",
        )


def _heads_are_even(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if not isinstance(config.model, LlamaModel):
        return
    width, heads = config.model.args.width, config.model.args.heads
    if width % heads == 0 and width // heads % 2:
        yield Finding(
            ("model.args.heads", "model.args.width"),
            f"width({width}) / heads({heads}) = {width // heads}, but rotary positions turn pairs of channels.",
            f"Set width to {near_multiples(width, 2 * heads)}.",
        )


def _tp_divides_sizes(config: RunConfig, _: int | None) -> Iterator[Finding]:
    tp = config.parallel.tp
    fitting = near_divisors(math.gcd(*_cut_sizes(config).values()), tp)
    for name, size in does_not_divide(config, tp).items():
        others = enumerate_words([str(number) for number in _other_sizes(config, name, size)])
        yield Finding(
            ("parallel.tp", f"model.args.{name}"),
            f"{name}({size}) is not a multiple of tp({tp}).",
            f"Set tp to {fitting}{f', or {name} to {others}' if others else ''}.",
        )


def does_not_divide(config: RunConfig, tp: int) -> dict[str, int]:
    """Sizes of the model that tensor parallelism splits and that are no multiples of tp."""
    return {name: size for name, size in _cut_sizes(config).items() if size % tp}


def _cut_sizes(config: RunConfig) -> dict[str, int]:
    """Sizes that a built-in model's own plan splits; other plans are checked with the modules before the start."""
    model = config.model
    if not isinstance(model, GptModel | LlamaModel) or config.parallel.tensor_plan is not None:
        return {}
    sizes = {"heads": model.args.heads}
    if isinstance(model, LlamaModel):
        sizes |= {"kv_heads": model.args.num_kv_heads, "mlp_width": model.args.inner_width}
        if model.args.kv_heads is None:
            del sizes["kv_heads"]  # equals heads, which is listed already
    return sizes


def _other_sizes(config: RunConfig, name: str, size: int) -> list[int]:
    """Multiples of tp near the size that also divide what the size must divide."""
    assert isinstance(config.model, GptModel | LlamaModel)
    tp, args = config.parallel.tp, config.model.args
    multiples = [number for number in (size // tp * tp, (size // tp + 1) * tp) if number]
    whole = {"heads": args.width, "kv_heads": args.heads}.get(name)
    return [number for number in multiples if whole is None or whole % number == 0]


def _sequence_is_cut(config: RunConfig, _: int | None) -> Iterator[Finding]:
    sequence, tp = config.sequence, config.parallel.tp
    if not config.parallel.sequence_parallel or config.data.factory is not None or sequence % tp == 0:
        return
    key = "data.sequence" if config.data.sequence or isinstance(config.model, CustomModel) else "model.args.sequence"
    yield Finding(
        ("parallel.sequence_parallel",),
        f"the sequence({sequence}) is not a multiple of tp({tp}).",
        f"Set {key} to {near_multiples(sequence, tp)}, or sequence_parallel to false.",
    )


def _sequence_fits_model(config: RunConfig, _: int | None) -> Iterator[Finding]:
    """Only for GPT: rotary positions have no upper limit, and other models' limits are unknown here."""
    if not isinstance(config.model, GptModel) or config.data.sequence is None:
        return
    given, most = config.data.sequence, config.model.args.sequence
    if given > most:
        yield Finding(
            ("data.sequence", "model.args.sequence"),
            f"data.sequence({given}) is more than model.args.sequence({most}), the positions that the model has.",
            f"Set data.sequence to {most} or less, or model.args.sequence to {given} or more.",
        )


def _tokens_have_a_file(config: RunConfig, _: int | None) -> Iterator[Finding]:
    data = config.data
    if data.source == "tokens" and data.path is None and data.factory is None:
        yield Finding(("data.path", "data.source"), "tokens are read from a file.", "Set data.path to it.")


def _hf_model_is_given(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if not isinstance(config.model, HfModel):
        return
    given = config.model.args
    if given.path is None and given.config is None:
        yield Finding(
            ("model.args.path", "model.args.config", "model.factory"),
            "hf needs a folder or a configuration.",
            "Set model.args.path to a folder of save_pretrained, or model.args.config to {model_type: ...}.",
        )
    elif given.path is not None and given.config is not None:
        yield Finding(("model.args.path",), "not read when model.args.config is given.", "Remove one of the two.")
    elif given.config is not None and not isinstance(given.config.get("model_type"), str):
        yield Finding(
            ("model.args.config",), "it does not say which model it is.", "Add model_type, for example llama."
        )


def _cosine_goes_down(config: RunConfig, _: int | None) -> Iterator[Finding]:
    optimizer = config.optimizer
    if optimizer.schedule == "cosine" and optimizer.min_lr > optimizer.lr:
        yield Finding(
            ("optimizer.min_lr", "optimizer.lr"),
            f"cosine goes down from lr({optimizer.lr}) to min_lr({optimizer.min_lr}).",
            f"Set min_lr to {optimizer.lr} or less.",
        )


def _factories_exist(key: str, value: Callable[[RunConfig], str | None]) -> Check:
    def check(config: RunConfig, _: int | None) -> Iterator[Finding]:
        name = value(config)
        missing = missing_module(name) if name is not None and is_factory(name) else None
        if missing is not None:
            yield Finding((key,), missing.message, missing.remedy)

    return check


def _one_source_of_data(config: RunConfig, _: int | None) -> Iterator[Finding]:
    if config.data.factory is not None and config.data.path is not None:
        yield Finding(("data.path",), "not read when data.factory is given.", "Remove data.path or data.factory.")


MODEL_RULES = (
    Rule(_heads_divide_width, ("model.factory", "model.args.width", "model.args.heads")),
    Rule(_heads_are_even, ("model.factory", "model.args.width", "model.args.heads")),
    Rule(_kv_heads_divide_heads, ("model.factory", "model.args.heads", "model.args.kv_heads")),
    Rule(
        _tp_divides_sizes,
        (
            "model.factory",
            "model.args.width",
            "model.args.heads",
            "model.args.kv_heads",
            "model.args.mlp_width",
            "parallel.tp",
            "parallel.tensor_plan",
        ),
    ),
    Rule(
        _sequence_is_cut,
        (
            "model.factory",
            "model.args.sequence",
            "data.sequence",
            "data.factory",
            "parallel.tp",
            "parallel.sequence_parallel",
        ),
    ),
    Rule(_sequence_fits_model, ("model.factory", "model.args.sequence", "data.sequence")),
    Rule(_tokens_have_a_file, ("data.source", "data.path", "data.factory")),
    Rule(_hf_model_is_given, ("model.factory", "model.args.path", "model.args.config")),
    Rule(_cosine_goes_down, ("optimizer.schedule", "optimizer.lr", "optimizer.min_lr")),
    Rule(_factories_exist("model.factory", lambda config: config.model.factory), ("model.factory",)),
    Rule(_factories_exist("model.loss", lambda config: config.model.loss), ("model.loss",)),
    Rule(_factories_exist("data.factory", lambda config: config.data.factory), ("data.factory",)),
    Rule(_one_source_of_data, ("data.path", "data.factory")),
)
