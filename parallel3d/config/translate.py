"""pydantic's errors as our problems: message and remedy in our words, with the place in the YAML tree."""

from __future__ import annotations

import itertools
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from parallel3d.config.aliases import ALIASES, NOT_YET, SECTION_ALIASES
from parallel3d.config.errors import (
    MOST_PROBLEMS,
    Problem,
    dotted,
    enumerate_words,
    nearest,
    raise_if_too_many,
    show,
)
from parallel3d.config.fields import OF_KEY, choice_refusal
from parallel3d.config.sections import ARGS, MODELS, RunConfig
from parallel3d.config.yaml_positions import KeyPath, Node
from parallel3d.config.yaml_scalars import resolve_scalar

_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}
# Booleans of YAML 1.1 and other programs; in YAML 1.2 these are text and numbers.
_MEANT_TRUE = frozenset(("true", "yes", "on", "1"))
_MEANT_FALSE = frozenset(("false", "no", "off", "0"))
TRANSLATED = frozenset(("parallel3d", "extra_forbidden", "literal_error", *_WANTED, *_LIMITS))


def translate(error: ValidationError, tree: Node) -> list[tuple[KeyPath, Problem]]:
    """Each of pydantic's errors as a problem, with the path of the invalid value."""
    found = [
        _translated(details, tree) for details in itertools.islice(error.errors(include_url=False), MOST_PROBLEMS + 1)
    ]
    raise_if_too_many([problem for _, problem in found], tree.place.source)
    return found


def _translated(details: ErrorDetails, tree: Node) -> tuple[KeyPath, Problem]:
    path = details["loc"]
    model = "gpt"
    if path[0] == "model":
        model, path = str(path[1]), (path[0], *path[2:])  # pydantic puts the union's tag there
    if details["type"] == "extra_forbidden":
        return path, _unknown_key(path, tree, model)
    message, remedy = _wording(details, path, model)
    if path[-1] == OF_KEY and tree.find(path) is None:
        path = path[:-1]
        return path, Problem(tree.key_place_of(path), dotted(tree.as_written(path)), None, message, remedy)
    return path, Problem(tree.place_of(path), dotted(tree.as_written(path)), show(details["input"]), message, remedy)


def _wording(details: ErrorDetails, path: KeyPath, model: str) -> tuple[str, str]:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "parallel3d":
        return context["message"], context["remedy"]
    if kind == "literal_error":
        refusal = choice_refusal(value, get_args(_field(path, model).annotation)).context or {}
        return refusal["message"], refusal["remedy"]
    if kind in _LIMITS:
        bound, words = _LIMITS[kind]
        return f"must be {words} {context[bound]}.", _limit_remedy(kind, context[bound], path, model)
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}.", _type_remedy(kind, value, path, model)
    return "is not accepted here.", _example(path, model)


def _limit_remedy(kind: str, bound: Any, path: KeyPath, model: str) -> str:
    return f"Set it to {bound}." if kind.endswith("equal") else _example(path, model)


def _type_remedy(kind: str, value: Any, path: KeyPath, model: str) -> str:
    if kind == "bool_type":
        return _truth_remedy(value, path, model)
    if kind == "string_type" and isinstance(value, (int, float)):
        return f'Put it in quotes: "{show(value)}".'
    number = resolve_scalar(value) if isinstance(value, str) else value
    if kind == "int_type" and isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        return f"Write {int(number)}."
    wanted = {"int_type": (int,), "float_type": (int, float)}.get(kind, ())
    if isinstance(value, str) and type(number) in wanted:
        return f"Write {show(number)} without quotes."
    return _example(path, model)


def _truth_remedy(value: Any, path: KeyPath, model: str) -> str:
    word = show(value).strip('"').lower()
    if word not in _MEANT_TRUE | _MEANT_FALSE:
        return _example(path, model)
    meant = show(word in _MEANT_TRUE)
    return f"Write {meant} without quotes." if word == meant else f"Write {meant}."


def _example(path: KeyPath, model: str) -> str:
    if "layers_per_stage" in path:
        return "For example layers_per_stage: [6, 6, 6, 6]."
    if path == ("model", "args", "config"):
        return "For example {model_type: llama}."
    default = _field(path, model).get_default(call_default_factory=True)
    if isinstance(default, (BaseModel, dict)):
        return f"Put keys under {path[-1]}, one a line and indented, or leave it out."
    if default is None:
        return "Leave it out."
    return f"For example {default if isinstance(default, str) else show(default)}."


def _field(path: KeyPath, model: str) -> FieldInfo:
    """The field at that path; for an entry of a list, the field that holds the list."""
    names = [part for part in path if isinstance(part, str)]
    return _section(tuple(names[:-1]), model).model_fields[names[-1]]


def _section(path: KeyPath, model: str) -> type[BaseModel]:
    """The model class of the section at that path. model: a key of `MODELS`."""
    if path[:1] == ("model",):
        return ARGS[model] if len(path) > 1 else MODELS[model]
    section: Any = RunConfig.model_fields[str(path[0])].annotation if path else RunConfig
    return cast(type[BaseModel], section)


def _unknown_key(path: KeyPath, tree: Node, model: str) -> Problem:
    remedy = _known_key(path[:-1], str(path[-1]), model)
    return Problem(tree.key_place_of(path), dotted(tree.as_written(path)), None, "unknown key.", remedy)


def _known_key(parent: KeyPath, key: str, model: str) -> str:
    """The remedy: not supported yet, the same key in another section, the nearest key here, or all keys here."""
    prefix = "".join(f"{part}." for part in parent)
    if prefix + key in NOT_YET:
        return f"{NOT_YET[prefix + key]} not there yet: remove it."
    elsewhere = [name for name in _leaves(model) if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"Did you mean {enumerate_words(elsewhere)}?"
    keys = list(_section(parent, model).model_fields)
    if parent == ("model", "args") and model == "hf" and nearest(key, keys) is None:
        return f"Keys here: {', '.join(keys)}; the model's own stand under config."
    owners = _models_with(ALIASES.get(prefix + key, prefix + key))
    if owners:
        return f"It is for {enumerate_words(owners, 'and')}: set model.factory, or remove it."
    aliases = {
        alias.removeprefix(prefix): name
        for alias, name in ALIASES.items()
        if alias.startswith(prefix) and (parent != ("model", "args") or name.removeprefix(prefix) in keys)
    }
    known = dict.fromkeys(keys) | (aliases if parent else dict(SECTION_ALIASES))
    close = nearest(key, known)
    if close is not None:
        return f"Did you mean {(known[close] or close).removeprefix(prefix)}?"
    return f"Keys here: {', '.join(keys)}."


def _models_with(name: str) -> list[str]:
    """Built-in models that have this key of `model.args`."""
    section, _, key = name.rpartition(".")
    return [model for model, args in ARGS.items() if section == "model.args" and key in args.model_fields]


def _leaves(model: str) -> list[str]:
    paths: list[KeyPath] = [(name,) for name in RunConfig.model_fields]
    paths += [("model", "args")] if model in ARGS else []
    sections = {path: _section(path, model) for path in paths}
    return [".".join((*map(str, path), key)) for path, section in sections.items() for key in section.model_fields]
