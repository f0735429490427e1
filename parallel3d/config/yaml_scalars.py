"""Unquoted YAML words to values, and values to YAML text, by YAML 1.2's core rules: `3e-4` is a number.

PyYAML follows YAML 1.1, where `3e-4` is text, `1:30` is 90 and `no` is false.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

Scalar = str | int | float | bool | None

# Python rejects much longer numbers, and no key needs them.
_LONGEST_NUMBER = 64
_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEANS = {word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NOT_A_NUMBER = frozenset((".nan", ".NaN", ".NAN"))


def resolve_scalar(text: str) -> Scalar:
    """The value of an unquoted word."""
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITY.fullmatch(text) or text in _NOT_A_NUMBER:
        return float(text.replace(".", ""))
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as something else."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        theirs = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        if kind is not yaml.ScalarNode or not implicit[0]:
            return theirs
        ours = resolve_scalar(value)
        if isinstance(ours, str):
            return theirs
        name = {type(None): "null", bool: "bool", int: "int", float: "float"}[type(ours)]
        return f"tag:yaml.org,2002:{name}"

    def ignore_aliases(self, data: Any) -> bool:
        """Write a list that appears twice twice, without anchors."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Double quotes escape what a plain or folded text would lose, such as U+0085."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _represent_text)


def dump(values: Any) -> str:
    """YAML text that `yaml_positions` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None)
