"""No error of pydantic's can reach a user in pydantic's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from parallel3d.config.sections import ARGS, MODELS, RunConfig
from parallel3d.config.translate import TRANSLATED

# Every kind of schema our models are made of, and the error types it can raise. Core types are strict.
ERRORS_OF = {
    "model": {"model_type"},
    "model-fields": {"model_type", "extra_forbidden"},
    "model-field": set(),
    "default": set(),
    "nullable": set(),
    "definitions": set(),
    "definition-ref": set(),
    "any": set(),
    "int": {"int_type", "greater_than_equal", "less_than_equal", "less_than"},
    "float": {"float_type", "greater_than_equal", "greater_than", "less_than", "less_than_equal"},
    "bool": {"bool_type"},
    "str": {"string_type"},
    "literal": {"literal_error"},
    "tuple": {"tuple_type"},
    "dict": {"dict_type", "string_type"},
    "tagged-union": set(),  # the discriminator always answers with one of the tags
    "function-plain": {"parallel3d"},
    "function-before": set(),
}
# The only fields that are required are picked by their own presence.
REQUIRED = {("LlamaModel", "factory"), ("HfModel", "factory"), ("CustomModel", "factory")}


def schemas(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            yield node
        for key, child in node.items():
            if key not in ("metadata", "serialization", "function"):
                yield from schemas(child)
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from schemas(child)


def test_each_kind_of_schema_raises_only_what_is_translated():
    kinds = {schema["type"] for schema in schemas(RunConfig.__pydantic_core_schema__)}
    assert kinds <= ERRORS_OF.keys()
    assert set().union(*(ERRORS_OF[kind] for kind in kinds)) <= TRANSLATED


def test_only_what_picks_a_model_is_required():
    sections = (*MODELS.values(), *ARGS.values(), *(type(section) for _, section in RunConfig()))
    required = {
        (section.__name__, name)
        for section in sections
        for name, field in section.model_fields.items()
        if field.is_required()
    }
    assert required == REQUIRED


def test_no_field_needs_more_constraints_than_are_translated():
    known = {"ge", "gt", "le", "lt", "strict"}
    for schema in schemas(RunConfig.__pydantic_core_schema__):
        if schema["type"] in ("int", "float", "str", "tuple", "dict"):
            shape = {
                "type",
                "metadata",
                "items_schema",
                "variadic_item_index",
                "keys_schema",
                "values_schema",
                "serialization",
            }
            assert schema.keys() - shape <= known


BAD = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    -(10**30),
    10**400,
    1e300,
    "",
    "x",
    "4",
    "a:b:c",
    [],
    [None],
    ["x"],
    [[1]],
    {},
    {"x": {}},
]  # keys are always text: the file and the overrides see to that


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))


def error_types(values: dict[str, Any]) -> set[str]:
    try:
        RunConfig.model_validate(values)
    except ValidationError as error:
        return {details["type"] for details in error.errors()}
    return set()


def seen_in(path: tuple[str, ...], factory: str | None = None) -> set[str]:
    seen: set[str] = set()
    for bad in BAD:
        values: Any = bad
        for key in reversed(path):
            values = {key: values}
        seen |= error_types({"model": {**values["model"], "factory": factory}} if factory else values)
    return seen


@pytest.mark.parametrize("path", list(leaves(RunConfig().model_dump())), ids=".".join)
def test_bad_values_for_every_field_raise_only_what_is_translated(path):
    seen = seen_in(path)
    if path in (("model", "args"), ("model", "loss")):
        seen |= seen_in(path, "os:walk")
    assert seen
    assert seen <= TRANSLATED


@pytest.mark.parametrize(
    ("factory", "path"),
    [
        *((name, ("model", "args", key)) for name, args in ARGS.items() for key in args.model_fields),
        *((name, ("model", key)) for name in ARGS for key in ("args", "loss")),
        ("os:walk", ("model", "layers")),
    ],
    ids=str,
)
def test_bad_values_for_every_model_raise_only_what_is_translated(factory, path):
    seen = seen_in(path, factory)
    assert seen
    assert seen <= TRANSLATED
