"""Types of keys that need parsing: sizes, durations, schedules, rank orders, strategy tables, factories."""

from __future__ import annotations

import ipaddress
import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PlainSerializer, PlainValidator, Strict, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError

from parallel3d.config.errors import MOST_PROBLEMS, enumerate_words, nearest, show
from parallel3d.formatting import BYTES, LARGEST_SIZE, SECONDS, in_base_unit
from parallel3d.pipeline.schedules.limits import SCHEDULES, is_csv

CommStrategy = Literal["default", "ring", "tree", "hierarchical", "adaptive"]
SingleStrategy = Literal["default", "ring", "tree", "hierarchical"]
Backend = Literal["auto", "gloo", "nccl"]
OptimizerName = Literal["adamw", "sgd"]
Precision = Literal["float32", "float64", "bfloat16"]
DataSource = Literal["text", "tokens"]
TokenType = Literal["uint8", "uint16", "int32", "int64"]
LearningRateSchedule = Literal["constant", "cosine"]
TensorStrategy = Literal["column", "row", "vocab", "replicated"]
BUILT_IN_MODELS = ("gpt", "llama", "hf")
SplitMethod = Literal["even", "parameters", "profile"]

StrategyTable = tuple[tuple[int, str], ...]
RankTable = tuple[tuple[int, int, int], ...]

_AXES = ("dp", "tp", "pp")
ORDERS = tuple("-".join(axes) for axes in itertools.permutations(_AXES))
# A key of a mapping is text, so there a number of bytes has no unit.
_BYTES_OF_KEYS = {"": 1, **BYTES}
# Names of transformers and torch.
_OTHER_TENSOR_STRATEGIES = {"colwise": "column", "rowwise": "row"}
OF_KEY = "[key]"
"""Ends the location of an error about a mapping's key instead of its value, as in pydantic."""
# seconds; timers of the operating system overflow not far above
_LONGEST_DURATION = 1e9


def refusal(message: str, remedy: str) -> PydanticCustomError:
    """An error with our message and remedy, which `config.translate` keeps."""
    return PydanticCustomError("parallel3d", "{message}", {"message": message, "remedy": remedy})


def _quantity(value: Any, units: Mapping[str, float]) -> float | None:
    """A number, or text with a unit, in the base unit; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return in_base_unit(value, units) if isinstance(value, str) else None


def _size(value: Any, units: Mapping[str, float] = BYTES, example: str = '"25 MiB" or "8 GiB"') -> int:
    num_bytes = _quantity(value, units)
    if num_bytes is None or (isinstance(value, float) and not value.is_integer()):
        raise refusal("must be a size: a number of bytes, or text with a unit.", f"For example {example}.")
    if not 1 <= num_bytes <= LARGEST_SIZE:
        raise refusal("must be at least 1 byte and below 8 EiB.", f"For example {example}.")
    return int(num_bytes)


def _duration(value: Any) -> float:
    seconds = _quantity(value, SECONDS)
    if seconds is None:
        raise refusal(
            "must be a duration: a number of seconds, or text with a unit.",
            'For example 30, "30s" or "2min".',
        )
    if not 0 < seconds <= _LONGEST_DURATION:
        raise refusal("must be more than 0 and at most 1e9 seconds.", 'For example 30, "30s" or "2min".')
    return float(seconds)


def choice_refusal(
    value: Any, choices: tuple[str, ...], also: str = "", known: Mapping[str, str] = MappingProxyType({})
) -> PydanticCustomError:
    """The value is none of the choices: lists them and the nearest. known: other frameworks' names for them."""
    close = known.get(value) or nearest(value, choices) if isinstance(value, str) else None
    remedy = f"Did you mean {close}?" if close else f"For example {choices[0]}."
    return refusal(f"must be {enumerate_words([*choices, *([also] if also else [])])}.", remedy)


def _strategy_table(value: Any) -> StrategyTable:
    names = get_args(SingleStrategy)
    if not isinstance(value, dict) or not value:
        raise refusal(
            "must map sizes to strategies: up to this size, this strategy.",
            'For example {"64 KiB": tree, "1 GiB": ring}; what is larger uses the last.',
        )
    keys: dict[int, Any] = {}
    wrong: list[InitErrorDetails] = []
    for key, strategy in value.items():
        if len(wrong) > MOST_PROBLEMS:
            break
        try:
            size = _size(key, _BYTES_OF_KEYS, '"65536" or "64 KiB"')
            if size in keys:
                raise refusal(f"the same size as {show(keys[size])}.", "Remove one of the two.")
            keys[size] = key
        except PydanticCustomError as error:
            wrong.append({"type": error, "loc": (str(key), OF_KEY), "input": key})
        if strategy not in names:
            wrong.append({"type": choice_refusal(strategy, names), "loc": (str(key),), "input": strategy})
    if wrong:
        raise ValidationError.from_exception_data("strategy_table", wrong)
    return tuple(sorted((size, value[key]) for size, key in keys.items()))


def _tensor_plan(value: Any) -> dict[str, str]:
    names = get_args(TensorStrategy)
    if not isinstance(value, dict):
        raise refusal(
            f"must map patterns of modules' paths to {enumerate_words(names)}.",
            'For example {"blocks.*.up": column, "blocks.*.down": row}.',
        )
    wrong: list[InitErrorDetails] = []
    for pattern, strategy in value.items():
        if len(wrong) > MOST_PROBLEMS:
            break
        if not all(pattern.split(".")):
            error = refusal("must be a path of names with dots between them.", 'For example "blocks.*.up".')
            wrong.append({"type": error, "loc": (pattern, OF_KEY), "input": pattern})
        if strategy not in names:
            error = choice_refusal(strategy, names, known=_OTHER_TENSOR_STRATEGIES)
            wrong.append({"type": error, "loc": (pattern,), "input": strategy})
    if wrong:
        raise ValidationError.from_exception_data("tensor_plan", wrong)
    return dict(value)


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise refusal("must be a list of two numbers.", "For example [0.9, 0.999].")
    return _TWO_SHARES.validate_python(tuple(value))  # its errors name the entry


def _schedule(value: Any) -> str:
    if isinstance(value, str) and (value in SCHEDULES or is_csv(value)):
        return value
    raise choice_refusal(value, SCHEDULES, '"csv:PATH"')


def _order(value: Any) -> str | RankTable:
    if isinstance(value, (list, tuple)):
        return tuple(_coordinates(entry, rank) for rank, entry in enumerate(value))
    if isinstance(value, str) and (value == "auto" or value in ORDERS):
        return value
    raise choice_refusal(value, ("auto", *ORDERS), "a list of [dp, tp, pp], one a rank")


def _coordinates(entry: Any, rank: int) -> tuple[int, int, int]:
    whole = isinstance(entry, (list, tuple)) and [type(number) for number in entry] == [int, int, int]
    if not whole:
        raise refusal(
            f"the entry of rank {rank} must be three whole numbers.",
            "Write each rank as [dp, tp, pp], such as [0, 0, 1].",
        )
    dp, tp, pp = entry
    return dp, tp, pp


def is_factory(value: Any) -> bool:
    """Whether this has the form `package.module:name`."""
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def _named(value: Any, *names: str) -> str:
    if value in names or is_factory(value):
        return str(value)
    if not names:
        raise refusal('must be "package.module:callable".', 'For example "my_data:build".')
    raise choice_refusal(value, (*names, '"module:name"'))


def _host_address(value: Any) -> str:
    try:
        if value != "localhost":
            ipaddress.ip_address(value if isinstance(value, str) else "")
    except ValueError:
        raise refusal(
            "must be an address of this host, as text.", 'For example "127.0.0.1", or "0.0.0.0" for all of them.'
        ) from None
    return str(value)


Count = Annotated[int, Field(ge=1, le=1_000_000)]
Port = Annotated[int, Field(ge=1, le=65535)]
HostAddress = Annotated[
    str,
    PlainValidator(_host_address),
    WithJsonSchema({"type": "string", "examples": ["127.0.0.1", "0.0.0.0"]}),
]
Probability = Annotated[float, Field(ge=0, lt=1)]
_COUNTS: TypeAdapter[tuple[int, ...]] = TypeAdapter(tuple[Annotated[Count, Strict()], ...])
_TWO_SHARES: TypeAdapter[tuple[float, float]] = TypeAdapter(tuple[Probability, Probability], config={"strict": True})


def _layers_per_stage(value: Any) -> str | tuple[int, ...]:
    words = get_args(SplitMethod)
    if isinstance(value, (list, tuple)):
        return _COUNTS.validate_python(value)  # its errors name the entry
    if isinstance(value, str) and value in words:
        return value
    raise choice_refusal(value, words, "a list of numbers, one a stage")


Size = Annotated[
    int,
    PlainValidator(_size),
    WithJsonSchema({"type": ["integer", "string"], "examples": ["25 MiB", 8 << 30]}),
]
Duration = Annotated[
    float,
    PlainValidator(_duration),
    WithJsonSchema({"type": ["number", "string"], "examples": [30, "30s", "2min"]}),
]
AdaptiveTable = Annotated[
    StrategyTable,
    PlainValidator(_strategy_table),
    PlainSerializer(lambda table: {f"{size} B": strategy for size, strategy in table}),
    WithJsonSchema({"type": "object", "additionalProperties": {"enum": list(get_args(SingleStrategy))}}),
]
Schedule = Annotated[
    str,
    PlainValidator(_schedule),
    WithJsonSchema({"anyOf": [{"enum": list(SCHEDULES)}, {"type": "string", "pattern": "^csv:."}]}),
]
_TABLE_SCHEMA = {
    "type": "array",
    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 3, "maxItems": 3},
}
Order = Annotated[
    str | RankTable,
    PlainValidator(_order),
    PlainSerializer(lambda order: order if isinstance(order, str) else [list(coords) for coords in order]),
    WithJsonSchema({"anyOf": [{"enum": ["auto", *ORDERS]}, _TABLE_SCHEMA]}),
]
_MODULE_NAME = {"type": "string", "pattern": "^[^:]+:[^:]+$"}
Factory = Annotated[str, PlainValidator(_named), WithJsonSchema(_MODULE_NAME)]
ModelFactory = Annotated[
    str, PlainValidator(lambda value: _named(value, *BUILT_IN_MODELS)), WithJsonSchema(_MODULE_NAME)
]
Loss = Annotated[
    str,
    PlainValidator(lambda value: _named(value, "cross_entropy", "mse")),
    WithJsonSchema({"anyOf": [{"enum": ["cross_entropy", "mse"]}, _MODULE_NAME]}),
]
LayersPerStage = Annotated[
    SplitMethod | tuple[int, ...],
    PlainValidator(_layers_per_stage),
    PlainSerializer(lambda way: way if isinstance(way, str) else list(way)),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(get_args(SplitMethod))},
                {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 1_000_000}},
            ]
        }
    ),
]
TensorPlan = Annotated[
    dict[str, TensorStrategy],
    PlainValidator(_tensor_plan),
    WithJsonSchema({"type": "object", "additionalProperties": {"enum": list(get_args(TensorStrategy))}}),
]
LearningRate = Annotated[float, Field(gt=0, le=1e6)]
Betas = Annotated[
    tuple[float, float],
    PlainValidator(_betas),
    PlainSerializer(list),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
]


def is_finite(value: Any) -> bool:
    """False only for NaN and the infinities."""
    return not isinstance(value, float) or math.isfinite(value)
