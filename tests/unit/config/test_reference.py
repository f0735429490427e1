"""The schema and the reference page say what the loader does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config import load_config
from parallel3d.config.aliases import ALIASES, OTHER_SECTIONS, SECTION_ALIASES, VALUE_ALIASES
from parallel3d.config.reference import json_schema, markdown
from parallel3d.config.sections import ARGS, MODELS, RunConfig

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def definition(path: str, args: str = "GptArgs") -> dict[str, Any]:
    """The schema of the section at that dotted path."""
    schema = json_schema()
    if path in OTHER_SECTIONS:
        return schema["properties"][path]
    names = {"model.args": args, "model": "GptModel"}
    return schema["$defs"][names.get(path, path.title())] if path else schema


def test_the_reference_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: parallel3d schema --markdown > docs/configuration.md"


def test_the_schema_is_draft_2020_12_and_plain_json():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(schema)) == schema
    assert schema["additionalProperties"] is False


def test_every_key_is_described():
    for section in json_schema()["$defs"].values():
        assert all(field.get("description") for field in section["properties"].values())
        assert section["additionalProperties"] is False
    assert set(json_schema()["properties"]) == {*RunConfig.model_fields, *SECTION_ALIASES, *OTHER_SECTIONS}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_every_alias_is_in_the_schema(alias, name):
    section, _, key = alias.rpartition(".")
    for args in ("GptArgs", "LlamaArgs", "HfArgs"):
        fields = definition(section, args)["properties"]
        if section != "model.args" or name.rpartition(".")[2] in fields:
            assert fields[key]["description"].startswith(f"The same as `{name}`. ")
        else:
            assert key not in fields


@pytest.mark.parametrize(("path", "words"), VALUE_ALIASES.items())
def test_every_known_word_is_in_the_schema(path, words):
    section, key = path.split(".")
    assert all(f'"{word}"' in json.dumps(definition(section)["properties"][key]) for word in words)


@pytest.mark.parametrize("args", ARGS.values())
def test_every_keyword_of_a_built_in_model_is_on_the_page(args):
    page = markdown()
    assert all(f"| `{key}` | " in page for key in args.model_fields)


def test_the_schema_tells_models_apart_by_their_factory():
    schema = json_schema()
    choices = [choice.get("$ref", "null") for choice in schema["properties"]["model"]["anyOf"]]
    assert choices == [*(f"#/$defs/{model.__name__}" for model in MODELS.values()), "null"]
    factories = [schema["$defs"][model.__name__]["properties"]["factory"] for model in MODELS.values()]
    assert [factory.get("const", factory.get("pattern")) for factory in factories] == [*ARGS, "^[^:]+:[^:]+$"]
    needed = [schema["$defs"][model.__name__].get("required", []) for model in MODELS.values()]
    assert needed == [[], ["factory"], ["factory"], ["factory"]]


@pytest.mark.parametrize("model", MODELS.values())
def test_args_that_stand_alone_are_null_in_the_schema(model):
    args = json_schema()["$defs"][model.__name__]["properties"]["args"]
    assert args["anyOf"][1] == {"type": "null"}
    assert args["description"]


def test_lists_and_maps_in_the_schema():
    betas = definition("optimizer")["properties"]["betas"]
    assert (betas["minItems"], betas["maxItems"], betas["items"]["exclusiveMaximum"]) == (2, 2, 1)
    plan = definition("parallel")["properties"]["tensor_plan"]["anyOf"][0]
    assert plan["additionalProperties"] == {"enum": ["column", "row", "vocab", "replicated"]}


def test_the_schema_has_the_loaders_defaults():
    for name, values in load_config(None, environ={}).model_dump(mode="json").items():
        fields = definition(name)["properties"]
        for key in values.keys() - {"args", "batch_size"}:
            assert fields[key]["default"] == values[key]
