"""The keys of the YAML file as JSON Schema, for editors, and as Markdown: docs/configuration.md."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from parallel3d.config.aliases import ALIASES, OTHER_SECTIONS, SECTION_ALIASES, VALUE_ALIASES
from parallel3d.config.errors import show
from parallel3d.config.sections import ARGS, MODELS, CustomModel, GptModel, RunConfig

_INTRODUCTION = """\
# Configuration

Every key of the YAML file. All are optional: an empty file is a valid run on one rank.
`parallel3d validate run.yaml` checks a file and lists all its errors, without building the model or the data;
`parallel3d schema` prints the JSON Schema with which an editor completes and checks keys.

The environment overrides the file: `PARALLEL3D_PARALLEL__PP=4` sets `parallel.pp`.
`--set parallel.pp=4` overrides both. A value is read as YAML; a mapping changes only the keys it has:
`--set 'model.args={width: 64}'` leaves the other arguments as they are.
Paths are relative to the current folder, not to the file.
"""
_ALIASES_TITLE = """\
## Other spellings

Names of torchtitan, Megatron-LM and Hugging Face that are accepted for ours, except among the keywords of a model of
your own.
"""


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the YAML file, aliases included."""
    schema = RunConfig.model_json_schema()
    definitions, sections = schema["$defs"], schema["properties"]
    for name, section in sections.items():
        sections[name] = _nullable_section(section, RunConfig.model_fields[name].description)
    sections |= {alias: _alias_of(sections[name], name) for alias, name in SECTION_ALIASES.items()}
    for model in MODELS.values():
        fields = definitions[model.__name__]["properties"]
        fields["args"] = _nullable_section(fields["args"], model.model_fields["args"].description)
    for section in OTHER_SECTIONS:
        sections[section] = {"type": "object", "additionalProperties": False, "properties": {}}
    owners = {name.lower(): definitions[name] for name in definitions} | {
        name: sections[name] for name in OTHER_SECTIONS
    }
    for path, words in VALUE_ALIASES.items():
        section, key = path.split(".")
        _allow_words(owners[section]["properties"][key], list(words))
    for alias, path in ALIASES.items():
        for args in ARGS.values() if path.startswith("model.args.") else (None,):
            _add_alias(alias, path, owners | ({"model.args": definitions[args.__name__]} if args else {}))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "parallel3d run"}


def _add_alias(alias: str, path: str, owners: dict[str, dict[str, Any]]) -> None:
    (section, _, key), (owner, _, other_key) = path.rpartition("."), alias.rpartition(".")
    if (target := owners[section]["properties"].get(key)) is not None:
        owners[owner]["properties"][other_key] = _alias_of(target, path)


def _nullable_section(section: dict[str, Any], description: str | None) -> dict[str, Any]:
    """Also accept null, a section without keys, which means its defaults."""
    whole = {"$ref": section["$ref"]} if "$ref" in section else {"type": "object", "additionalProperties": True}
    choices = section.get("oneOf") or [whole]
    return {"description": description, "anyOf": [*choices, {"type": "null"}]}


def _allow_words(field: dict[str, Any], words: list[str]) -> None:
    holder = next((choice for choice in field.get("anyOf", ()) if "enum" in choice), field)
    holder["enum"] = [*holder["enum"], *words]


def _alias_of(field: dict[str, Any], path: str) -> dict[str, Any]:
    return {**field, "description": f"The same as `{path}`. {field['description']}"}


def markdown() -> str:
    """The key reference, which `docs/configuration.md` holds."""
    sections = [
        _section(f"`{name}`", field.annotation) for name, field in RunConfig.model_fields.items() if name != "model"
    ]
    layers = _row("layers", CustomModel.model_fields["layers"])
    model = [f"{_section('`model`', GptModel)}{layers}\n"]
    model += [_section(f"`model.args` of `{name}`", args) for name, args in ARGS.items()]
    rows = [f"| `{alias}:` | `{name}:` |" for alias, name in SECTION_ALIASES.items()]
    rows += [f"| `{alias}` | `{name}` |" for alias, name in ALIASES.items()]
    rows += [
        f"| `{path}: {word}` | `{path}: {ours}` |"
        for path, words in VALUE_ALIASES.items()
        for word, ours in words.items()
    ]
    aliases = "\n".join((_ALIASES_TITLE, "| accepted | ours |", "|---|---|", *rows)) + "\n"
    return "\n".join((_INTRODUCTION, *model, *sections, aliases))


def _section(name: str, section: Any) -> str:
    assert issubclass(section, BaseModel)
    title = f"## {name}\n\n{section.__doc__}\n"
    rows = [_row(key, field) for key, field in section.model_fields.items()]
    return "\n".join((title, "| key | default | meaning |", "|---|---|---|", *rows)) + "\n"


def _row(key: str, field: FieldInfo) -> str:
    return f"| `{key}` | {_default(field.default)} | {_one_line(field.description or '')} |"


def _default(value: Any) -> str:
    return "see below" if isinstance(value, BaseModel) else f"`{value if isinstance(value, str) else show(value)}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
