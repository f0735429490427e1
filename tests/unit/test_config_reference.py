"""The schema and the reference page say what the loader does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config import load_config
from parallel3d.config.aliases import ALIASES, SECTION_ALIASES, VALUE_ALIASES
from parallel3d.config.models import RunConfig
from parallel3d.config.reference import json_schema, markdown

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def definition(path: str) -> dict[str, Any]:
    """The schema of the section at that dotted path."""
    schema = json_schema()
    names = {"model.args": "GptArgs", "model": "GptModel"}
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
    assert set(json_schema()["properties"]) == {*RunConfig.model_fields, *SECTION_ALIASES}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_every_alias_is_in_the_schema(alias, name):
    section, _, key = alias.rpartition(".")
    described = definition(section)["properties"][key]["description"]
    assert described.startswith(f"The same as `{name}`. ")


@pytest.mark.parametrize(("path", "words"), VALUE_ALIASES.items())
def test_every_known_word_is_in_the_schema(path, words):
    section, key = path.split(".")
    assert all(f'"{word}"' in json.dumps(definition(section)["properties"][key]) for word in words)


def test_the_schema_has_the_loaders_defaults():
    for name, values in load_config(None, environ={}).model_dump(mode="json").items():
        fields = definition(name)["properties"]
        for key in values.keys() - {"args", "batch_size"}:
            assert fields[key]["default"] == values[key]
